"""A trial's end where its runs do not end together."""

from __future__ import annotations

import asyncio
import io
import itertools
from pathlib import Path
from typing import Any

import httpx
import pytest

from foundation.clock import ManualClock
from foundation.logs import level_of
from swarm.client import Episode, SwarmClient, Task, team
from swarm.client.tasks import TaskStream
from swarm.client.team import Partner
from swarm.client.trial import Trial, TrialFailed, main
from swarm.client.workflow import Workflow
from swarm.protocol.blueprint import HeldOut, TrialBlueprint
from tests.fakes.swarm_stub import RUN, SwarmStub

pytestmark = pytest.mark.anyio


class WaitingStub(SwarmStub):
    """Answers who waits for a change after the time that it is ready to wait."""

    clock: ManualClock

    def _handle(self, request: httpx.Request, path: str, body: dict[str, Any]) -> Any:
        if "wait_s" in request.url.params:
            self.clock.advance(float(request.url.params["wait_s"]))
        return super()._handle(request, path, body)


def tasks(split: str, seed: int, count: int | None, **parameters: object) -> TaskStream:
    return (Task(f"{split}-{number}", "") for number in itertools.islice(itertools.count(), count))


BLUEPRINT = TrialBlueprint(
    trial_key="t",
    server_url="http://stub",
    run_id=RUN,
    instrument_dir="",
    workflow="workflow.py",
    code_version="v1",
    parameters={},
    seed=1,
    group_size=2,
    concurrency=2,
    heldout=HeldOut(tasks=1, episodes=1, temperature=1.0),
)


async def test_a_run_that_nobody_plays_for_any_more_ends_its_trial_and_says_what_it_lacks() -> None:
    clock, stub = ManualClock(), WaitingStub()
    stub.clock = clock
    partner = SwarmStub(train_limit=0).client("http://other", clock=clock)
    swarm = stub.client(clock=clock)

    async def rollout(episode: Episode, task: Task) -> float | None:
        if episode.claim.kind == "eval":
            return 1.0
        async with team(solver=episode, planner=partner):
            raise AssertionError("the planner's run is over")

    async with swarm, partner, asyncio.timeout(20):
        trial = Trial(BLUEPRINT, swarm, Workflow(tasks, rollout), io.StringIO(), {"planner": Partner(partner, RUN)})
        with pytest.raises(TrialFailed, match=rf"run {RUN} at http://stub is at step 0 with 0 of the 0 groups"):
            await trial.carry_out()
    assert 100 < clock.monotonic() < 300


async def test_a_held_out_task_that_is_set_aside_costs_itself_alone_and_a_trial_goes_on_without_it() -> None:
    stub, fails = SwarmStub(train_limit=4), {"heldout-1"}

    async def rollout(episode: Episode, task: Task) -> float:
        if task.id in fails:
            raise KeyError("answer")
        return 1.0

    out = io.StringIO()
    blueprint = BLUEPRINT.model_copy(update={"heldout": HeldOut(tasks=3, episodes=1, temperature=1.0)})
    async with SwarmClient(
        "http://stub", client_id="c", client_version="v1", transport=stub.transport(), clock=ManualClock()
    ) as swarm:
        trial = Trial(blueprint, swarm, Workflow(tasks, rollout), out)
        await trial.carry_out()
    assert '"event": "done"' in out.getvalue()
    assert '"set_aside": 1' in out.getvalue()
    assert '"causes": {"rollout": 3}' in out.getvalue()


async def test_held_out_tasks_that_are_left_to_others_are_not_scored() -> None:
    stub, scored = SwarmStub(train_limit=4), list[str]()

    async def rollout(episode: Episode, task: Task) -> float:
        scored.append(task.id)
        return 1.0

    blueprint = BLUEPRINT.model_copy(update={"heldout": HeldOut(tasks=2, first=3, episodes=1, temperature=1.0)})
    async with SwarmClient(
        "http://stub", client_id="c", client_version="v1", transport=stub.transport(), clock=ManualClock()
    ) as swarm:
        await Trial(blueprint, swarm, Workflow(tasks, rollout), io.StringIO()).carry_out()
    assert {each for each in scored if each.startswith("heldout")} == {"heldout-3", "heldout-4"}


def test_a_log_level_that_is_none_is_refused_and_an_empty_one_is_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "blueprint.json"
    file.write_text(BLUEPRINT.model_dump_json())
    assert main([str(file)], {"SWARM_LOG_LEVEL": "INFOO"}) == 2
    assert capsys.readouterr().err.endswith("did you mean INFO?\n")
    assert level_of({"SWARM_LOG_LEVEL": " "}) == "INFO"
    assert level_of({"SWARM_LOG_LEVEL": "debug"}) == "DEBUG"
