"""Clients that are edited and restarted while a run goes on: nothing waits for the old code, and what it earned is compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from foundation.clock import ManualClock
from swarm.protocol.episodes import DropReason, EpisodeAbort
from swarm.protocol.errors import ErrorCode
from swarm.protocol.status import Phase, QuarantineRequest, VersionReport
from swarm.protocol.teams import Decider, EpisodeCommit, EpisodePreparation, TeamResult
from tests.fakes.engine import FaultyEngine
from tests.swarm.server.state.world import World, running

pytestmark = pytest.mark.anyio


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": None})
        yield world


async def version(world: World, name: str) -> VersionReport:
    found = (await world.service.report(world.run_id)).versions
    return next(one for one in found if one.client_version == name)


# -- replacing a client -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["drop", "train"])
async def test_an_edited_client_does_not_wait_for_groups_that_the_old_one_left_unfinished(
    tmp_path: Path, policy: str
) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"partial_groups": policy}, max_staleness=1)
        started = world.clock.monotonic()
        for task in ("t-1", "t-2", "t-3", "t-4"):
            await world.episode(task, client_version="old")
        # No patience is waited for: the partial policy is asked at once, and steps are made of what it keeps.
        assert (await world.claim("t-5", client_version="new")).slot == 0
        assert (await world.claim("t-6", client_version="new", wait_s=60)).slot == 0
        assert world.clock.monotonic() == started
        dropped = (await world.states()).count("dropped partial_group")
        assert dropped == (4 if policy == "drop" else 0)


async def test_an_edited_client_does_not_wait_for_the_leases_of_one_that_was_killed(world: World) -> None:
    orphans = [await world.claim(task, client_version="old") for task in ("t-1", "t-1", "t-2", "t-2")]
    for task in ("t-3", "t-4"):
        assert (await world.claim(task, client_version="new")).slot == 0
    refusal = await world.refused(world.claim("t-5", client_version="new"))
    assert refusal.code is ErrorCode.DRAINING
    # The old leases may still end, or run out; their groups are then settled without any patience.
    await world.call(orphans[0])
    await world.end(orphans[0])
    assert (await world.service.entry(orphans[0].episode_id)).state == "ended"
    await world.service.abort(orphans[1].episode_id, EpisodeAbort(lease=orphans[1].lease, reason="killed"))
    assert (await world.service.status()).pool.groups_ready == 1


async def test_new_code_of_an_unknown_client_opens_its_first_group_at_once(world: World) -> None:
    for task in ("t-1", "t-1", "t-2", "t-2"):
        await world.claim(task, client_version="old")
    fresh = await world.claim("t-3", client_version="new", client_id="c-2")
    assert fresh.slot == 0
    assert (await world.claim("t-3", client_version="new", client_id="c-2")).group_id == fresh.group_id
    refusal = await world.refused(world.claim("t-4", client_version="new", client_id="c-2"))
    assert refusal.code is ErrorCode.DRAINING


async def test_groups_with_a_client_that_goes_on_are_not_given_up(world: World) -> None:
    shared = await world.episode("t-1", client_version="old", client_id="c-1")
    mate = await world.claim("t-1", client_version="old", client_id="c-2")
    await world.service.abort(mate.episode_id, EpisodeAbort(lease=mate.lease, reason="crash"))
    await world.claim("t-2", client_version="new", client_id="c-1")
    again = await world.claim("t-1", client_version="old", client_id="c-2")
    assert (again.group_id, again.slot) == (shared.group_id, 1)


async def test_a_client_that_comes_back_to_a_group_takes_its_place_again(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"mix": {"a": {"ratio": 1}, "b": {"ratio": 1}}})
        left = await world.claim("a-1", mix="a", client_version="old")
        await world.claim("b-1", mix="b", client_version="old", client_id="c-2")
        await world.claim(
            "b-2", mix="b", client_version="new"
        )  # code that nobody knows yet opens its first group at once
        refusal = await world.refused(world.claim("b-3", mix="b", client_version="new"))
        assert "it is the turn of a" in refusal.detail
        back = await world.claim("a-1", mix="a", client_version="old")
        assert (back.group_id, back.slot) == (left.group_id, 1)
        refusal = await world.refused(world.claim("a-2", mix="a", client_version="old", client_id="c-2"))
        assert refusal.code is ErrorCode.DRAINING


async def test_a_member_of_a_team_still_counts_as_its_groups_client_after_a_restart(tmp_path: Path) -> None:
    engine, clock = FaultyEngine(), ManualClock()
    async with running(tmp_path, engine, clock) as world:
        run_id = await world.begin(batch={"group_size": 3})
        shared = await world.episode("t-1", client_version="old", client_id="c-1")
        member = await world.claim("t-1", client_version="old", client_id="c-2")
        await world.call(member)
        decider = Decider(url="http://127.0.0.1:1", episode_id="ep-elsewhere", key="swd_k")
        wish = EpisodePreparation(lease=member.lease, decider=decider, result=TeamResult(reward=1.0))
        await world.service.prepare(member.episode_id, wish, "sealed")
    async with running(tmp_path, FaultyEngine().adopt(engine), clock) as world:
        world.run_id = run_id
        await world.until_phase(Phase.ROLLING)
        await world.claim("t-2", client_version="new", client_id="c-1")
        await world.service.commit(member.episode_id, EpisodeCommit(lease=member.lease))
        again = await world.claim("t-1", client_version="old", client_id="c-2")
        assert (again.group_id, again.slot) == (shared.group_id, 2)


async def test_a_crash_costs_one_episode_and_never_its_group(world: World) -> None:
    first = await world.episode("t-1", 0.0)
    for _ in range(5):
        crashed = await world.claim("t-1")
        assert crashed.group_id == first.group_id
        await world.service.abort(crashed.episode_id, EpisodeAbort(lease=crashed.lease, reason="tool down"))
    expired = await world.claim("t-1", idle_limit_s=10)
    await world.passes(11)
    last = await world.episode("t-1", 1.0)
    assert last.group_id == first.group_id == expired.group_id
    assert (await world.service.status()).pool.groups_ready == 1


# -- shift of reward ------------------------------------------------------------------------------------------------------


async def test_the_shift_of_reward_between_versions_is_reported_in_run_and_ledger(world: World) -> None:
    for rewards, name in (((0.0, 0.5, 0.0, 0.5), "1"), ((1.0, 0.5, 1.0, 0.5), "2")):
        for index, reward in enumerate(rewards):
            last = await world.episode(f"{name}-{index // 2}", reward, client_version=name)
        await world.until_step(int(name))
    first, second = await version(world, "1"), await version(world, "2")
    assert (first.episodes, first.reward_mean, first.before, first.shift) == (4, 0.25, None, None)
    assert (second.episodes, second.reward_mean, second.before, second.shift) == (4, 0.75, "1", 0.5)
    assert second.reward_std == 0.25
    assert second.shift_stderr == pytest.approx((2 * 0.0625 / 4) ** 0.5)
    assert (await world.service.entry(last.episode_id)).version_shift == 0.5
    entries = (await world.service.ledger()).entries
    assert [entry.version_shift for entry in entries] == [None] * 4 + [0.5] * 4


async def test_families_of_tasks_are_compared_with_themselves_alone(world: World) -> None:
    await world.episode("t-1", 1.0, client_version="1", mix="math")
    await world.episode("t-2", 0.0, client_version="2", mix="web")
    assert (await version(world, "2")).before is None


async def test_versions_outlive_the_server(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin()
        await world.episode("t-1", 0.0, client_version="1")
        await world.episode("t-1", 1.0, client_version="2")
        before = (await world.service.report(run_id)).versions
    async with running(tmp_path) as world:
        assert (await world.service.report(run_id)).versions == before


# -- quarantine -----------------------------------------------------------------------------------------------------------


async def test_a_quarantined_version_is_not_trained_and_may_claim_evaluations_only(world: World) -> None:
    await world.episode("t-1", client_version="bad")
    running_one = await world.claim("t-1", client_version="bad")
    await world.episode("t-2", client_version="bad")
    wish = QuarantineRequest(client_version="bad", reason="rewards itself")
    report = await world.service.quarantine(world.run_id, wish, "ann")
    assert [one.quarantined for one in report.versions] == ["rewards itself (by ann)"]
    assert await world.states() == ["ended", "running", "dropped quarantined"]
    refusal = await world.refused(world.claim("t-3", client_version="bad"))
    assert (refusal.code, refusal.fields["client_version"]) == (ErrorCode.FORBIDDEN, "bad")
    assert (await world.claim("e-1", kind="eval", client_version="bad")).group_id is None
    await world.call(running_one)
    await world.end(running_one)
    entry = await world.service.entry(running_one.episode_id)
    assert (entry.reason, entry.detail, entry.reward) == (DropReason.QUARANTINED, "rewards itself (by ann)", 1.0)
    assert (await version(world, "bad")).episodes == 3


async def test_quarantine_makes_room_for_others_at_once_and_can_be_lifted(world: World) -> None:
    for task in ("t-1", "t-1", "t-2", "t-2"):
        await world.episode(task, client_version="bad") if task == "t-1" else await world.claim(
            task, client_version="bad"
        )
    await world.claim("t-3", client_version="good", client_id="c-2")  # its first group comes at once
    waiting = asyncio.create_task(world.claim("t-4", client_version="good", client_id="c-2", wait_s=60))
    await world.pause()
    assert not waiting.done()
    await world.service.quarantine(world.run_id, QuarantineRequest(client_version="bad"), "ann")
    assert (await waiting).slot == 0
    lifted = QuarantineRequest(client_version="bad", quarantined=False)
    await world.service.quarantine(world.run_id, lifted, "ann")
    assert (await version(world, "bad")).quarantined is None
    assert (await world.claim("t-2", client_version="bad", idempotency_key="again", kind="eval")).slot is None
