"""The frameworks where an answer calls its tool twice: on the echo engine, in as many timelines as with one call, with no other forks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.client.sync import SwarmClient
from tests.conformance.environments import NotInstalled, python_of
from tests.conformance.frameworks import Framework, declared
from tests.conformance.rehearsal import rehearse
from tests.conformance.training import spec_of
from tests.conformance.witness import Witness
from tests.conformance.witnessing import WitnessedEcho
from tests.swarm.server.gateway.conftest import Served, served_by
from tests.vllm_fixture import LoopThread

QUICK = ("openai", "anthropic", "curl")
"""The tests' own environment has these."""
LATER = tuple(each.name for each in declared() if each.name not in (*QUICK, "dspy"))
"""dspy has its calls written as text, by a grammar that the echo engine does not read."""


@pytest.fixture(scope="module")
def witness() -> Witness:
    return Witness()


@pytest.fixture(scope="module")
def served(witness: Witness, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    loop, engine = LoopThread(), WitnessedEcho(witness, max_model_len=1 << 17)
    engine.together = {"add": ("add", "add")}
    loop.run(engine.boot())
    with served_by(loop, engine, tmp_path_factory.mktemp("parallel"), spec_of().model_dump(mode="json")) as running:
        yield running
    loop.run(engine.shutdown())
    loop.close()


def interpreter_of(framework: Framework) -> Path:
    """The test is skipped where the framework cannot be installed."""
    if framework.name in QUICK:
        return Path(sys.executable)
    try:
        return python_of(framework)
    except NotInstalled as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(each, marks=pytest.mark.campaign) for each in LATER)])
def test_two_calls_of_one_answer_make_no_fork(name: str, served: Served, witness: Witness) -> None:
    (framework,) = declared([name])
    python = interpreter_of(framework)
    with SwarmClient(str(served.http.base_url)) as swarm:
        judgement = rehearse(framework, swarm, run_id=served.run_id, witness=witness, python=python)
        *_, played = swarm.ledger()
        calls = swarm.trace(played.episode_id).calls
    assert judgement.conforms, (judgement.faults, judgement.swarm)
    messages = [call.answer["choices"][0]["message"] for call in calls]
    assert {len(message["tool_calls"]) for message in messages if message.get("tool_calls")} == {2}
