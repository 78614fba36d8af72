"""Coding agents from npm, unchanged, in episodes: on the echo engine each, and in a campaign on vLLM with long prompts."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bench.serving import ServerProcess
from foundation.confinement import PORTS, landlock_version
from studies.repo_tasks.workflow import rollout, tasks
from swarm.client import AgentFailed, SwarmClient, Task
from swarm.client.sync import SwarmClient as Synchronous
from swarm.protocol.episodes import EpisodeTrace, RecordedCall
from swarm.protocol.runspec import BatchSpec, RunSpec, SamplingSpec
from swarm.protocol.status import Phase
from tests.conformance.coding_agents import CodingAgent, Limits, coding_agents, installed, play, rehearse_agent
from tests.conformance.environments import NotInstalled
from tests.conformance.judgement import Judgement, faults_against, faults_of_record
from tests.conformance.relay import vllm_socket_of, witnessed
from tests.conformance.stage import Stage, staged
from tests.conformance.training import MISMATCH_LIMIT, spec_of, step_after
from tests.conformance.witness import Witness
from tests.conformance.witnessing import WitnessedEcho
from tests.swarm.server.gateway.conftest import Served, served_by
from tests.tiny_llama import make_tiny_llama
from tests.vllm_fixture import LoopThread

pytestmark = pytest.mark.skipif(landlock_version() < PORTS, reason="this kernel cannot confine an agent")
LONG = Limits(context=1 << 20, answer=1024)
"""The echo engine's tokens are bytes."""


@pytest.fixture(scope="module")
def witness() -> Witness:
    return Witness()


@pytest.fixture(scope="module")
def engine(witness: Witness) -> WitnessedEcho:
    return WitnessedEcho(witness, max_model_len=LONG.context)


@pytest.fixture(scope="module")
def served(engine: WitnessedEcho, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    loop = LoopThread()
    loop.run(engine.boot())
    with served_by(loop, engine, tmp_path_factory.mktemp("agents"), spec_of().model_dump(mode="json")) as running:
        yield running
    loop.run(engine.shutdown())
    loop.close()


@pytest.fixture(scope="module")
def stage(served: Served) -> Iterator[Stage]:
    with staged(str(served.http.base_url)) as stage:
        yield stage


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "README.md").write_text("# A thing\n")
    return folder


def agent_of(name: str) -> CodingAgent:
    """The agent, installed; the test is skipped where npm cannot be reached."""
    (agent,) = coding_agents([name])
    try:
        installed(agent)
    except NotInstalled as error:
        pytest.skip(str(error))
    return agent


def judged(
    agent: CodingAgent, stage: Stage, witness: Witness, work: Path, run_id: str, rewards: tuple[float, ...]
) -> list[Judgement]:
    async def go() -> list[Judgement]:
        async with SwarmClient(stage.url) as swarm:
            return [
                await rehearse_agent(agent, swarm, stage, witness, work, run_id=run_id, reward=reward, limits=LONG)
                for reward in rewards
            ]

    return asyncio.run(go())


QUICK = ("codex", "pi")
ALL = tuple(agent.name for agent in coding_agents())


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.campaign) for each in ALL]
)
def test_a_coding_agent_is_recorded_as_it_was_sampled_and_trained(
    name: str, served: Served, stage: Stage, witness: Witness, work: Path
) -> None:
    agent = agent_of(name)
    with Synchronous(stage.url) as swarm:
        before = swarm.run(served.run_id).step
    for judgement in judged(agent, stage, witness, work, served.run_id, (1.0, 0.0)):
        assert judgement.conforms, (judgement.faults, judgement.swarm)
    with Synchronous(stage.url) as swarm:
        assert step_after(swarm, served.run_id, before)["tokens_trained"] > 0


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("codex", "exec_command"),
        pytest.param("claude-code", "Bash", marks=pytest.mark.campaign),
        pytest.param("opencode", "bash", marks=pytest.mark.campaign),
        pytest.param("pi", "bash", marks=pytest.mark.campaign),
    ],
)
def test_what_a_provider_could_not_answer_is_asked_again_and_recorded_once(
    name: str, tool: str, served: Served, stage: Stage, work: Path
) -> None:
    calls = played(agent_of(name), served, stage, work, [tool], LONG, lost=1)
    assert len(stage.asked) == len(calls) + 1
    assert {call.fork_cause for call in calls} == {None}
    assert calls[-1].parent_call_id == calls[-2].call_id


@pytest.mark.parametrize(
    ("name", "tools"),
    [
        ("codex", ("exec_command", "update_goal", "exec_command")),
        ("pi", ("bash", "read", "bash")),
        pytest.param("claude-code", ("Bash", "Read", "Bash"), marks=pytest.mark.campaign),
        pytest.param("opencode", ("bash", "todowrite", "bash"), marks=pytest.mark.campaign),
    ],
)
def test_tools_that_are_called_in_one_answer_stay_in_one_timeline(
    name: str,
    tools: tuple[str, ...],
    engine: WitnessedEcho,
    served: Served,
    stage: Stage,
    witness: Witness,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "together", {tools[0]: tools})
    monkeypatch.setattr(engine, "says", True)
    witness.forget()
    calls = played(agent_of(name), served, stage, work, [tools[0]] * 2, LONG)
    assert faults_against(witness.seen, calls) + faults_of_record(calls) == []
    own = [call for call in calls if call.agent is None]
    assert_one_timeline(own)
    assert [names_called(call) for call in own] == [tools, tools, ()]
    results = [message["tool_call_id"] for message in own[-1].request["messages"] if message["role"] == "tool"]
    assert len(set(results)) == 2 * len(tools)


