"""The whole verl engine on the processor: two ranks, one replica over both, one engine for all tests of this module."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import math
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from foundation.clock import SystemClock
from swarm.engine.local import checkpoints as of_any_engine
from swarm.engine.local.adapters import folder_weights
from swarm.engine.local.trained_model import Chat, export_model
from swarm.engine.local.trainer import LocalTrainer
from swarm.engine.seam import EngineDown, EngineError, EngineHealth, RunContext, TrainBatch, TrainerCrashed
from swarm.engine.training.channel import Publish, Resume
from swarm.engine.training.limits import LEAST_LIMIT_S
from swarm.engine.training.weights_digest import WeightsDigest
from swarm.engine.verl.engine import VerlEngine, VerlLayout
from swarm.main import main
from swarm.models.folder import ModelFolder
from swarm.protocol.episodes import WeightsVersion
from swarm.protocol.runspec import RunSpec
from swarm.server.storage.reader import Reader
from tests.contracts.engine_contract import EngineContract, batch_of, chat, request, sampled_group, train_call
from tests.swarm.cli import stored
from tests.swarm.engine.batches import branching_batch
from tests.swarm.engine.plain_grpo import PlainGrpo, distribution
from tests.swarm.server.state import world as worlds

pytestmark = [
    pytest.mark.campaign,  # its boot alone takes a minute
    pytest.mark.anyio,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: `make verl`"),
]

_LOG = logging.getLogger(__name__)
MEAN_TOLERANCE = 0.1
"""Two bfloat16 implementations of one small random model."""
NAMED_S = 30.0
"""What hangs is named so long after its limit at most."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def engine(
    anyio_backend: str, cpu_platform: None, tiny_llama: ModelFolder, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[VerlEngine]:
    layout = VerlLayout(
        max_model_len=512,
        ranks_per_node=2,
        tensor_parallel=2,
        max_num_seqs=16,
        sampling_memory=0.05,
        kv_cache_bytes=64 << 20,
        tokens_per_rank=2048,
        sleep=True,
        offload=frozenset({"parameters", "optimizer"}),
    )
    made = VerlEngine(tiny_llama, layout, logs=tmp_path_factory.mktemp("verl") / "logs", clock=SystemClock())
    try:
        await made.boot()
        yield made
    finally:
        await made.shutdown()


def spec_of(engine: VerlEngine, **fields: Any) -> RunSpec:
    made = RunSpec.model_validate({"batch": {"group_size": 4}, "optimizer": {"learning_rate": 1e-3}} | fields)
    return made.computed_in(engine.info.dtype)


def adapters_spec(engine: VerlEngine) -> RunSpec:
    parameters = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}
    return spec_of(engine, parameters=parameters, optimizer={"learning_rate": 1e-2})


@pytest.fixture
def run_spec(engine: VerlEngine) -> RunSpec:
    return spec_of(engine)


class TestVerlEngine(EngineContract):
    """What every engine keeps."""


class TestVerlAdapters(EngineContract):
    """The same with adapters, for which ranks and replicas are started anew once."""

    @pytest.fixture
    def run_spec(self, engine: VerlEngine) -> RunSpec:
        return adapters_spec(engine)


class TestVerlGspo(EngineContract):
    """The same with ratios of whole calls."""

    @pytest.fixture
    def run_spec(self, engine: VerlEngine) -> RunSpec:
        return spec_of(engine, algorithm={"name": "gspo", "importance_correction": "truncated_call"})


