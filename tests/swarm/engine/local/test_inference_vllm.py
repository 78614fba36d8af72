"""Real vLLM: what it must keep for every recorded token to be true. Pins the undocumented ways that we rely on."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from swarm.engine.local.inference import VllmInference
from swarm.engine.sampling.request_ids import own_id
from swarm.engine.seam import RequestFailed, RequestRefused, Sampled, SampledEvent, SampleRequest
from swarm.engine.tree import shared_length
from swarm.protocol.episodes import WeightsVersion
from tests.vllm_fixture import LoopThread

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is 2+3? Answer with a number."}],
    "temperature": 1.0,
    "max_tokens": 16,
    "seed": 3,
}
NOISE = 0.3
"""By how much a log-probability in bfloat16 may differ between batches: processors with tile instructions (AMX) add up in other
orders by the number of rows. Keys of other tokens, or of other weights, are off by more than 1."""
_COPIED = "vllm:external_prefix_cache_hits_total"
OTHER = {"messages": [{"role": "user", "content": "Name three colours of the rainbow."}]}


def ask(prompt_ids: list[int] | None = None, **fields: Any) -> SampleRequest:
    return SampleRequest(dialect="chat.completions", body=BODY | fields, prompt_ids=prompt_ids)


async def until(holds: Callable[[], Awaitable[bool]], limit_s: float = 30.0) -> None:
    async with asyncio.timeout(limit_s):
        while True:  # another process's state has no event to wait for
            if await holds():
                return
            await asyncio.sleep(0.05)


async def _sampled(vllm: VllmInference, requests: int) -> list[int]:
    """Tokens so far of each request in flight; zeros for those that have not begun."""
    counts = list((await vllm.sampled_so_far()).values())
    return [*counts, *[0] * (requests - len(counts))]


def children(pid: int | None) -> list[int]:
    return [int(text) for file in Path(f"/proc/{pid}/task").glob("*/children") for text in file.read_text().split()]


async def _down(vllm: VllmInference) -> bool:
    return not vllm.health.ready


async def streamed(vllm: VllmInference, request: SampleRequest) -> list[SampledEvent]:
    return [event async for event in vllm.stream(request)]


def version(step: int) -> WeightsVersion:
    return WeightsVersion(run_id="run-1", step=step)


def test_the_engine_samples_from_the_ids_that_it_is_given(vllm: VllmInference, vllm_loop: LoopThread) -> None:
    async def both() -> tuple[list[int], Sampled, list[SampledEvent]]:
        ids = await vllm.render("chat.completions", OTHER)
        return ids, await vllm.sample(ask(ids)), await streamed(vllm, ask(ids))

    ids, whole, events = vllm_loop.run(both())
    assert whole.prompt_ids == ids
    assert [event.prompt_ids for event in events if event.prompt_ids is not None] == [ids]
    assert "2+3" not in vllm.decode(whole.prompt_ids)
    (choice,) = whole.choices
    assert len(choice.sampled_ids) == len(choice.logprobs)
    assert [token for event in events for part in event.choices for token in part.sampled_ids] == choice.sampled_ids


def test_texts_are_sampled_from_given_ids_and_stamped_over_a_change_of_weights(
    vllm: VllmInference, vllm_loop: LoopThread, smollm2: Path
) -> None:
    async def over_a_change() -> tuple[list[int], list[Sampled]]:
        ids = await vllm.render("completions", {"prompt": "One, two,", "add_special_tokens": False})
        await vllm.publish(None, version(1))
        body: dict[str, Any] = {"prompt": "Nothing", "max_tokens": 120, "ignore_eos": True, "n": 2}
        asked = SampleRequest(dialect="completions", body=body, prompt_ids=ids)
        tasks = [asyncio.create_task(vllm.sample(asked)) for _ in range(2)]

        async def under_way() -> bool:
            return min(await _sampled(vllm, 4)) > 2

        await until(under_way)
        await vllm.publish(smollm2, version(2))
        return ids, list(await asyncio.gather(*tasks))

    ids, whole = vllm_loop.run(over_a_change())
    for sampled in whole:
        assert sampled.prompt_ids == ids
        assert [len(choice.logprobs) for choice in sampled.choices] == [120, 120]
        for choice in sampled.choices:
            assert [span.version.step for span in choice.versions] == [1, 2]


def test_the_answer_shows_what_the_client_asked_for_and_no_more(vllm: VllmInference, vllm_loop: LoopThread) -> None:
    plain = vllm_loop.run(vllm.sample(ask()))
    assert plain.answer["choices"][0]["logprobs"] is None
    assert plain.answer["choices"][0]["token_ids"] is None
    assert plain.answer["prompt_token_ids"] is None
    curious = vllm_loop.run(vllm.sample(ask(logprobs=True, top_logprobs=2, return_token_ids=True)))
    assert curious.answer["choices"][0]["token_ids"] == plain.choices[0].sampled_ids
    assert len(curious.answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    for event in vllm_loop.run(streamed(vllm, ask())):
        for choice in (event.data or {}).get("choices", ()):
            assert not choice.get("logprobs")
            assert not choice.get("token_ids")
            assert choice["delta"] or choice["finish_reason"]


def test_logprobs_are_those_after_temperature(vllm: VllmInference, vllm_loop: LoopThread) -> None:
    """At T=2 two tokens lie half as far apart as at T=1; the raw log-probabilities would be equal."""
    gaps = []
    for temperature in (2.0, 1.0):
        request = ask(temperature=temperature, max_tokens=1, logprobs=True, top_logprobs=5)
        (entry,) = vllm_loop.run(vllm.sample(request)).answer["choices"][0]["logprobs"]["content"]
        of = {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
        gaps.append(of["2"] - of["The"])
    assert gaps[0] == pytest.approx(gaps[1] / 2, abs=1e-3)
    assert gaps[0] > 0.1


def test_equal_seeds_give_equal_tokens_and_many_seeded_prompts_at_once_are_served(
    vllm: VllmInference, vllm_loop: LoopThread
) -> None:
    """A chunked prefill of a seeded request ends vLLM's engine on the CPU: 80 long prompts at once must not."""
    filler = " ".join(str(number) for number in range(120))

    async def many() -> list[Sampled]:
        requests = [
            ask(messages=[{"role": "user", "content": f"{filler} {number % 2}"}], seed=7, max_tokens=2)
            for number in range(80)
        ]
        return list(await asyncio.gather(*(vllm.sample(request) for request in requests)))

    assert len(vllm_loop.run(many())) == 80
    first, again = vllm_loop.run(vllm.sample(ask(seed=11))), vllm_loop.run(vllm.sample(ask(seed=11)))
    assert first.choices[0].sampled_ids == again.choices[0].sampled_ids


