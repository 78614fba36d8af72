"""Coding agents from npm, unchanged, in episodes: on the echo engine each, and in a campaign on vLLM with long prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serving import ServerProcess
from foundation.clock import SystemClock
from foundation.confinement import PORTS, landlock_version
from swarm.client import SwarmClient
from swarm.client.sync import SwarmClient as Synchronous
from swarm.engine.echo.engine import EchoEngine
from swarm.protocol.episodes import RecordedCall
from swarm.protocol.status import Phase
from tests.conformance.coding_agents import CodingAgent, Limits, coding_agents, installed, play, rehearse_agent
from tests.conformance.environments import NotInstalled
from tests.conformance.judgement import Judgement
from tests.conformance.relay import vllm_socket_of, witnessed
from tests.conformance.stage import Stage, staged
from tests.conformance.training import MISMATCH_LIMIT, REWARDS, spec_of, step_after
from tests.conformance.witness import Witness
from tests.conformance.witnessing import Witnessing
from tests.swarm.server.gateway.conftest import Served, served_by
from tests.tiny_llama import make_tiny_llama
from tests.vllm_fixture import LoopThread

pytestmark = pytest.mark.skipif(landlock_version() < PORTS, reason="this kernel cannot confine an agent")
LONG = Limits(context=1 << 20, answer=1024)
"""The echo engine's tokens are bytes."""


class WitnessedEcho(Witnessing, EchoEngine):
    """The echo engine with a witness."""

    def __init__(self, witness: Witness) -> None:
        super().__init__(model="echo", clock=SystemClock(), max_model_len=LONG.context)
        self.witness = witness


@pytest.fixture(scope="module")
def witness() -> Witness:
    return Witness()


@pytest.fixture(scope="module")
def served(witness: Witness, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    loop, engine = LoopThread(), WitnessedEcho(witness)
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

CONTEXT = 40_960


@pytest.mark.campaign
@pytest.mark.parametrize("name", ALL)
def test_a_coding_agent_is_recorded_and_trained_over_vllm(name: str, smollm2: Path, work: Path, tmp_path: Path) -> None:
    """A tiny model that holds an agent's prompt, with SmolLM2's tokens: what it says is noise, and cut at the limit."""
    agent = agent_of(name)
    make_tiny_llama(tmp_path / "long", context=CONTEXT, tokenizer=smollm2)
    judgements, metrics = over_vllm(
        agent, tmp_path / "long", CONTEXT, work, tmp_path, Limits(context=CONTEXT, answer=64)
    )
    for judgement in judgements:
        assert judgement.calls > 0
        # An agent may end with an error over an answer that was cut; what counts is its calls.
        assert [fault for fault in judgement.faults if not fault.startswith("the script fails")] == [], judgement
    assert metrics["tokens_trained"] > 0
    assert metrics["logprob_mismatch_mean"] < MISMATCH_LIMIT


def over_vllm(
    agent: CodingAgent, model: Path, context: int, work: Path, scratch: Path, limits: Limits
) -> tuple[list[Judgement], dict[str, float]]:
    """A group of two episodes on a server that is started here, and the step that is made of them. No tool is forced."""
    options = ("--max-model-len", str(context), "--max-num-seqs", "4", "--log-level", "warning")
    free = agent.model_copy(update={"tools": (), "calls": 1, "timelines": None})

    async def go(stage: Stage, witness: Witness, run_id: str) -> list[Judgement]:
        async with SwarmClient(stage.url) as swarm:
            return [
                await rehearse_agent(free, swarm, stage, witness, work, run_id=run_id, reward=reward, limits=limits)
                for reward in REWARDS
            ]

    with ServerProcess(scratch / "state", *options, engine="local", model=str(model)) as server:
        witness = Witness()
        with (
            witnessed(vllm_socket_of(server.state_dir), witness),
            staged(server.url) as stage,
            Synchronous(server.url) as swarm,
        ):
            run_id = swarm.start_run(spec_of()).run_id
            for status in swarm.statuses():
                if status.phase in (Phase.ROLLING, Phase.FAILED):
                    break
            judgements = asyncio.run(go(stage, witness, run_id))
            return judgements, step_after(swarm, run_id, 0)