async def test_adapters_are_served_as_they_are_trained_and_leave_the_hosted_weights_alone(
    engine: VerlEngine, run_spec: RunSpec, tmp_path: Path
) -> None:
    body = chat("Say red", seed=5, temperature=0.0)
    await engine.open_run(RunContext(run_id="run-whole", branch=0, spec=run_spec, directory=tmp_path / "whole"))
    hosted = (await engine.sample(request(body))).choices[0]
    spec = adapters_spec(engine)
    await engine.open_run(RunContext(run_id="run-adapted", branch=0, spec=spec, directory=tmp_path / "adapted"))
    began = (await engine.sample(request(body))).choices[0]
    assert began.sampled_ids == hosted.sampled_ids
    for step in (1, 2):
        outcome = await engine.train(await batch_of(engine, spec, step))
        assert outcome.metrics["logprob_mismatch_mean"] < MEAN_TOLERANCE
        await engine.serve(WeightsVersion(run_id="run-adapted", branch=0, step=step))
    changed = (await engine.sample(request(body))).choices[0]
    assert changed.logprobs != began.logprobs
    await engine.open_run(RunContext(run_id="run-whole", branch=0, spec=run_spec, directory=tmp_path / "whole"))
    again = (await engine.sample(request(body))).choices[0]
    assert (again.sampled_ids, again.logprobs) == (hosted.sampled_ids, hosted.logprobs)


async def test_recorded_log_probabilities_are_the_ranks_before_and_after_a_step(
    engine: VerlEngine, run_spec: RunSpec, tmp_path: Path
) -> None:
    await engine.open_run(RunContext(run_id="run-same", branch=0, spec=run_spec, directory=tmp_path))
    for step in (1, 2):
        outcome = await engine.train(await batch_of(engine, run_spec, step))
        assert outcome.metrics["logprob_mismatch_mean"] < MEAN_TOLERANCE
        await engine.serve(WeightsVersion(run_id="run-same", branch=0, step=step))


async def test_two_ranks_take_the_step_of_plain_grpo(
    engine: VerlEngine, tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    made = branching_batch(dtype="bfloat16")
    await engine.open_run(RunContext(run_id="run-plain", branch=0, spec=made.spec, directory=tmp_path))
    outcome = await engine.train(made)
    plain = PlainGrpo(tiny_llama.path).step(made)
    norm = math.sqrt(sum(float(part.norm()) ** 2 for part in plain.gradient.values()))
    assert outcome.metrics["grad_norm"] == pytest.approx(norm, rel=0.02)
    assert outcome.metrics["loss"] == pytest.approx(plain.loss, abs=1e-3)


async def test_calls_go_on_where_they_were_when_replicas_slept_through_a_step(
    engine: VerlEngine, run_spec: RunSpec, tmp_path: Path
) -> None:
    await engine.open_run(RunContext(run_id="run-asleep", branch=0, spec=run_spec, directory=tmp_path))
    batch = await batch_of(engine, run_spec, 1)
    body = chat("Tell a long story.", max_tokens=400, ignore_eos=True, seed=1, temperature=0.0)
    alone = await engine.sample(request(body))
    events = engine.stream(request(body))
    ids = [token for choice in (await anext(aiter(events))).choices for token in choice.sampled_ids]
    await engine.train(batch)
    ids += [token async for event in events for choice in event.choices for token in choice.sampled_ids]
    assert ids == alone.choices[0].sampled_ids


async def test_a_call_over_a_change_of_weights_says_so_and_can_be_trained(
    engine: VerlEngine, run_spec: RunSpec, tmp_path: Path
) -> None:
    await engine.open_run(RunContext(run_id="run-over", branch=0, spec=run_spec, directory=tmp_path))
    await engine.train(await batch_of(engine, run_spec, 1))
    body = chat("Tell a long story.", max_tokens=400, ignore_eos=True, seed=1)
    long = asyncio.create_task(engine.sample(request(body)))
    events = engine.stream(request(body))
    await anext(aiter(events))
    await engine.serve(WeightsVersion(run_id="run-over", branch=0, step=1))
    streamed = [span.version.step async for event in events for choice in event.choices for span in choice.versions]
    assert {0, 1} == set(streamed)
    assert streamed == sorted(streamed)
    sampled = await long
    assert [span.version.step for span in sampled.choices[0].versions] in ([0, 1], [1])  # [1]: it had not begun yet
    group = await sampled_group(engine, "over", "Say blue")
    group.episodes[0].calls[:] = [train_call("long", sampled)]
    outcome = await engine.train(TrainBatch(step=2, spec=run_spec, groups=[group]))
    assert outcome.metrics["logprob_mismatch_mean"] < 2 * MEAN_TOLERANCE


async def test_a_replica_answers_nobody_without_its_key(engine: VerlEngine, run_spec: RunSpec, tmp_path: Path) -> None:
    await engine.open_run(RunContext(run_id="run-key", branch=0, spec=run_spec, directory=tmp_path))
    url = engine.sampling._replicas[0].client.url
    async with httpx.AsyncClient(base_url=url, trust_env=False) as stranger:
        asked = await stranger.post("/v1/chat/completions", json={**chat("Say red"), "model": "tiny-llama"})
        counted = await stranger.post("/tokenize", json={"prompt": "Say red", "model": "tiny-llama"})
        called = await stranger.post("/collective_rpc", json={"method": "weights_digest"})
    assert {asked.status_code, counted.status_code, called.status_code} == {401}


async def test_what_the_ranks_cannot_do_is_refused_when_the_run_is_opened(
    engine: VerlEngine, run_spec: RunSpec, tmp_path: Path
) -> None:
    for fields, said in (
        ({"dtype": "float32"}, "--dtype"),
        ({"parameters": {"rank": 4, "targets": ["q_porj"]}}, "did you mean 'q_proj'"),
        ({"optimizer": {"name": "adafactor"}}, "'adamw'"),
        ({"algorithm": {"name": "ppo"}}, "trains no critic"),
    ):
        spec = RunSpec.model_validate(run_spec.model_dump() | fields)
        with pytest.raises(EngineError, match=said):
            await engine.open_run(RunContext(run_id="run-other", branch=0, spec=spec, directory=tmp_path))


async def test_a_checkpoint_is_whole_or_passed_over(engine: VerlEngine, run_spec: RunSpec, tmp_path: Path) -> None:
    run = RunContext(run_id="run-kept", branch=0, spec=run_spec, directory=tmp_path)
    await engine.open_run(run)
    for step in (1, 2):
        await engine.train(await batch_of(engine, run_spec, step))
        assert await engine.checkpoint() == step
    broken = tmp_path / "step-00000002" / "model_world_size_2_rank_1.pt"
    broken.write_bytes(broken.read_bytes()[:-1] + b"x")
    assert await engine.open_run(run) == 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".unfinished-")]