@pytest.mark.campaign
def test_sub_agents_of_one_answer_are_conversations_of_their_own(
    engine: WitnessedEcho, served: Served, stage: Stage, witness: Witness, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "together", {"Agent": ("Agent", "Bash", "Agent")})
    witness.forget()
    calls = played(agent_of("claude-code"), served, stage, work, ["Agent"], LONG)
    assert faults_against(witness.seen, calls) + faults_of_record(calls) == []
    assert_one_timeline([call for call in calls if call.agent is None])
    others = [call for call in calls if call.agent is not None]
    assert [(call.agent, call.parent_call_id, call.fork_cause) for call in others] == [("subagent", None, None)] * 2


def assert_one_timeline(calls: list[RecordedCall]) -> None:
    """Each call continues the one before, and none forks."""
    parents = [None, *(call.call_id for call in calls[:-1])]
    assert [(call.parent_call_id, call.fork_cause) for call in calls] == [(parent, None) for parent in parents]


def names_called(call: RecordedCall) -> tuple[str, ...]:
    message = call.answer["choices"][0]["message"]
    return tuple(each["function"]["name"] for each in message.get("tool_calls") or ())


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "tool", "context", "forks"),
    [
        ("codex", "exec_command", 40_000, {"tools_changed", "history_changed"}),
        ("claude-code", "Bash", 52_000, set()),
        ("opencode", "bash", 31_500, {"history_changed"}),
    ],
)
def test_a_compaction_ends_in_forks_that_have_a_name_or_in_a_conversation_of_its_own(
    name: str, tool: str, context: int, forks: set[str], served: Served, stage: Stage, work: Path
) -> None:
    calls = played(agent_of(name), served, stage, work, [tool], Limits(context=context, answer=512))
    assert {call.fork_cause for call in calls if call.fork_cause} == forks
    beginnings = [call for call in calls if call.parent_call_id is None]
    assert len(beginnings) >= 2


def played(
    agent: CodingAgent, served: Served, stage: Stage, work: Path, tools: list[str], limits: Limits, lost: int = 0
) -> list[RecordedCall]:
    """The calls of an episode."""

    async def go() -> list[RecordedCall]:
        async with SwarmClient(stage.url) as swarm:
            stage.lose(lost)
            episode_id, outcome = await play(
                agent, swarm, stage, work, run_id=served.run_id, reward=1.0, limits=limits, tools=tools, kind="eval"
            )
            assert outcome.succeeded, outcome
            return list((await swarm.trace(episode_id)).calls)

    calls = asyncio.run(go())
    assert stage.refused == []
    return calls


# -- over vLLM -----------------------------------------------------------------------------------------------------------

CONTEXT, ANSWER = 40_960, 64
SPEC = RunSpec(
    seed=1, batch=BatchSpec(tasks=2, group_size=4), sampling=SamplingSpec(temperature=1.0, max_tokens=ANSWER)
)


@pytest.mark.campaign
@pytest.mark.parametrize("name", ALL)
def test_eight_episodes_of_repo_tasks_are_recorded_and_trained_over_vllm(
    name: str, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model that holds an agent's prompt, with SmolLM2's tokens: what it says is noise, and cut at the limit."""
    programs = installed(agent_of(name)) / ".bin"
    monkeypatch.setenv("PATH", os.pathsep.join([str(programs), os.environ["PATH"]]))
    make_tiny_llama(tmp_path / "long", context=CONTEXT, tokenizer=smollm2)
    options = ("--max-model-len", str(CONTEXT), "--max-num-seqs", "4", "--log-level", "warning")
    witness = Witness()
    with (
        ServerProcess(tmp_path / "state", *options, engine="local", model=str(tmp_path / "long")) as server,
        witnessed(vllm_socket_of(server.state_dir), witness),
        Synchronous(server.url) as swarm,
    ):
        run_id = swarm.start_run(SPEC).run_id
        for status in swarm.statuses():
            if status.phase in (Phase.ROLLING, Phase.FAILED):
                break
        traces = asyncio.run(mended(server.url, run_id, name))
        metrics = step_after(swarm, run_id, 0)
    calls = [call for trace in traces for call in trace.calls]
    forks = Counter(call.fork_cause for call in calls if call.fork_cause)
    print(name, [len(trace.calls) for trace in traces], max(len(call.prompt_ids) for call in calls), forks, metrics)
    assert [len(trace.calls) > 0 for trace in traces] == [True] * SPEC.batch.tasks * SPEC.batch.group_size
    assert faults_against(witness.seen, calls) == []
    assert [fault for trace in traces for fault in faults_of_record(trace.calls)] == []
    assert metrics["tokens_trained"] > 0
    assert metrics["logprob_mismatch_mean"] < MISMATCH_LIMIT


async def mended(url: str, run_id: str, name: str) -> list[EpisodeTrace]:
    """Each repository of a step as often as a group has episodes. Every second one is said to be right: noise mends none."""
    settings: dict[str, Any] = {"agent": name, "turns": 4, "context": CONTEXT, "answer_tokens": ANSWER}
    async with SwarmClient(url) as swarm:

        async def play(task: Task, number: int) -> str:
            async with swarm.episode(task_id=task.id, run_id=run_id) as episode:
                with suppress(
                    AgentFailed
                ):  # it may end with an error over an answer that was cut; what counts is its calls
                    await rollout(episode, task)
                episode.end(reward=float(number % 2))
            return episode.id

        found = []
        for task in tasks("train", 1, SPEC.batch.tasks, **settings):
            found += await asyncio.gather(*(play(task, number) for number in range(SPEC.batch.group_size)))
        return [await swarm.trace(each) for each in found]
