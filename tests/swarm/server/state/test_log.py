"""The server's log: one short line for each event of a server or run, and never one for each call or episode."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from swarm.engine.seam import EngineHealth
from swarm.protocol.episodes import CallFailure, Cause
from swarm.protocol.status import Phase
from tests.fakes.engine import FaultyEngine
from tests.swarm.server.state.world import World, running

pytestmark = pytest.mark.anyio
MANY = 24


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "swarm")
    return caplog


def lines(log: pytest.LogCaptureFixture) -> list[str]:
    """What was logged since the last look: level and text, each id as `…`."""
    found = [f"{record.levelname[0]} {record.getMessage()}" for record in log.records if record.name == "swarm.server"]
    log.clear()
    return [re.sub(r"(run|ep|gr|srv)-[0-9a-z]+", r"\1-…", line) for line in found]


async def calls_fail(world: World, episodes: int) -> None:
    """One call of each episode fails on the server's side."""
    failure = CallFailure(cause=Cause.SERVER, reason="engine_down", detail="the engine does not answer")
    for number in range(episodes):
        lease = await world.claim(f"t-{number}", kind="eval")
        call = world.service.open_call(lease.episode_id, lease.lease)
        world.service.close_call(call, (await world.sampled(call)).model_copy(update={"failure": failure}))


async def test_a_run_that_completes_has_a_line_for_its_start_each_step_and_its_end(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 2})
        for _ in range(2):
            await world.batch()
        await world.until_status("complete")
    assert lines(log) == [
        "I run run-… started by tester",
        "I run run-… step 1: 4 episodes, reward 0.500, 0.0 s",
        "I run run-… step 2: 4 episodes, reward 0.500, 0.0 s",
        "I run run-… is complete: it reached its limit of 2 steps",
    ]


async def test_a_run_that_is_stopped_says_what_it_waits_for_and_when_it_is_over(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await world.claim()
        await world.service.stop_run(world.run_id)
        await world.call(lease)
        await world.end(lease)
        await world.until_status("stopped")
    assert lines(log)[1:] == [
        "I run run-… is being stopped: 1 open episode may still end, within 120 s (limits.drain_limit_s)",
        "I run run-… is stopped, at step 0",
        "I groups dropped as run_ended: 1 (last: group gr-… of task 't-1' dropped: run_ended)",
    ]


async def test_a_run_that_fails_says_why_in_one_line(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    engine = FaultyEngine()
    async with running(tmp_path, engine) as world:
        await world.begin()
        engine.refuse = "the loss is not finite\n  in these tensors: ..."
        await world.batch()
        await world.until_status("failed")
    assert lines(log)[1:] == ["E run run-… failed: the loss is not finite"]


async def test_a_restart_says_which_run_goes_on_and_how_many_episodes_it_closed(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    engine = FaultyEngine()
    async with running(tmp_path, engine) as world:
        await world.begin(batch={"tasks": MANY})
        for number in range(MANY):
            await world.claim(f"t-{number}")
    lines(log)
    async with running(tmp_path, FaultyEngine().adopt(engine)) as world:
        await world.until_phase(Phase.ROLLING)
    assert lines(log) == [f"I run run-… (running) goes on at step 0; episodes closed as server_restarted: {MANY}"]


async def test_an_engine_that_fails_for_good_is_one_line_without_the_end_of_its_log(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as world:
        await world.until_phase(Phase.IDLE)
        reason = "inference ended with status 1 (log: inference.log)\nTraceback (most recent call last):"
        for _ in range(2):
            world.engine.tell(EngineHealth(ready=False, failed_for_good=True, failures=5, reason=reason))
    assert lines(log) == ["E the engine failed for good: inference ended with status 1 (log: inference.log)"]


async def test_calls_that_fail_together_are_one_warning_with_their_number(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lines(log)
        await calls_fail(world, MANY)
        assert lines(log) == []
        await world.passes(5)
        (line,) = lines(log)
        what = f"W calls failed on the server's side (engine_down): {MANY}"
        assert line == f"{what} (last: a call of episode ep-…: the engine does not answer)"
        await world.passes(60)
        assert lines(log) == []
        await calls_fail(world, 1)
    assert [line.partition(" (last")[0] for line in lines(log)] == [
        "W calls failed on the server's side (engine_down): 1"
    ], "also where the server stops before it is summed up"


async def test_episodes_that_expire_together_are_one_line(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        for number in range(MANY):
            await world.claim(f"t-{number}", kind="eval", idle_limit_s=10)
        lines(log)
        await world.passes(11)
        await world.passes(5)
    (line,) = lines(log)
    assert line.startswith(f"I episodes expired: {MANY} (last: episode ep-… of c-1 expired: no call and no renewal")