def test_equal_prompts_are_computed_once_up_to_their_last_token_and_answered_alike(
    vllm: VllmInference, vllm_loop: LoopThread
) -> None:
    """Three blocks and a tail; under new weights all are computed anew, also while earlier requests still run."""
    messages = [{"role": "user", "content": " ".join(str(number) for number in range(50))}]
    greedy = ask(messages=messages, temperature=0.0, max_tokens=24, ignore_eos=True)

    async def alone_then_many() -> tuple[Sampled, list[Sampled], int, int]:
        alone = await vllm.sample(greedy)
        await vllm.publish(vllm.settings.model_dir, version(1))
        before = await _copied(vllm)
        many = await asyncio.gather(*(vllm.sample(greedy) for _ in range(6)))
        between = await _copied(vllm)
        running = asyncio.create_task(vllm.sample(ask(messages=messages, max_tokens=120, ignore_eos=True)))

        async def under_way() -> bool:
            return min(await _sampled(vllm, 1)) > 2

        await until(under_way)
        await vllm.publish(None, version(2))
        many += [await vllm.sample(greedy)]
        await running
        return alone, many, between - before, await _copied(vllm) - between

    alone, many, copied, copied_later = vllm_loop.run(alone_then_many())
    for sampled in many:
        assert sampled.choices[0].sampled_ids == alone.choices[0].sampled_ids
        assert sampled.choices[0].logprobs == pytest.approx(alone.choices[0].logprobs, abs=NOISE)
    tail = (len(alone.prompt_ids) - 1) % 32
    assert tail > 0
    assert copied == 5 * tail
    assert copied_later == tail


async def _copied(vllm: VllmInference) -> int:
    """Tokens of prompts so far that were copied from another request, as vLLM counts them."""
    client = vllm._serving()
    async with client._http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return round(sum(float(line.split()[-1]) for line in lines if line.startswith(_COPIED)))


