"""How long an answer is waited for: learnt from earlier ones, doubled after a hang, never below half a minute."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from pathlib import Path

import pytest

from foundation.clock import ManualClock
from swarm.engine.training.limits import LEAST_LIMIT_S, Expected, ModelWork, Unanswered, Work
from swarm.models.folder import ModelFolder
from swarm.protocol.runspec import RunSpec
from tests.swarm.engine.batches import PROMPT, batch, call, episode, group

pytestmark = pytest.mark.anyio


def work(amount: float = 1.0, prior_s: float = 100.0) -> Work:
    return Work(kind="train", amount=amount, prior_s=prior_s)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_first_answer_is_waited_for_three_times_its_prior_and_later_ones_by_what_they_took() -> None:
    expected = Expected()
    assert expected.limit_s(work()) == 300
    expected.took(work(amount=10), 200.0)
    assert expected.limit_s(work(amount=10)) == 600
    assert expected.limit_s(work(amount=20)) == 1200
    assert expected.limit_s(work(amount=0.1)) == LEAST_LIMIT_S
    assert expected.limit_s(Work(kind="checkpoint", prior_s=20)) == 60


def test_the_slowest_of_the_newest_answers_counts_and_is_forgotten_in_time() -> None:
    expected = Expected()
    for seconds in (50.0, *[20.0] * 7):
        expected.took(work(), seconds)
    assert expected.limit_s(work()) == 150
    expected.took(work(), 20.0)
    assert expected.limit_s(work()) == 60


def test_a_hang_doubles_the_limit_until_an_answer_comes() -> None:
    expected = Expected()
    expected.hung(work(prior_s=1))
    expected.hung(work(prior_s=1))
    assert expected.limit_s(work(prior_s=1)) == 4 * LEAST_LIMIT_S
    expected.took(work(), 1.0)
    assert expected.limit_s(work()) == LEAST_LIMIT_S


async def test_an_answer_within_the_limit_counts_and_one_that_lies_there_when_it_is_over_too() -> None:
    clock, expected = ManualClock(), Expected()
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    asking = asyncio.ensure_future(expected.answer(clock, work(), answer, done=lambda _: True))
    await turns()
    clock.advance(299)
    await turns()
    assert not asking.done()
    clock.advance(100)  # as when this process was stopped meanwhile
    answer.set_result("done")
    assert await asking == "done"
    assert expected.limit_s(work()) == 3 * 399


async def test_who_does_not_answer_is_given_up_at_the_limit() -> None:
    clock, expected = ManualClock(), Expected()
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    asking = asyncio.ensure_future(expected.answer(clock, work(), answer, done=lambda _: True))
    for seconds in (300, 1):
        await turns()
        assert not asking.done()
        clock.advance(seconds)
    with pytest.raises(Unanswered, match="300 s"):
        await asking
    assert answer.cancelled()
    assert expected.limit_s(work()) == 600


async def test_how_long_a_refusal_took_says_nothing() -> None:
    clock, expected = ManualClock(), Expected()
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    answer.set_result("refused")
    await expected.answer(clock, work(), answer, done=lambda _: False)
    assert expected.limit_s(work()) == 300


def test_more_tokens_longer_contexts_and_more_passes_are_more_work(tiny_llama: ModelFolder) -> None:
    def amount(length: int, **fields: object) -> float:
        calls = [call(f"c{slot}", PROMPT, [slot + 3] * length) for slot in range(2)]
        one = batch(group("g", *(episode(f"e{slot}", float(slot), each) for slot, each in enumerate(calls))), **fields)
        return ModelWork(model_dir=tiny_llama.path).train(one, first=False).amount

    assert amount(400) > 2 * amount(100)
    assert amount(4000) > 10 * amount(400)
    assert amount(16_000) > 3 * amount(8_000)  # of one call each token is compared with all before it
    assert amount(100, optimizer={"epochs": 3}) == 3 * amount(100)


def test_the_first_step_of_a_process_and_other_sizes_of_what_is_kept_are_judged_apart(
    tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    model, full = ModelWork(model_dir=tiny_llama.path), RunSpec()
    adapters = RunSpec.model_validate({"parameters": "lora"})
    one = batch(group("g", episode("e", 1.0, call("c", PROMPT, [3]))))
    kinds = [
        model.train(one, first=True).kind,
        model.train(one, first=False).kind,
        model.checkpoint(full).kind,
        model.checkpoint(adapters).kind,
        model.open_run(full, tmp_path, None).kind,
    ]
    (tmp_path / "step-00000001").mkdir()
    kinds.append(model.open_run(full, tmp_path, None).kind)
    assert len(set(kinds)) == len(kinds)
    assert model.open_run(full, tmp_path, 0).kind == kinds[4]


def test_a_large_models_engine_may_be_silent_for_longer(tiny_llama: ModelFolder) -> None:
    small = ModelWork(model_dir=tiny_llama.path)
    assert small.silence_s(4096) == LEAST_LIMIT_S
    assert small.silence_s(10**9) > LEAST_LIMIT_S


def test_a_long_prompt_is_compared_with_itself_and_takes_longer_than_its_tokens_alone(tmp_path: Path) -> None:
    shape = [896, 560_000]
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * math.prod(shape)]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 896}))
    half_a_billion = ModelWork(model_dir=tmp_path)
    alone_s = 2 * math.prod(shape) * 32_768 / 120e9
    assert half_a_billion.silence_s(32_768) == pytest.approx(3 * 7.1 * alone_s, rel=0.01)


def test_files_that_went_into_the_systems_cache_say_nothing_of_a_disk_that_must_take_them(
    tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    model, spec = ModelWork(model_dir=tiny_llama.path, start_s=1.0), RunSpec()
    (tmp_path / "step-00000001").mkdir()
    for asked, per_parameter in (
        (model.checkpoint(spec), 12),
        (model.open_run(spec, tmp_path, None), 12),
        (model.open_run(spec, tmp_path, 0), 4),
        (model.export(spec), 4),
    ):
        expected, slow_disk_s = Expected(), per_parameter * model.parameters / 50e6
        for _ in range(8):
            expected.took(asked, 0.0)
        assert expected.expected_s(asked) == pytest.approx(slow_disk_s)