@pytest.mark.parametrize("trained", ["adapters", "all weights"])
async def test_a_checkpoint_is_the_model_that_the_replicas_serve_for_export_chat_and_replay(
    engine: VerlEngine, run_spec: RunSpec, tiny_llama: ModelFolder, tmp_path: Path, trained: str
) -> None:
    spec = adapters_spec(engine) if trained == "adapters" else run_spec
    run = RunContext(run_id="run-read", branch=0, spec=spec, directory=tmp_path / "run")
    await engine.open_run(run)
    await engine.train(await batch_of(engine, spec, 1))
    await engine.checkpoint()
    found = of_any_engine.read(run.directory, 1)
    assert await served_digest(engine, 1) == digest_of(found.weights, tiny_llama, trained)

    await engine.serve(WeightsVersion(run_id="run-read", branch=0, step=1))
    exported = export_model(tiny_llama, found, tmp_path / "exported")
    sampled = await engine.sample(request(chat("Say red", seed=3)))
    logp_S, _ = distribution(AutoModelForCausalLM.from_pretrained(exported.path), train_call("c", sampled))
    mismatch = (logp_S.detach() - torch.tensor(sampled.choices[0].logprobs)).abs().mean()
    assert float(mismatch) < MEAN_TOLERANCE

    checkpoints = ((tiny_llama, found), (exported, None), (tiny_llama, None))
    from_checkpoint, from_export, hosted = (_chatted(model, checkpoint) for model, checkpoint in checkpoints)
    assert from_checkpoint == from_export
    assert from_checkpoint != hosted

    second = await batch_of(engine, spec, 2)
    expected = await engine.train(second)
    trainer = LocalTrainer(
        tiny_llama,
        log_path=tmp_path / "trainer.log",
        clock=SystemClock(),
        on_health=lambda _: None,
        dtype=engine.info.dtype,
    )
    try:
        await trainer.boot()
        assert await trainer.open_run(run, 1) == 1
        again = await trainer.train(second)
        assert await trainer.checkpoint() == 2
    finally:
        await trainer.shutdown()
    for name in ("loss", "grad_norm", "weights_change"):
        assert again.metrics[name] == pytest.approx(expected.metrics[name], rel=0.05, abs=1e-3), name

    assert await engine.open_run(run) == 2  # from the local engine's checkpoint
    assert await served_digest(engine, 2) == digest_of(
        of_any_engine.read(run.directory, 2).weights, tiny_llama, trained
    )
    assert (await engine.train(await batch_of(engine, spec, 3))).metrics["weights_change"] > 0