def test_an_unfit_request_is_refused_in_openais_format(vllm: VllmInference, vllm_loop: LoopThread) -> None:
    long = [{"role": "user", "content": "word " * 3000}]
    for request in (ask(messages=long), ask(temperature=-1), ask(use_beam_search=True)):
        with pytest.raises(RequestRefused) as refused:
            vllm_loop.run(vllm.sample(request))
        assert refused.value.status == 400
        assert refused.value.body["error"]["message"]
        with pytest.raises(RequestRefused):
            vllm_loop.run(streamed(vllm, request))


def test_closing_a_stream_stops_its_sampling(vllm: VllmInference, vllm_loop: LoopThread) -> None:
    async def start_and_leave() -> None:
        events = vllm.stream(ask(max_tokens=1500, ignore_eos=True))
        async for event in events:
            if event.choices:
                break
        assert await vllm.sampled_so_far()
        await events.aclose()

        async def gone() -> bool:
            await vllm.sample(ask(max_tokens=2))  # the engine forgets requests when it makes its next step
            return all(count <= 2 for count in (await vllm.sampled_so_far()).values())

        await until(gone)

    vllm_loop.run(start_and_leave())


def test_weights_change_under_calls_in_flight_and_every_token_says_which_sampled_it(
    vllm: VllmInference, vllm_loop: LoopThread, smollm2: Path
) -> None:
    async def over_a_change() -> tuple[list[Sampled], list[SampledEvent], Sampled]:
        await vllm.publish(None, version(1))
        long = {"max_tokens": 120, "ignore_eos": True}
        tasks = [asyncio.create_task(vllm.sample(ask(seed=seed, **long))) for seed in range(4)]
        several = asyncio.create_task(vllm.sample(ask(n=2, **long)))
        events: list[SampledEvent] = []
        change: asyncio.Task[None] | None = None
        async for event in vllm.stream(ask(**long)):
            events.append(event)
            if len(events) == 20:
                change = asyncio.create_task(vllm.publish(smollm2, version(2)))
        assert change is not None
        await change
        after = await vllm.sample(ask())
        return [*await asyncio.gather(*tasks), await several], events, after

    whole, events, after = vllm_loop.run(over_a_change())
    for sampled in whole:
        for choice in sampled.choices:
            assert [span.version.step for span in choice.versions] == [1, 2]
            assert (choice.versions[0].start, choice.versions[-1].end) == (0, 120)
            assert choice.versions[0].end == choice.versions[1].start
    steps = [
        span.version.step
        for event in events
        for choice in event.choices
        for span in choice.versions
        for _ in range(span.end - span.start)
    ]
    assert len(steps) == 120
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}
    assert [span.version.step for span in after.choices[0].versions] == [2]


def test_choices_that_finish_before_others_keep_the_weights_that_sampled_them(
    vllm: VllmInference, vllm_loop: LoopThread, smollm2: Path
) -> None:
    """Without streaming, vLLM answers once all choices have finished; the last one begins only when there is room for it."""
    room = vllm.settings.sequences

    async def last_one() -> int:
        counts = {own_id(name)[0]: count for name, count in (await vllm.sampled_so_far()).items()}
        return counts.get(room, 0)

    async def over_two_changes() -> Sampled:
        await vllm.publish(None, version(1))
        call = asyncio.create_task(vllm.sample(ask(n=room + 1, max_tokens=40, ignore_eos=True)))

        async def first_ones_are_under_way() -> bool:
            return min(await _sampled(vllm, room)) > 2

        async def last_one_is_under_way() -> bool:
            return await last_one() > 2

        await until(first_ones_are_under_way)
        assert not await last_one()
        await vllm.publish(smollm2, version(2))
        await until(last_one_is_under_way)
        await vllm.publish(smollm2, version(3))
        sampled = await call
        await vllm.sample(ask(max_tokens=2))
        assert len(await vllm.sampled_so_far()) <= 1  # none of the choices any more
        return sampled

    *first, last = vllm_loop.run(over_two_changes()).choices
    assert [[span.version.step for span in choice.versions] for choice in first] == [[1, 2]] * room
    assert [span.version.step for span in last.versions] == [2, 3]


