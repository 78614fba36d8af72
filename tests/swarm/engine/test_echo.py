"""The echo engine: the contract of all engines, and what is its own (learning, reproducible draws, pace)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import fmean

import pytest

from foundation.clock import ManualClock
from swarm.engine.echo.engine import EchoEngine
from swarm.engine.seam import (
    EngineHealth,
    RequestRefused,
    RunContext,
    SampleRequest,
    TrainBatch,
    TrainEpisode,
    TrainGroup,
)
from swarm.protocol.algorithms import ALGORITHMS
from swarm.protocol.episodes import WeightsVersion
from swarm.protocol.runspec import RunSpec
from tests.contracts.engine_contract import EngineContract, chat, request, train_call

pytestmark = pytest.mark.anyio


@pytest.fixture
async def engine() -> AsyncIterator[EchoEngine]:
    engine = EchoEngine()
    await engine.boot()
    yield engine
    await engine.shutdown()


@pytest.fixture
def run_spec() -> RunSpec:
    return RunSpec.model_validate({"seed": 3, "batch": {"group_size": 4}, "optimizer": {"learning_rate": 4e-5}})


class TestEchoEngine(EngineContract):
    """The contract."""


async def learn(directory: Path, learning_rate: float, seed: int, steps: int = 12, **algorithm: object) -> list[float]:
    """Mean reward of each step when episodes are rewarded for the right word."""
    fields = {"seed": seed, "optimizer": {"learning_rate": learning_rate}, "algorithm": algorithm}
    spec = RunSpec.model_validate(fields)
    engine = EchoEngine()
    await engine.boot()
    await engine.open_run(RunContext(run_id="run-1", branch=0, spec=spec, directory=directory))
    means = []
    for step in range(1, steps + 1):
        groups = [await rewarded_group(engine, f"word{number}") for number in range(8)]
        outcome = await engine.train(TrainBatch(step=step, spec=spec, groups=groups))
        await engine.serve(WeightsVersion(run_id="run-1", branch=0, step=step))
        means.append(outcome.metrics["reward_mean"])
    return means


async def rewarded_group(engine: EchoEngine, word: str) -> TrainGroup:
    episodes = []
    for slot in range(8):
        sampled = await engine.sample(request(chat(f"Repeat {word}")))
        reward = float(sampled.answer["choices"][0]["message"]["content"] == word)
        call = train_call(f"{word}-{slot}", sampled)
        episodes.append(TrainEpisode(episode_id=f"{word}-{slot}", reward=reward, agent_rewards=None, calls=[call]))
    return TrainGroup(group_id=word, task_id=word, episodes=episodes)


async def test_the_policy_learns_and_a_higher_rate_learns_faster(tmp_path: Path) -> None:
    slow = await learn(tmp_path / "slow", 1e-5, seed=1)
    fast = await learn(tmp_path / "fast", 4e-5, seed=1)
    assert fmean(fast[:3]) < 0.35
    assert fmean(fast[-3:]) > fmean(slow[-3:]) + 0.2
    assert fmean(fast[-3:]) > 0.5


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
async def test_every_algorithm_teaches_it(tmp_path: Path, name: str) -> None:
    means = await learn(tmp_path, 1.2e-4, 1, steps=8, name=name, kl=0.01, kl_in="reward", loss_length=3)
    assert fmean(means[-2:]) > means[0] + 0.2


async def test_runs_with_equal_seeds_are_equal_and_with_other_seeds_differ(tmp_path: Path) -> None:
    first = await learn(tmp_path / "a", 4e-5, seed=1, steps=5)
    again = await learn(tmp_path / "b", 4e-5, seed=1, steps=5)
    other = await learn(tmp_path / "c", 4e-5, seed=2, steps=5)
    assert first == again
    assert first != other


async def test_recorded_logprobs_are_those_of_the_choice_at_its_temperature(
    engine: EchoEngine, run_spec: RunSpec, tmp_path: Path
) -> None:
    await engine.open_run(RunContext(run_id="run-1", branch=0, spec=run_spec, directory=tmp_path))
    seen = {}
    for seed in range(64):
        sampled = await engine.sample(request(chat("Say red", seed=seed, temperature=2.0)))
        text = sampled.answer["choices"][0]["message"]["content"]
        seen[text] = sum(sampled.choices[0].logprobs)
    assert set(seen) == {"red", "~der"}
    assert sum(math.exp(logprob) for logprob in seen.values()) == pytest.approx(1.0)
    assert seen["red"] == pytest.approx(-math.log1p(math.exp(1.0)))  # theta -2 at temperature 2


async def test_temperature_zero_always_gives_the_likelier_answer(
    engine: EchoEngine, run_spec: RunSpec, tmp_path: Path
) -> None:
    await engine.open_run(RunContext(run_id="run-1", branch=0, spec=run_spec, directory=tmp_path))
    texts = set()
    for seed in range(16):
        sampled = await engine.sample(request(chat("Say red", seed=seed, temperature=0)))
        texts.add(sampled.answer["choices"][0]["message"]["content"])
    assert texts == {"~der"}


async def test_a_required_tool_is_called(engine: EchoEngine) -> None:
    tool = {
        "type": "function",
        "function": {"name": "paint", "parameters": {"properties": {"hue": {"type": "string"}}}},
    }
    body = chat("Use red", tools=[tool], tool_choice="required", max_tokens=200)
    message = (await engine.sample(request(body))).answer["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "paint"
    assert "hue" in message["tool_calls"][0]["function"]["arguments"]


ADD = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
NO_WORD = [
    {"tools": [{"type": "function", "function": {"name": "add", "parameters": ADD}}], "tool_choice": "required"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": ADD}}},
]
"""What is asked for has one answer: no field of it could hold a word."""


@pytest.mark.parametrize("asked", NO_WORD)
async def test_an_answer_without_room_for_a_word_is_certain(engine: EchoEngine, asked: dict[str, object]) -> None:
    body = chat("Add", max_tokens=200, n=2, logprobs=True, top_logprobs=2, **asked)
    sampled = await engine.sample(request(body))
    assert [set(choice.logprobs) for choice in sampled.choices] == [{0.0}, {0.0}]
    for choice in sampled.answer["choices"]:
        calls = choice["message"].get("tool_calls")
        said = calls[0]["function"]["arguments"] if calls else choice["message"]["content"]
        assert said == '{"a": 0}'
        assert all(len(token["top_logprobs"]) == 1 for token in choice["logprobs"]["content"])
    streamed = [choice async for event in engine.stream(request(body)) for choice in event.choices]
    assert [token for choice in streamed for token in choice.sampled_ids] == [
        token for choice in sampled.choices for token in choice.sampled_ids
    ]


async def test_an_answer_without_a_choice_teaches_nothing(
    engine: EchoEngine, run_spec: RunSpec, tmp_path: Path
) -> None:
    await engine.open_run(RunContext(run_id="run-1", branch=0, spec=run_spec, directory=tmp_path))
    episodes = []
    for reward in (0.0, 1.0):
        call = train_call(f"c-{reward}", await engine.sample(request(chat("Add", max_tokens=200, **NO_WORD[0]))))
        episodes.append(TrainEpisode(episode_id=f"ep-{reward}", reward=reward, agent_rewards=None, calls=[call]))
    group = TrainGroup(group_id="gr-1", task_id="t", episodes=episodes)
    outcome = await engine.train(TrainBatch(step=1, spec=run_spec, groups=[group]))
    assert (outcome.metrics["loss"], outcome.metrics["weights_change"]) == (0.0, 0.0)


async def test_a_stop_string_is_sampled_but_not_shown(engine: EchoEngine) -> None:
    sampled = await engine.sample(request(chat("Say abcdef", stop="d")))
    assert sampled.answer["choices"][0]["message"]["content"] in {"abc", "~fe"}
    assert engine.decode(sampled.choices[0].sampled_ids) in {"abcd", "~fed"}


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"temperature": -1}, {"n": "two"}, {"logit_bias": {"5": 1}}])
async def test_what_it_cannot_honour_is_refused(engine: EchoEngine, fields: dict[str, object]) -> None:
    with pytest.raises(RequestRefused) as refused:
        await engine.sample(request(chat("Say red", **fields)))
    assert next(iter(fields)) in refused.value.body["error"]["message"]


async def test_an_empty_prompt_is_refused_as_nothing_of_it_could_be_trained(engine: EchoEngine) -> None:
    for prompt in ("", []):
        with pytest.raises(RequestRefused, match="prompt is empty"):
            await engine.sample(SampleRequest(dialect="completions", body={"prompt": prompt}))


async def test_latency_is_waited_out_on_the_clock() -> None:
    clock = ManualClock()
    engine = EchoEngine(latency_s=2.0, clock=clock)
    await engine.boot()
    call = asyncio.ensure_future(engine.sample(request(chat("Say red"))))
    await asyncio.sleep(0)
    clock.advance(1.9)
    await asyncio.sleep(0)
    assert not call.done()
    clock.advance(0.2)
    assert (await call).choices[0].sampled_ids


async def test_subscribers_hear_of_boot_and_shutdown() -> None:
    heard: list[EngineHealth] = []
    engine = EchoEngine()
    engine.subscribe(heard.append)
    await engine.boot()
    await engine.shutdown()
    assert [health.ready for health in heard] == [True, False]