@pytest.mark.parametrize("trained", ["adapters", "all weights"])
async def test_swarm_replay_makes_a_step_from_a_checkpoint_of_the_ranks_as_they_made_it(
    engine: VerlEngine,
    run_spec: RunSpec,
    tiny_llama: ModelFolder,
    tmp_path: Path,
    trained: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worlds, "PATIENCE_S", stored.LIMIT_S)
    spec = adapters_spec(engine) if trained == "adapters" else run_spec
    fields = spec.model_dump(mode="json", include={"dtype", "parameters", "optimizer"})
    fields |= {"limits": {"steps": 2}, "checkpoint": {"every_steps": 1, "keep": 2}}
    run_id = await stored.run_on(engine, tmp_path, tiny_llama, **fields)
    asked = ["replay", run_id, "--state-dir", str(tmp_path), "--from-step", "1"]
    assert await asyncio.to_thread(main, asked) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["step"], line["recorded_on"]) == (2, "verl")
    with closing(Reader(tmp_path / "pool" / "pool.sqlite")) as reader:
        (recorded,) = reader.steps(run_id, 1)
    for name in ("loss", "grad_norm", "weights_change"):
        assert line["values"][name] == pytest.approx(recorded.values[name], rel=0.05, abs=1e-3), name


def _chatted(model: ModelFolder, checkpoint: of_any_engine.Checkpoint | None) -> str:
    chatting = Chat.with_checkpoint(model, checkpoint, system=None, temperature=1.0, max_tokens=100, seed=0)
    return "".join(chatting.answer("Say red"))


async def served_digest(engine: VerlEngine, step: int) -> str | None:
    """Of what the replicas have received of this step."""
    reply = await engine.driver.ask(Publish(step=step))
    await engine.driver.ask(Resume())
    return reply.checksum


def digest_of(weights: dict[str, torch.Tensor], model: ModelFolder, trained: str) -> str:
    """Of the weights of a checkpoint, under the names that the ranks send them by."""
    digest = WeightsDigest()
    digest.add((folder_weights(weights) if trained == "adapters" else with_tied(model.path, weights)).items())
    return digest.hexdigest()