def test_calls_wait_while_inference_sleeps_and_go_on_where_they_were(
    vllm: VllmInference, vllm_loop: LoopThread
) -> None:
    """On the CPU nothing leaves the memory, but requests are frozen and their keys and values dropped as on a GPU."""

    async def over_a_sleep() -> tuple[list[int], list[int], Sampled, Sampled]:
        long = asyncio.create_task(vllm.sample(ask(max_tokens=120, ignore_eos=True)))

        async def under_way() -> bool:
            return min(await _sampled(vllm, 1)) > 2

        await until(under_way)
        async with vllm.asleep():
            before = await _sampled(vllm, 1)
            short = asyncio.create_task(vllm.sample(ask()))
            await asyncio.sleep(0.5)
            after = await _sampled(vllm, 1)
            assert not long.done()
            assert not short.done()
        return before, after[:1], await long, await short

    before, after, long, short = vllm_loop.run(over_a_sleep())
    assert before == after
    assert len(long.choices[0].sampled_ids) == 120
    first, again = (each.choices[0] for each in (short, vllm_loop.run(vllm.sample(ask()))))
    alike = shared_length(first.sampled_ids, again.sampled_ids)
    assert alike > 0  # where two tokens are as good as equal, either may come
    assert first.logprobs[:alike] == pytest.approx(again.logprobs[:alike], abs=NOISE)


@pytest.mark.campaign
def test_a_child_that_dies_in_its_sleep_is_started_once_more_and_awake(
    vllm: VllmInference, vllm_loop: LoopThread
) -> None:
    async def killed_asleep() -> tuple[int, int | None]:
        async with vllm.asleep():
            first = vllm.process_id
            assert first is not None
            os.kill(first, signal.SIGKILL)

            async def started_again() -> bool:
                return vllm.process_id not in (first, None)

            await until(started_again)
            second = vllm.process_id
            assert second is not None
        await vllm.boot()
        assert (await vllm.sample(ask())).choices[0].sampled_ids
        return second, vllm.process_id

    second, now = vllm_loop.run(killed_asleep())
    assert second == now


@pytest.mark.campaign
def test_a_core_that_dies_leaves_one_traceback_however_many_calls_were_under_way(
    vllm: VllmInference, vllm_loop: LoopThread
) -> None:
    async def killed_under_calls() -> list[object]:
        calls = [asyncio.create_task(vllm.sample(ask(max_tokens=1000, min_tokens=1000))) for _ in range(8)]

        async def all_sample() -> bool:
            return all(count > 0 for count in await _sampled(vllm, len(calls)))

        await until(all_sample)
        (server,) = children(vllm.process_id)
        (core,) = children(server)
        os.kill(core, signal.SIGKILL)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: _down(vllm))
        await vllm.boot()
        return outcomes

    outcomes = vllm_loop.run(killed_under_calls())
    assert [type(outcome) for outcome in outcomes] == [RequestFailed] * 8
    before = vllm.settings.log_path.with_name(vllm.settings.log_path.name + ".1").read_text()
    assert "engine core exited unexpectedly" in before
    assert before.count("Traceback") == 1


@pytest.mark.campaign
def test_other_weights_give_other_logprobs_and_come_back_after_a_crash(
    vllm: VllmInference, vllm_loop: LoopThread, smollm2: Path, tmp_path: Path
) -> None:
    """Weights are published, the child is killed: it comes back by itself, with the published weights."""
    _write_noisy_copy(smollm2, tmp_path)

    async def through_a_crash() -> list[list[float]]:
        seen = []
        for directory, step in ((None, 3), (tmp_path, 4), (None, 5), (tmp_path, 6)):
            await vllm.publish(directory, version(step))
            seen.append((await vllm.sample(ask())).choices[0].logprobs)
        assert vllm.process_id is not None
        os.kill(vllm.process_id, signal.SIGKILL)
        await until(lambda: _down(vllm))
        await vllm.boot()
        seen.append((await vllm.sample(ask())).choices[0].logprobs)
        await vllm.publish(None, version(7))
        return seen

    own, noisy, own_again, noisy_again, after_crash = vllm_loop.run(through_a_crash())
    assert own == own_again
    assert noisy == noisy_again == after_crash
    assert all(math.isfinite(logprob) for logprob in noisy)
    assert own != noisy


def _write_noisy_copy(model: Path, out: Path) -> None:
    """The same checkpoint, its weights a little off."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    tensors = {
        name: tensor + 0.02 * torch.randn_like(tensor)
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
