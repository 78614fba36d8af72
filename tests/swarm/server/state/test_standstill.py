"""What a run stands still for is named in its status, and an episode that never ends costs its slot, not the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from foundation.clock import ManualClock
from swarm.protocol.episodes import EpisodeAbort, EpisodeRenewal
from swarm.protocol.errors import ErrorCode
from swarm.protocol.runspec import EPISODE_LIMIT_S, RunSpec
from swarm.protocol.status import WaitingFor
from swarm.server.state.status import LONG_QUIET_S, QUIET_S
from swarm.server.timers import LOOK_EVERY_S
from tests.fakes.engine import FaultyEngine
from tests.swarm.server.state.world import World, running

pytestmark = pytest.mark.anyio


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path, FaultyEngine(), ManualClock()) as made:
        yield made


async def waited_for(world: World) -> WaitingFor | None:
    return (await world.service.status()).waiting_for


async def looks(world: World, seconds: float) -> None:
    """Time passes in steps in which the server looks."""
    for _ in range(int(seconds / LOOK_EVERY_S)):
        await world.passes(LOOK_EVERY_S)


async def all_but_one(world: World) -> float:
    """Three episodes of the step's four are in the pool, and one sleeps for ever; returns since when."""
    sleeper = await world.claim("t-1", client_id="asleep")
    await world.call(sleeper)
    for task, reward in (("t-1", 1.0), ("t-2", 1.0), ("t-2", 0.0)):
        await world.episode(task, reward)
    return world.clock.now()


async def test_a_rollout_that_sleeps_for_ever_is_named_and_expires_and_the_run_goes_on(world: World) -> None:
    await world.begin(limits={"steps": 2, "max_episode_s": 600.0})
    since = await all_but_one(world)
    refused = await world.refused(world.claim("t-3"))
    assert refused.code is ErrorCode.DRAINING
    await looks(world, QUIET_S - LOOK_EVERY_S)
    assert await waited_for(world) is None
    revision = world.service.watchers.revision
    await looks(world, 2 * LOOK_EVERY_S)
    assert await waited_for(world) == WaitingFor(task_id="t-1", client_id="asleep", since=since)
    assert world.service.watchers.revision > revision
    for _ in range(10):  # the lease is renewed all the time
        await looks(world, 50)
        for live in list(world.service.state.live.values()):
            await world.service.renew(live.row.episode_id, EpisodeRenewal(lease=live.lease))
    await looks(world, 100)
    assert "dropped expired" in await world.states()
    lost = await waited_for(world)
    assert lost is None or lost.client_id is None
    await world.episode("t-1", 0.0)
    await world.until_step(1)
    assert await waited_for(world) is None


async def test_the_task_is_named_whose_free_slots_nobody_claims(world: World) -> None:
    await world.begin(batch={"group_patience_s": 1000.0})
    for task in ("t-1", "t-2", "t-2"):
        await world.episode(task)
    since = world.clock.now()
    await looks(world, QUIET_S + LOOK_EVERY_S)
    assert await waited_for(world) == WaitingFor(task_id="t-1", client_id=None, since=since)


async def test_a_run_that_others_can_go_on_with_is_not_said_to_wait(world: World) -> None:
    await world.begin()
    lease = await world.claim("t-1")
    await looks(world, QUIET_S + LOOK_EVERY_S)
    assert await waited_for(world) is None
    await looks(world, LONG_QUIET_S)
    waited = await waited_for(world)
    assert waited is not None
    assert waited.task_id == "t-1"
    await world.call(lease)
    await world.end(lease)
    assert await waited_for(world) is None


async def test_evaluations_that_go_on_hide_nothing_and_a_step_under_way_waits_for_nobody(world: World) -> None:
    await world.begin()
    await all_but_one(world)
    for _ in range(4):
        await world.claim("held-out", kind="eval")
        await looks(world, LOOK_EVERY_S)
    waited = await waited_for(world)
    assert waited is not None
    assert waited.client_id == "asleep"
    world.engine.gate = asyncio.Event()
    sleeper = next(one for one in world.service.state.live.values() if one.row.client_id == "asleep")
    await world.service.abort(sleeper.row.episode_id, EpisodeAbort(lease=sleeper.lease, reason="tired"))
    await world.episode("t-1", 0.0)
    await looks(world, QUIET_S + LOOK_EVERY_S)
    assert await waited_for(world) is None
    world.engine.gate.set()


async def test_the_limit_of_an_episode_is_the_runs_unless_its_claim_states_one(world: World) -> None:
    await world.begin()
    usual = await world.claim("t-1", idle_limit_s=80_000.0)
    own = await world.claim("t-1", idle_limit_s=80_000.0, max_episode_s=2 * EPISODE_LIMIT_S)
    evaluation = await world.claim("t-9", kind="eval", idle_limit_s=80_000.0)
    now = world.clock.now()
    assert usual.expires_at == evaluation.expires_at == now + EPISODE_LIMIT_S
    assert own.expires_at == now + 2 * EPISODE_LIMIT_S
    await world.service.patch_run(world.run_id, {"limits": {"max_episode_s": 50}}, None, "tester")
    later = await world.claim("t-2", idle_limit_s=80_000.0)
    assert later.expires_at == now + 50
    await world.passes(51)
    assert (await world.states()).count("dropped expired") == 1


def test_what_a_spec_says_where_it_says_nothing_of_episodes_is_written_as_before() -> None:
    assert "max_episode_s" not in RunSpec().model_dump_json()
    stated = RunSpec.model_validate({"limits": {"max_episode_s": 60}})
    assert RunSpec.model_validate_json(stated.model_dump_json()) == stated
