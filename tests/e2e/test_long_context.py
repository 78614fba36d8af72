"""Prompts of 32k tokens, as coding agents send them, over real vLLM: served, continued token by token, trained."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from bench.serving import ServerProcess
from swarm.client import SwarmClient
from swarm.protocol.episodes import EpisodeTrace
from swarm.protocol.runspec import BatchSpec, RunSpec, SamplingSpec
from tests.conformance.training import MISMATCH_LIMIT, REWARDS
from tests.tiny_llama import make_tiny_llama

CONTEXT = 40_960
LEAST = 32_768
SPEC = RunSpec(seed=1, batch=BatchSpec(tasks=1, group_size=2), sampling=SamplingSpec(temperature=1.0, max_tokens=24))


@pytest.mark.campaign
def test_episodes_of_32k_tokens_are_served_and_trained(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "long", context=CONTEXT)
    options = ("--max-model-len", str(CONTEXT), "--max-num-seqs", "4", "--log-level", "warning")
    with ServerProcess(tmp_path / "state", *options, engine="local", model=str(tmp_path / "long")) as server:
        traces, metrics, seconds = asyncio.run(_group(server.url))
    for trace in traces:
        first, second = trace.calls
        assert len(first.prompt_ids) >= LEAST
        assert second.prompt_ids[: len(first.prompt_ids) + len(first.sampled_ids)] == [
            *first.prompt_ids,
            *first.sampled_ids,
        ]
        assert (second.parent_call_id, second.fork_cause, trace.untrained) == (first.call_id, None, {})
    assert metrics["tokens_trained"] == sum(len(call.sampled_ids) for trace in traces for call in trace.calls)
    assert metrics["logprob_mismatch_mean"] < MISMATCH_LIMIT, (metrics, seconds)


async def _group(url: str) -> tuple[list[EpisodeTrace], dict[str, float], float]:
    """Two episodes of two turns, the step that is made of them, and how long all took."""
    rng, began = random.Random(0), time.monotonic()
    text = " ".join(rng.choice(("colour", "number", "answer", "weather")) for _ in range(LEAST))
    async with SwarmClient(url) as swarm:
        run = await swarm.start_run(SPEC)
        played = []
        for reward in REWARDS:
            async with swarm.episode(task_id="long", run_id=run.run_id) as episode:
                await _two_turns(episode.base_url, episode.api_key, text)
                episode.end(reward=reward)
            played.append(episode.id)
        async for status in swarm.statuses():
            if status.step >= 1:
                break
        (step,) = (await swarm.run(run.run_id, since_step=0)).steps
        return [await swarm.trace(each) for each in played], step.values, time.monotonic() - began


async def _two_turns(base_url: str, api_key: str, text: str) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=600) as client:
        messages = [{"role": "user", "content": text}]
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
            messages += [{"role": "assistant", "content": answer.choices[0].message.content or ""}]
            messages += [{"role": "user", "content": "Say it again."}]