def with_tied(path: Path, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with those that the model only knows under another name, as the ranks send them."""
    model = AutoModelForCausalLM.from_pretrained(path)
    by_place = {weight.data_ptr(): name for name, weight in model.named_parameters()}
    return {name: weights[by_place[weight.data_ptr()]] for name, weight in model.state_dict().items()}


async def test_weights_of_another_step_are_not_served(engine: VerlEngine, run_spec: RunSpec, tmp_path: Path) -> None:
    await engine.open_run(RunContext(run_id="run-step", branch=0, spec=run_spec, directory=tmp_path))
    with pytest.raises(EngineError, match="the trainer is at step 0"):
        await engine.serve(WeightsVersion(run_id="run-step", branch=0, step=2))
    assert (await engine.sample(request(chat("Say red")))).choices[0].versions[0].version.step == 0


async def test_a_rank_that_dies_takes_all_with_it_and_the_run_goes_on_from_its_checkpoint(
    engine: VerlEngine, run_spec: RunSpec, tmp_path: Path
) -> None:
    run = RunContext(run_id="run-killed", branch=0, spec=run_spec, directory=tmp_path)
    await engine.open_run(run)
    await engine.train(await batch_of(engine, run_spec, 1))
    await engine.serve(WeightsVersion(run_id="run-killed", branch=0, step=1))
    await engine.checkpoint()
    second = await batch_of(engine, run_spec, 2)
    expected = await engine.train(second)
    assert await engine.open_run(run) == 1
    os.kill(_a_rank(engine), signal.SIGKILL)
    with pytest.raises(TrainerCrashed):
        await engine.train(second)
    with pytest.raises(EngineDown):
        await engine.sample(request(chat("Say red")))
    assert await engine.open_run(run) == 1
    assert (await engine.sample(request(chat("Say red")))).choices[0].versions[0].version.step == 1
    assert engine.driver.health.failures == 1
    again = await engine.train(second)
    assert engine.driver.health.failures == 0
    for name in ("loss", "grad_norm", "weights_change"):
        assert again.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-6)


@pytest.mark.campaign
async def test_a_rank_that_is_stopped_is_named_and_all_is_started_anew_whether_it_works_or_rests(
    engine: VerlEngine, run_spec: RunSpec, tmp_path: Path
) -> None:
    heard: list[EngineHealth] = []
    engine.subscribe(heard.append)
    run = RunContext(run_id="run-stopped", branch=0, spec=run_spec, directory=tmp_path)
    await engine.open_run(run)
    await engine.train(await batch_of(engine, run_spec, 1))
    await engine.serve(WeightsVersion(run_id="run-stopped", branch=0, step=1))
    await engine.checkpoint()
    second = await batch_of(engine, run_spec, 2)
    expected = await engine.train(second)
    assert await engine.open_run(run) == 1
    stopped_at = time.time()
    os.kill(_a_rank(engine), signal.SIGSTOP)
    async with asyncio.timeout(LEAST_LIMIT_S + NAMED_S):
        with pytest.raises(TrainerCrashed, match="has not answered"):
            await engine.train(second)
    found_at = time.time()
    assert _hung_since(heard) == pytest.approx(stopped_at, abs=5)
    assert await engine.open_run(run) == 1
    _log_figures("while it works", stopped_at, found_at)
    again = await engine.train(second)
    for name in ("loss", "grad_norm", "weights_change"):
        assert again.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-6)
    assert await engine.open_run(run) == 1
    heard.clear()
    stopped_at = time.time()
    os.kill(_a_rank(engine), signal.SIGSTOP)
    async with asyncio.timeout(LEAST_LIMIT_S + NAMED_S):
        while True:  # another process's state has no event to wait for
            if not engine.driver.health.ready:
                break
            await asyncio.sleep(0.05)
    found_at = time.time()
    assert stopped_at - NAMED_S <= _hung_since(heard) <= found_at
    assert await engine.open_run(run) == 1
    _log_figures("while it rests", stopped_at, found_at)
    assert (await engine.sample(request(chat("Say red")))).choices[0].versions[0].version.step == 1


def _log_figures(when: str, stopped_at: float, found_at: float) -> None:
    took = (found_at - stopped_at, time.time() - stopped_at)
    _LOG.warning("a rank was stopped %s, found %.1f s later, over %.1f s later", when, *took)


def _hung_since(heard: list[EngineHealth]) -> float:
    """The last sign of life of what was found hung, as Unix time."""
    return next(health.hung_since for health in heard if health.hung_since is not None)


def _a_rank(engine: VerlEngine) -> int:
    reaper = engine.driver.process_id
    assert reaper is not None
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in _below(reaper)}
    return next(pid for pid, title in titles.items() if title.startswith(b"ray::RankWorker"))


def _below(pid: int) -> list[int]:
    """Every living process that came from this one."""
    children = [int(text) for file in Path(f"/proc/{pid}/task").glob("*/children") for text in file.read_text().split()]
    return [*children, *(other for child in children for other in _below(child))]
