"""What clients may rely on: leases, groups, claims, ends, runs. Time is a ManualClock; disk and engine are real enough."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from foundation.clock import ManualClock
from swarm.engine.seam import EngineHealth
from swarm.protocol.episodes import (
    Cause,
    DropReason,
    EpisodeAbort,
    EpisodeGrant,
    EpisodeRenewal,
    EpisodeResult,
    SessionRequest,
    WeightsVersion,
)
from swarm.protocol.errors import ErrorCode, InvalidSpec, Refusal
from swarm.protocol.status import Phase, RestoreRequest, RunRequest
from swarm.protocol.teams import Decider, EpisodePreparation, TeamResult
from swarm.server.keys import ControlTokens
from swarm.server.process import ServeFault, Settings, unallowed
from swarm.server.state import teams
from swarm.server.state.episodes import METADATA_DEPTH, RECORD_LIMIT_S
from swarm.server.state.leases import digest
from swarm.server.state.runs import judge_spec, patched
from tests.fakes.engine import FaultyEngine
from tests.swarm.engine.own_functions import SOURCE, own
from tests.swarm.server.state.world import PATIENCE_S, World, running, spec

pytestmark = pytest.mark.anyio


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path) as world:
        await world.begin()
        yield world


# -- leases -----------------------------------------------------------------------------------------------------------


async def test_a_reward_sent_after_the_lease_ran_out_is_refused_and_changes_nothing(world: World) -> None:
    lease = await world.claim(idle_limit_s=60)
    await world.call(lease)
    await world.passes(61)
    refusal = await world.refused(world.end(lease))
    assert refusal.code is ErrorCode.LEASE_LOST
    assert "no call and no renewal for 60 s" in refusal.detail
    assert await world.states() == ["dropped expired"]


async def test_a_lease_that_ran_out_is_refused_even_before_the_timer_comes_round(world: World) -> None:
    lease = await world.claim(idle_limit_s=60)
    world.clock.advance(61)
    assert (await world.refused(world.end(lease))).code is ErrorCode.LEASE_LOST
    assert await world.states() == ["dropped expired"]


async def test_calls_and_renewals_refresh_the_lease(world: World) -> None:
    lease = await world.claim(idle_limit_s=60)
    await world.passes(50)
    await world.call(lease)
    await world.passes(50)
    expires_at = await world.service.renew(lease.episode_id, EpisodeRenewal(lease=lease.lease))
    assert expires_at == world.clock.now() + 60
    await world.passes(50)
    assert (await world.end(lease)).status == "pooled"


async def test_while_a_call_is_open_the_idle_limit_stands_still(world: World) -> None:
    lease = await world.claim(idle_limit_s=60)
    opened = world.service.open_call(lease.episode_id, lease.lease)
    await world.passes(500)
    assert world.service.close_call(opened, await world.sampled(opened))
    await world.passes(59)
    assert (await world.end(lease)).status == "pooled"


async def test_max_episode_s_ends_an_episode_even_in_the_middle_of_a_call(world: World) -> None:
    lease = await world.claim(max_episode_s=100)
    opened = world.service.open_call(lease.episode_id, lease.lease)
    await world.passes(101)
    assert not world.service.close_call(opened, await world.sampled(opened))
    assert await world.states() == ["dropped expired"]


async def test_max_call_s_bounds_for_how_long_an_open_call_keeps_the_lease(world: World) -> None:
    lease = await world.claim(idle_limit_s=20, max_call_s=100)
    for _ in range(2):
        opened = world.service.open_call(lease.episode_id, lease.lease)
        await world.passes(99)
        assert world.service.close_call(opened, await world.sampled(opened))
    opened = world.service.open_call(lease.episode_id, lease.lease)
    await world.passes(101)
    await world.passes(RECORD_LIMIT_S)
    assert (await world.service.entry(lease.episode_id)).detail == "a call took longer than its max_call_s of 100 s"
    assert len((await world.service.trace(lease.episode_id)).calls) == 2


@pytest.mark.parametrize("noticed", [True, False])
async def test_the_call_under_which_an_episode_expires_is_recorded(world: World, noticed: bool) -> None:
    lease = await world.claim(idle_limit_s=20, max_call_s=100)
    opened = world.service.open_call(lease.episode_id, lease.lease)
    sampled = await world.sampled(opened)
    if noticed:
        await world.passes(100)
        assert opened.ending.over, "it is broken off"
        with pytest.raises(Refusal, match="closed: expired"):
            world.service.open_call(lease.episode_id, lease.lease)
    else:
        world.clock.advance(100)
    assert not world.service.close_call(opened, sampled)
    trace = await world.service.trace(lease.episode_id)
    assert (trace.entry.reason, trace.calls) == (DropReason.EXPIRED, [sampled])
    assert not world.service.close_call(opened, await world.sampled(opened))


async def test_a_late_call_of_a_lost_lease_is_discarded_and_says_so(world: World) -> None:
    lease = await world.claim()
    opened = world.service.open_call(lease.episode_id, lease.lease)
    await world.service.abort(lease.episode_id, EpisodeAbort(lease=lease.lease, reason="crash"))
    next_holder = await world.claim()
    assert not world.service.close_call(opened, await world.sampled(opened))
    assert (await world.service.trace(lease.episode_id)).calls == []
    assert (await world.service.trace(next_holder.episode_id)).calls == []
    with pytest.raises(Refusal, match="closed"):
        world.service.open_call(lease.episode_id, lease.lease)


async def test_leases_stand_still_while_the_engine_is_down(world: World) -> None:
    lease = await world.claim(idle_limit_s=60)
    world.engine.tell(EngineHealth(ready=False, booting=True, reason="crashed"))
    await world.passes(10_000)
    assert (await world.service.status()).phase is Phase.BOOTING
    world.engine.tell(EngineHealth(ready=True))
    await world.until_phase(Phase.ROLLING)
    await world.passes(59)
    await world.call(lease)
    assert (await world.end(lease)).status == "pooled"


async def test_a_lease_that_is_not_the_episodes_own_is_refused(world: World) -> None:
    lease, other = await world.claim("t-1"), await world.claim("t-2")
    refusal = await world.refused(world.service.end(lease.episode_id, EpisodeResult(lease=other.lease, reward=1)))
    assert refusal.code is ErrorCode.LEASE_LOST
    assert (await world.refused(world.service.entry("ep-unknown"))).code is ErrorCode.NOT_FOUND
    assert await world.states() == ["running", "running"]


# -- ends -------------------------------------------------------------------------------------------------------------


async def test_an_empty_key_of_an_end_is_none(world: World) -> None:
    lease = await world.claim()
    await world.call(lease)
    await world.end(lease, 0.5, idempotency_key="")
    assert (await world.refused(world.end(lease, 1.0, idempotency_key=""))).code is ErrorCode.LEASE_LOST


async def test_a_repeated_end_is_answered_already_ended(world: World) -> None:
    lease = await world.claim()
    await world.call(lease)
    assert (await world.end(lease, 0.5, idempotency_key="k")).status == "pooled"
    assert (await world.end(lease, 0.5, idempotency_key="k")).status == "already_ended"
    assert (await world.end(lease, 0.5)).status == "already_ended"
    assert (await world.refused(world.end(lease, 0.7, idempotency_key="k"))).code is ErrorCode.IDEMPOTENCY_CONFLICT
    assert (await world.refused(world.end(lease, 0.7))).code is ErrorCode.LEASE_LOST
    assert (await world.service.entry(lease.episode_id)).reward == 0.5


async def test_an_episode_that_ends_without_a_call_is_not_trained_and_its_slot_is_offered_again(world: World) -> None:
    lease = await world.claim()
    await world.end(lease)
    again = await world.claim()
    assert (again.group_id, again.slot) == (lease.group_id, lease.slot)
    entry = await world.service.entry(lease.episode_id)
    assert (entry.state, entry.reason, entry.reward) == ("dropped", DropReason.NO_CALLS, 1.0)


async def test_an_aborted_episode_keeps_the_clients_words_and_offers_its_slot_again(world: World) -> None:
    first, second = await world.claim(), await world.claim()
    abort = EpisodeAbort(lease=first.lease, reason="ValueError: no tool")
    entry = await world.service.abort(first.episode_id, abort)
    assert (entry.reason, entry.detail) == (DropReason.ABORTED, "ValueError: no tool")
    assert (await world.service.abort(first.episode_id, abort)).reason is DropReason.ABORTED
    again = await world.claim()
    assert (again.group_id, again.slot) == (first.group_id, 0)
    assert second.slot == 1


async def test_everything_a_client_reports_is_in_the_ledger_and_every_token_in_the_trace(world: World) -> None:
    lease = await world.claim(mix="math")
    opened = world.service.open_call(lease.episode_id, lease.lease)
    record = await world.sampled(opened)
    world.service.close_call(opened, record)
    await world.end(lease, 0.25, success=False, metrics={"turns": 3}, metadata={"why": ["x"]}, agent_rewards={"a": 1})
    trace = await world.service.trace(lease.episode_id)
    assert trace.calls == [record]
    entry = trace.entry
    assert (entry.state, entry.reward, entry.success, entry.metrics) == ("ended", 0.25, False, {"turns": 3})
    assert (entry.metadata, entry.agent_rewards, entry.mix) == ({"why": ["x"]}, {"a": 1}, "math")
    assert (entry.calls, entry.sampled_tokens) == (1, len(record.sampled_ids))


# -- groups and claims ------------------------------------------------------------------------------------------------


async def test_group_mates_share_task_client_version_and_config_version(world: World) -> None:
    first = await world.claim("t-1")
    assert (await world.claim("t-1")).group_id == first.group_id
    other_code = await world.claim("t-1", client_version="2")
    assert other_code.group_id != first.group_id


async def test_after_a_config_change_the_same_task_opens_a_new_group(world: World) -> None:
    first = await world.claim("t-1")
    report = await world.service.patch_run(world.run_id, {"optimizer": {"learning_rate": 2e-5}}, 1, "tester")
    assert report.config_version == 2
    second = await world.claim("t-1")
    assert second.group_id != first.group_id
    assert (await world.service.entry(second.episode_id)).config_version == 2
    assert (await world.service.entry(first.episode_id)).config_version == 1


async def test_no_group_opens_beyond_the_batch_when_nothing_may_be_stale(world: World) -> None:
    await world.claim("t-1")
    await world.claim("t-2")
    refusal = await world.refused(world.claim("t-3"))
    assert refusal.code is ErrorCode.DRAINING
    assert refusal.fields["retry_after_s"] > 0
    assert (await world.claim("t-2")).slot == 1


async def test_a_claim_waits_for_a_slot_and_gets_it_when_one_is_lost(world: World) -> None:
    held = [await world.claim(task) for task in ("t-1", "t-1", "t-2", "t-2")]
    waiting = asyncio.create_task(world.claim("t-2", wait_s=30))
    await world.passes(10)
    assert not waiting.done()
    await world.service.abort(held[3].episode_id, EpisodeAbort(lease=held[3].lease, reason="x"))
    assert (await waiting).group_id == held[3].group_id


async def test_a_claim_that_waited_in_vain_is_refused_with_a_time_to_come_back(world: World) -> None:
    for task in ("t-1", "t-1", "t-2", "t-2"):
        await world.claim(task)
    waiting = asyncio.create_task(world.claim("t-2", wait_s=30))
    await world.passes(31)
    refusal = await world.refused(waiting)
    assert (refusal.code, refusal.fields["retry_after_s"]) == (ErrorCode.DRAINING, 1.0)


async def test_a_claimant_that_goes_away_while_waiting_leaves_no_episode_behind(world: World) -> None:
    held = [await world.claim(task) for task in ("t-1", "t-1", "t-2", "t-2")]
    waiting = asyncio.create_task(world.claim("t-2", wait_s=30))
    await world.passes(1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await world.service.abort(held[3].episode_id, EpisodeAbort(lease=held[3].lease, reason="x"))
    assert (await world.claim("t-2")).slot == 1
    assert len(await world.states()) == 5


async def test_an_empty_key_of_a_claim_is_none_and_so_is_an_empty_mix(world: World) -> None:
    first, second = [await world.claim("t-1", idempotency_key="", mix=mix) for mix in (None, "")]
    assert (first.group_id, first.slot, second.slot) == (second.group_id, 0, 1)
    for _ in range(2):
        await world.claim("t-2")
    waiting = [asyncio.create_task(world.claim(task, idempotency_key="", wait_s=60)) for task in ("t-3", "t-4")]
    await world.pause()
    assert not any(claim.done() for claim in waiting)
    for claim in waiting:
        claim.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_metadata_is_stored_to_a_depth_that_teams_can_store_too(world: World) -> None:
    for depth, stored in ((METADATA_DEPTH, True), (METADATA_DEPTH + 1, False), (253, False)):
        metadata: dict[str, Any] = {}
        for _ in range(depth - 1):
            metadata = {"in": metadata}
        lease = await world.claim(f"t-{depth}", kind="eval")
        await world.call(lease)
        decider = Decider(url="http://127.0.0.1:1", episode_id=lease.episode_id, key="k")
        wish = EpisodePreparation(lease=lease.lease, decider=decider, result=TeamResult(reward=1.0, metadata=metadata))
        if stored:
            assert (await world.service.prepare(lease.episode_id, wish, "sealed")).status == "prepared"
            continue
        for refused in (world.end(lease, metadata=metadata), world.service.prepare(lease.episode_id, wish, "sealed")):
            refusal = await world.refused(refused)
            assert (refusal.code, "nested" in refusal.detail) == (ErrorCode.INVALID_SPEC, True)


@pytest.mark.parametrize("digits", ["NaN", "-Infinity", "1e999"])
async def test_metadata_that_holds_no_numbers_is_refused(world: World, digits: str) -> None:
    lease = await world.claim()
    await world.call(lease)
    stated = f'{{"lease": "{lease.lease}", "reward": 1, "metadata": {{"seen": [{{"x": {digits}}}]}}}}'
    result = EpisodeResult.model_validate_json(stated)
    refusal = await world.refused(world.service.end(lease.episode_id, result))
    assert (refusal.code, "metadata" in refusal.detail) == (ErrorCode.INVALID_SPEC, True)
    assert (await world.end(lease)).status == "pooled"


async def test_progress_of_a_run_that_never_was_is_not_found(world: World) -> None:
    assert (await world.refused(world.service.tasks(run_id="run-nope"))).code is ErrorCode.NOT_FOUND
    assert await world.service.tasks() == await world.service.tasks(run_id=world.run_id) == []


async def test_a_repeated_claim_with_its_key_gets_the_same_lease(world: World) -> None:
    first = await world.claim(idempotency_key="k")
    assert await world.claim(idempotency_key="k", wait_s=5) == first
    assert (await world.refused(world.claim("t-9", idempotency_key="k"))).code is ErrorCode.IDEMPOTENCY_CONFLICT


async def begin(world: World, session: str, client_id: str = "c-1") -> list[str]:
    """Returns the episodes that it closed."""
    wanted = SessionRequest(run_id=world.run_id, client_id=client_id, session=session, reason="restarted")
    return (await world.service.begin_session(wanted)).closed


async def test_a_newer_session_of_a_client_closes_what_the_older_holds_and_shuts_it_out(world: World) -> None:
    await begin(world, "old")
    held = await world.claim(session="old", client_id="c-1")
    by_hand = await world.claim(client_id="c-1")
    anothers = await world.claim("t-2", client_id="c-2")
    assert await begin(world, "new") == [held.episode_id]
    assert await begin(world, "new") == []
    entry = await world.service.entry(held.episode_id)
    assert (entry.reason, entry.cause, entry.detail) == (DropReason.ABORTED, Cause.CLIENT, "restarted")
    assert (await world.refused(world.end(held))).code is ErrorCode.LEASE_LOST
    assert (await world.refused(world.claim(session="old", client_id="c-1"))).code is ErrorCode.LEASE_LOST
    assert (await world.refused(world.claim(session="of nobody", client_id="c-3"))).code is ErrorCode.LEASE_LOST
    freed = await world.claim(session="new", client_id="c-1")
    assert (freed.group_id, freed.slot) == (held.group_id, held.slot)
    for lease in (freed, by_hand, anothers):
        await world.end(lease)


async def test_a_claim_that_waits_is_refused_when_a_newer_session_of_its_client_begins(world: World) -> None:
    await begin(world, "old")
    held = [await world.claim(task, session="old", client_id="c-1") for task in ("t-1", "t-1", "t-2", "t-2")]
    waiting = asyncio.create_task(world.claim("t-2", session="old", client_id="c-1", wait_s=30))
    await world.passes(1)
    assert await begin(world, "new") == [lease.episode_id for lease in held]
    assert (await world.refused(waiting)).code is ErrorCode.LEASE_LOST


async def test_which_session_of_a_client_is_the_newest_outlives_the_server(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin()
        await begin(world, "old")
        await begin(world, "new")
    async with running(tmp_path) as world:
        world.run_id = run_id
        await world.until_phase(Phase.ROLLING)
        assert (await world.refused(world.claim(session="old", client_id="c-1"))).code is ErrorCode.LEASE_LOST
        await world.claim(session="new", client_id="c-1")


async def test_sessions_end_with_their_run(world: World) -> None:
    nowhere = SessionRequest(run_id="run-nope", client_id="c-1", session="s")
    assert (await world.refused(world.service.begin_session(nowhere))).code is ErrorCode.NOT_FOUND
    await begin(world, "old")
    before = world.run_id
    await world.service.stop_run(before)
    await world.until_status("stopped")
    await world.begin()
    late = SessionRequest(run_id=before, client_id="c-1", session="late")
    assert (await world.service.begin_session(late)).closed == []
    assert (await world.refused(world.claim(session="old", client_id="c-1"))).code is ErrorCode.LEASE_LOST
    await begin(world, "old")
    await world.claim(session="old", client_id="c-1")


async def test_a_claim_repeated_while_it_waits_shares_one_lease(world: World) -> None:
    held = [await world.claim(task) for task in ("t-1", "t-1", "t-2", "t-2")]
    waiting = [asyncio.create_task(world.claim("t-2", wait_s=30, idempotency_key="k")) for _ in range(2)]
    await world.passes(1)
    await world.service.abort(held[3].episode_id, EpisodeAbort(lease=held[3].lease, reason="x"))
    first, second = await asyncio.gather(*waiting)
    assert first == second


async def test_a_group_out_of_patience_is_trained_as_it_is(world: World) -> None:
    await world.episode("t-1", 1.0)
    await world.passes(61)
    status = await world.service.status()
    assert (status.pool.groups_ready, status.pool.groups_open) == (1, 0)
    second = await world.claim("t-1")
    assert second.slot == 0  # the partial group is closed: the task opened another


async def test_a_group_out_of_patience_is_dropped_when_the_policy_says_so(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"partial_groups": "drop"})
        await world.episode("t-1", 1.0)
        await world.passes(61)
        assert await world.states() == ["dropped partial_group"]


async def test_patience_does_not_run_out_while_an_episode_of_the_group_runs(world: World) -> None:
    slow = await world.claim("t-1", idle_limit_s=1000)
    await world.episode("t-1", 1.0)
    await world.passes(300)
    assert await world.states() == ["running", "ended"]
    await world.call(slow)
    await world.end(slow, 0.0)
    assert (await world.service.status()).pool.groups_ready == 1


async def test_a_group_that_lost_everyone_makes_room_after_its_patience(world: World) -> None:
    for task in ("t-1", "t-2"):
        lease = await world.claim(task)
        await world.service.abort(lease.episode_id, EpisodeAbort(lease=lease.lease, reason="x"))
    waiting = asyncio.create_task(world.claim("t-3", wait_s=100))
    await world.passes(61)
    assert (await waiting).slot == 0


async def test_seeds_of_calls_depend_on_task_group_slot_and_index_alone(tmp_path: Path) -> None:
    async def seeds(folder: Path) -> list[int]:
        async with running(folder) as world:
            await world.begin(seed=5)
            found = []
            for task in ("t-1", "t-1", "t-2"):
                lease = await world.claim(task)
                for _ in range(2):
                    opened = world.service.open_call(lease.episode_id, lease.lease)
                    world.service.close_call(opened, None)
                    found.append(opened.seed)
            return found

    first = await seeds(tmp_path / "a")
    assert first == await seeds(tmp_path / "b")
    assert len(set(first)) == 6


async def test_no_group_opens_that_the_pool_could_not_hold(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"max_pool_episodes": 5}, max_staleness=3)
        for task in ("t-1", "t-2"):
            await world.claim(task)
        assert (await world.refused(world.claim("t-3"))).code is ErrorCode.DRAINING
        held = await world.claim("t-2")
        waiting = asyncio.create_task(world.claim("t-3", wait_s=60))
        await world.pause()
        assert not waiting.done()
        await world.episode("t-1", 1.0)
        await world.service.abort(held.episode_id, EpisodeAbort(lease=held.lease, reason="x"))
        assert (await world.service.status()).pool.ended == 1
        await world.passes(61)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_with_a_batch_by_episodes_partial_groups_make_room_for_more(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        rules = {"rule": "episodes", "episodes": 4, "max_pool_episodes": 4}
        await world.begin(batch=rules, limits={"steps": 1})
        await world.episode("t-1", 1.0)
        await world.passes(61)
        for task in ("t-2", "t-3"):
            await world.episode(task, 0.0)
            await world.episode(task, 1.0)
        await world.until_status("complete")


async def test_agent_rewards_decide_whether_a_group_has_anything_to_compare(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"rule": "informative_tasks"})
        for planner in (0.0, 1.0):
            lease = await world.claim("t-1")
            await world.call(lease)
            await world.end(lease, 0.5, agent_rewards={"planner": planner})
        for _ in range(2):
            lease = await world.claim("t-2")
            await world.call(lease)
            await world.end(lease, 0.5, agent_rewards={"planner": 1.0})
        assert await world.states() == ["ended"] * 2 + ["dropped zero_variance"] * 2


async def test_a_misspelt_agent_gets_no_reward_and_one_that_was_not_called_may(world: World) -> None:
    lease = await world.claim()
    opened = world.service.open_call(lease.episode_id, lease.lease)
    world.service.close_call(opened, (await world.sampled(opened)).model_copy(update={"agent": "planner"}))
    with pytest.raises(Refusal, match="did you mean that agent") as refused:
        await world.end(lease, 0.5, agent_rewards={"plannr": 1.0})
    assert refused.value.code == ErrorCode.INVALID_SPEC
    assert [(each["field"], each["nearest"]) for each in refused.value.fields["errors"]] == [
        ("agent_rewards.plannr", "planner")
    ]
    await world.end(lease, 0.5, agent_rewards={"planner": 1.0, "planner-2": 0.0, "critic": 0.5})


@pytest.mark.parametrize("kind", ["train", "eval"])
async def test_an_end_breaks_open_calls_off_and_waits_for_their_records(world: World, kind: str) -> None:
    lease = await world.claim(kind=kind)
    opened = world.service.open_call(lease.episode_id, lease.lease)
    partial = (await world.sampled(opened)).model_copy(update={"complete": False})
    recorded: list[bool] = []
    opened.ending.heard.add(lambda: recorded.append(world.service.close_call(opened, partial)))
    receipts = await asyncio.gather(world.end(lease, 0.5), world.end(lease, 0.5))
    assert ({receipt.status for receipt in receipts}, recorded) == ({"pooled", "already_ended"}, [True])
    assert [call.complete for call in (await world.service.trace(lease.episode_id)).calls] == [False]


async def test_a_team_member_breaks_open_calls_off_when_it_is_prepared(world: World) -> None:
    lease = await world.claim()
    opened = world.service.open_call(lease.episode_id, lease.lease)
    partial = (await world.sampled(opened)).model_copy(update={"complete": False})
    opened.ending.heard.add(lambda: world.service.close_call(opened, partial))
    decider = Decider(url="http://other:1", episode_id="ep-9", key="k")
    wish = EpisodePreparation(lease=lease.lease, decider=decider, result=TeamResult(reward=1.0), patience_s=60)
    await world.service.prepare(lease.episode_id, wish, "sealed")
    assert [call.complete for call in (await world.service.trace(lease.episode_id)).calls] == [False]


async def test_an_end_does_not_wait_for_ever_for_the_record_of_a_call(world: World) -> None:
    lease = await world.claim()
    await world.call(lease)
    opened = world.service.open_call(lease.episode_id, lease.lease)
    ending = asyncio.create_task(world.end(lease))
    await world.passes(RECORD_LIMIT_S / 2)
    assert (ending.done(), opened.ending.over) == (False, True)
    await world.passes(RECORD_LIMIT_S)
    assert (await ending).status == "pooled"
    assert not world.service.close_call(opened, None)


async def test_after_an_end_that_was_refused_calls_go_on(world: World) -> None:
    lease = await world.claim()
    opened = world.service.open_call(lease.episode_id, lease.lease)
    named = (await world.sampled(opened)).model_copy(update={"agent": "planner"})
    opened.ending.heard.add(lambda: world.service.close_call(opened, named))
    assert "did you mean" in (await world.refused(world.end(lease, agent_rewards={"plannr": 1.0}))).detail
    assert not world.service.open_call(lease.episode_id, lease.lease).ending.over


async def test_a_lease_that_is_not_the_episodes_own_breaks_no_call_off(world: World) -> None:
    lease = await world.claim()
    opened = world.service.open_call(lease.episode_id, lease.lease)
    assert (await world.refused(world.end(lease.model_copy(update={"lease": "other"})))).code is ErrorCode.LEASE_LOST
    assert not opened.ending.over


async def test_evaluations_are_outside_of_pool_bounds_and_batches(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"max_pool_episodes": 4, "mix": {"a": {"ratio": 1}}}, limits={"steps": 1})
        for index in range(20):
            await world.episode("e-1", index % 2, kind="eval", mix="of no family")
        pool = (await world.service.status()).pool
        assert (pool.ended, pool.groups_open, pool.groups_ready) == (0, 0, 0)
        await world.batch(mix="a")
        await world.until_status("complete")
        assert len([batch for batch in world.engine.made for _ in batch.groups]) == 2


# -- runs -------------------------------------------------------------------------------------------------------------


async def test_a_second_run_is_refused_while_one_is_running(world: World) -> None:
    refusal = await world.refused(world.service.create_run(RunRequest(spec=spec()), by="other"))
    assert refusal.code is ErrorCode.SERVER_BUSY
    assert refusal.fields == {"run_id": world.run_id, "holder": "tester"}


async def test_a_compute_type_that_is_left_open_is_the_engines_and_one_that_is_named_stays(world: World) -> None:
    run_id = world.run_id
    for asked, found in (("auto", "float32"), ("bfloat16", "bfloat16")):
        await world.service.stop_run(run_id)
        await world.until_phase(Phase.IDLE)
        request = RunRequest(spec=spec(dtype=asked), idempotency_key=asked)
        run_id = (await world.service.create_run(request, by="tester")).run_id
        assert (await world.service.report(run_id)).spec.dtype == found
        assert (await world.service.create_run(request, by="tester")).run_id == run_id


async def test_the_same_key_starts_one_run(world: World) -> None:
    await world.service.stop_run(world.run_id)
    await world.until_phase(Phase.IDLE)
    request = RunRequest(spec=spec(), idempotency_key="k")
    first = await world.service.create_run(request, by="tester")
    assert await world.service.create_run(request, by="tester") == first
    other = RunRequest(spec=spec(seed=9), idempotency_key="k")
    assert (await world.refused(world.service.create_run(other, by="tester"))).code is ErrorCode.IDEMPOTENCY_CONFLICT


async def test_an_empty_key_starts_another_run(world: World) -> None:
    request = RunRequest(spec=spec(), idempotency_key="")
    started = [world.run_id]
    for _ in range(2):
        await world.service.stop_run(started[-1])
        await world.until_phase(Phase.IDLE)
        started.append((await world.service.create_run(request, by="tester")).run_id)
    assert len(set(started)) == 3


async def test_the_same_key_finds_the_run_that_a_version_without_some_field_started(tmp_path: Path) -> None:
    engine, clock = FaultyEngine(), ManualClock()
    request = RunRequest(spec=spec(), idempotency_key="k")
    async with running(tmp_path, engine, clock) as world:
        first = await world.service.create_run(request, by="tester")
    older = request.spec.model_dump(mode="json")
    del older["batch"]["max_gen_batches"]
    with contextlib.closing(sqlite3.connect(tmp_path / "pool" / "pool.sqlite")) as pool, pool:
        (body,) = pool.execute("SELECT body FROM runs").fetchone()
        row = orjson.loads(body) | {"request_digest": digest(orjson.dumps(older))}
        pool.execute("UPDATE runs SET body = ?", (orjson.dumps(row),))
        pool.execute("UPDATE configs SET spec = ?", (orjson.dumps(older | {"dtype": "float32"}),))
    async with running(tmp_path, FaultyEngine().adopt(engine), clock) as world:
        assert await world.service.create_run(request, by="tester") == first
        other = RunRequest(spec=spec(seed=9), idempotency_key="k")
        assert (
            await world.refused(world.service.create_run(other, by="tester"))
        ).code is ErrorCode.IDEMPOTENCY_CONFLICT


async def test_a_key_whose_stored_spec_is_valid_no_more_is_of_another_spec(tmp_path: Path) -> None:
    engine, clock = FaultyEngine(), ManualClock()
    async with running(tmp_path, engine, clock) as world:
        await world.service.create_run(RunRequest(spec=spec(), idempotency_key="k"), by="tester")
        assert world.service.state.run is not None
        world.service.state.run.configs[0].spec["max_staleness"] = "much"
        other = RunRequest(spec=spec(seed=9), idempotency_key="k")
        assert (
            await world.refused(world.service.create_run(other, by="tester"))
        ).code is ErrorCode.IDEMPOTENCY_CONFLICT


async def test_a_spec_that_this_server_cannot_carry_out_names_each_bad_field(world: World) -> None:
    await world.service.stop_run(world.run_id)
    await world.until_phase(Phase.IDLE)
    wrong = spec(model="gpt-17", max_model_len=10**6, batch={"max_pool_episodes": 3})
    refusal = await world.refused(world.service.create_run(RunRequest(spec=wrong), by="tester"))
    assert refusal.code is ErrorCode.INVALID_SPEC
    fields = [error["field"] for error in refusal.fields["errors"]]
    assert fields == ["model", "max_model_len", "batch.max_pool_episodes"]


async def test_functions_of_users_are_executed_only_where_that_is_allowed(tmp_path: Path) -> None:
    mine = spec(algorithm=own(name="mine.py:advantage", loss="mine.py:loss"))
    for able, allowed, said in ((True, False, "--allow-algorithms"), (False, True, "--engine local")):
        info = replace(FaultyEngine().info, own_functions=able)
        with pytest.raises(Refusal) as refused:
            judge_spec(mine, info, allow_algorithms=allowed)
        assert [error["field"] for error in refused.value.fields["errors"]] == ["algorithm.name", "algorithm.loss"]
        assert said in refused.value.detail
    judge_spec(mine, replace(FaultyEngine().info, own_functions=True), allow_algorithms=True)
    for patch in ({"loss": "algorithm"}, {"sources": {"mine.py": SOURCE + "# edited"}}):
        with pytest.raises(Refusal, match="cannot be changed during a run"):
            patched(mine, {"algorithm": patch})
    with pytest.raises(ServeFault, match="set SWARM_ADMIN_TOKEN"):
        Settings(host="127.0.0.1", port=0, tokens=ControlTokens(None, None), allow_algorithms=True)


async def test_a_run_with_functions_of_its_own_goes_on_only_where_they_are_allowed(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        world.service.state.allow_algorithms = True
        world.service.state.info = replace(world.service.state.info, own_functions=True)
        await world.begin(algorithm=own(loss="mine.py:loss"))
        assert unallowed(world.service, allowed=True) is None
        refused = unallowed(world.service, allowed=False)
        assert refused is not None
        assert "serve with --allow-algorithms" in str(refused)
        world.service.state.allow_algorithms = False
        back = world.service.restore_run(world.run_id, RestoreRequest(step=0), "ann")
        assert (await world.refused(back)).code is ErrorCode.OVER_LIMIT


def test_a_spec_may_name_the_folder_that_is_hosted(tmp_path: Path) -> None:
    folder, link = tmp_path / "foo", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    info = replace(FaultyEngine().info, model="foo", folder=folder)
    for model in (None, "foo", str(folder), str(link)):
        judge_spec(spec(model=model), info)
    for model in (str(tmp_path), str(tmp_path / "none"), "foo\0", "~nobody-of-this-name/foo"):
        with pytest.raises(Refusal) as refused:
            judge_spec(spec(model=model), info)
        assert str(folder) not in refused.value.detail


def test_adapters_of_layers_that_the_model_lacks_are_refused_with_those_that_it_has() -> None:
    info = replace(FaultyEngine().info, layers=frozenset({"q_proj", "c_attn"}))
    for targets, wrong in ((["q_proj"], None), (["q_prj", "c_attn"], "'q_prj'"), (["a", "q_proj", "b"], "'a', 'b'")):
        wanted = spec(parameters={"targets": targets})
        judge_spec(wanted, FaultyEngine().info)  # which knows of no layers
        if wrong is None:
            judge_spec(wanted, info)
            continue
        with pytest.raises(InvalidSpec) as refused:
            judge_spec(wanted, info)
        assert f"parameters.targets: the model has no linear layer {wrong}; it has c_attn, q_proj" in str(refused.value)
        assert refused.value.nearest == (("q_proj",) if "q_prj" in targets else ())


async def test_a_patch_under_which_fewer_groups_than_a_batch_fill_the_pool_does_not_stop_the_run(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"group_size": 4, "max_pool_episodes": 8}, limits={"steps": 1})
        for reward in (0.0, 1.0, 0.0, 1.0):
            await world.episode("t-1", reward)
        await world.service.patch_run(world.run_id, {"batch": {"group_size": 2, "max_pool_episodes": 4}}, None, "ann")
        for reward in (0.0, 1.0):
            lease = await world.claim("t-2")
            await world.call(lease)
            await world.end(lease, reward)
        await world.until_status("complete")


async def test_a_patch_is_refused_when_it_is_misspelt_untunable_or_out_of_date(world: World) -> None:
    async def patch(change: dict[str, object], if_match: int | None = None) -> Refusal:
        return await world.refused(world.service.patch_run(world.run_id, change, if_match, "tester"))

    misspelt = await patch({"optimizer": {"learning_rte": 1e-5}})
    assert misspelt.fields["errors"][0]["nearest"] == "optimizer.learning_rate"
    assert (await patch({"optimiser": {}})).fields["errors"][0]["nearest"] == "optimizer"
    assert "cannot be changed" in (await patch({"seed": 3})).detail
    deep: dict[str, object] = {}
    for _ in range(5_000):
        deep = {"a": deep}
    assert (await patch({"optimizer": deep})).fields["errors"][0]["field"] == "optimizer"
    for field in ("optimizer.learning_rate", "batch.tasks", "sampling.top_p", "max_staleness"):
        value: object = True
        for name in reversed(field.split(".")):
            value = {name: value}
        told = (await patch(value)).fields["errors"]  # type: ignore[arg-type]
        assert [(each["field"], each["problem"]) for each in told] == [(field, "should be a number, got True")]
    stale = await patch({"max_staleness": 1}, if_match=7)
    assert (stale.code, stale.fields["config_version"]) == (ErrorCode.CONFIG_CONFLICT, 1)
    assert (await world.service.report(world.run_id)).config_version == 1


async def test_a_change_is_kept_with_who_and_when(world: World) -> None:
    await world.service.patch_run(world.run_id, {"limits": {"steps": None}, "max_staleness": 1}, None, "ann")
    report = await world.service.report(world.run_id)
    assert report.spec.limits.steps is None
    [change] = report.changes
    assert (change.config_version, change.by, change.at) == (2, "ann", world.clock.now())
    assert change.patch == {"limits": {"steps": None}, "max_staleness": 1}


async def test_a_run_whose_own_defaults_train_nothing_is_accepted_and_says_so(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> list[str]:
        return [message for message in caplog.messages if "sampling." in message]

    assert ((await world.service.report(world.run_id)).notes, logged()) == ([], [])
    async with running(tmp_path / "other") as other:
        run_id = await other.begin(sampling={"top_p": 0.9, "train": "off"})
        (note,) = (await other.service.report(run_id)).notes
        assert "sampling.top_p is 0.9" in note
        assert "set sampling.top_p to 1" in note
        assert logged() == [f"run {run_id}: {note}"]
        report = await other.service.patch_run(run_id, {"sampling": {"top_k": 40}}, None, "ann")
        assert len(report.notes) == 2
        assert logged()[1:] == [f"run {run_id}: {report.notes[1]}"], "what is known is not said again"
        mended = {"sampling": {"top_p": 1, "top_k": 0}}
        assert (await other.service.patch_run(run_id, mended, None, "ann")).notes == []
    assert len(logged()) == 2


async def test_claims_for_another_run_are_not_found(world: World) -> None:
    assert (await world.refused(world.claim(run_id="run-other"))).code is ErrorCode.NOT_FOUND
    assert (await world.refused(world.service.report("run-other"))).code is ErrorCode.NOT_FOUND


# -- looking ----------------------------------------------------------------------------------------------------------


async def test_a_restarted_client_learns_how_many_episodes_of_each_task_are_ended(world: World) -> None:
    await world.episode("t-1")
    await world.episode("t-2", client_id="c-2")
    await world.end(await world.claim("t-2"))  # without a call: not an attempt
    aborted = await world.claim("t-1")
    await world.service.abort(aborted.episode_id, EpisodeAbort(lease=aborted.lease, reason="x"))
    await world.episode("e-1", kind="eval")
    progress = [(p.task_id, p.kind, p.step, p.ended) for p in await world.service.tasks()]
    assert progress == [("t-1", "train", None, 1), ("t-2", "train", None, 1), ("e-1", "eval", 0, 1)]
    assert [p.task_id for p in await world.service.tasks(client_id="c-2")] == ["t-2"]
    for family in ("math", "code", "math"):
        await world.episode("e-2", kind="eval", mix=family)
    assert [(p.mix, p.ended) for p in await world.service.tasks() if p.task_id == "e-2"] == [("math", 2), ("code", 1)]


async def test_the_ledger_comes_in_pages(world: World) -> None:
    for _ in range(3):
        await world.episode("e-1", kind="eval")
    first = await world.service.ledger(kind="eval", limit=2)
    second = await world.service.ledger(kind="eval", limit=2, after=first.next)
    assert (len(first.entries), len(second.entries), second.next) == (2, 1, None)
    for nonsense in ("x", "9" * 20, "9" * 5000):
        assert (await world.refused(world.service.ledger(after=nonsense))).code is ErrorCode.NOT_FOUND


async def test_a_status_with_since_waits_for_a_change_or_for_its_time(world: World) -> None:
    await world.passes(1)
    status = await world.service.status()
    waiting = asyncio.create_task(world.service.status(status.revision, 30))
    await world.passes(10)
    assert not waiting.done()
    await world.passes(21)
    assert (await waiting).revision == status.revision
    waiting = asyncio.create_task(world.service.status(status.revision, 30))
    await world.passes(0)
    await world.claim()
    await world.passes(1)  # claims are told together, a moment later
    changed = await waiting
    assert changed.revision > status.revision
    assert changed.pool.running == 1


async def test_a_status_with_since_hears_that_weights_are_served_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    back, serve = asyncio.Event(), world.engine.serve

    async def serve_late(version: WeightsVersion) -> None:
        await back.wait()
        await serve(version)

    monkeypatch.setattr(world.engine, "serve", serve_late)
    for ready in (False, True):
        world.engine.tell(EngineHealth(ready=ready, failures=1))
    await world.passes(1)
    status = await world.service.status()
    assert (status.phase, status.weights_version) == (Phase.UPDATING, None)
    waiting = asyncio.create_task(world.service.status(status.revision, 30))
    await world.passes(1)
    back.set()
    await world.pause()
    assert waiting.done()
    served = await waiting
    assert (served.phase, served.weights_version) == (Phase.ROLLING, WeightsVersion(run_id=world.run_id, step=0))


async def test_subscribers_hear_of_changes_and_log_lines_without_secrets(world: World) -> None:
    events = world.service.events()
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    world.service.log("a client sent swl_verysecret")
    heard = await first
    assert (heard.kind, heard.data["line"]) == ("log", "a client sent [redacted]")
    await world.service.stop_run(world.run_id)
    kinds = [(await anext(events)).kind for _ in range(2)]
    assert sorted(kinds) == ["log", "status"]


# -- records that cannot be kept --------------------------------------------------------------------------------------


async def call_that_cannot_be_kept(world: World, lease: EpisodeGrant) -> None:
    """A call with an id that the pool's form has no room for."""
    opened = world.service.open_call(lease.episode_id, lease.lease)
    record = (await world.sampled(opened)).model_copy(update={"prompt_ids": [2**31]})
    assert world.service.close_call(opened, record)


async def test_an_episode_whose_calls_cannot_be_kept_is_given_up_with_the_reason_and_its_slot_is_free(
    world: World,
) -> None:
    lease = await world.claim()
    await call_that_cannot_be_kept(world, lease)
    refusals = [await world.refused(world.end(lease)) for _ in range(2)]
    assert {refusal.code for refusal in refusals} == {ErrorCode.LEASE_LOST}
    assert all("its calls cannot be kept" in refusal.detail for refusal in refusals)
    assert await world.states() == ["dropped aborted"]
    assert (await world.claim()).slot == lease.slot


async def test_a_team_member_whose_calls_cannot_be_kept_is_given_up_too(world: World) -> None:
    lease = await world.claim()
    await call_that_cannot_be_kept(world, lease)
    decider = Decider(url="http://other:1", episode_id="ep-9", key="k")
    wish = EpisodePreparation(lease=lease.lease, decider=decider, result=TeamResult(reward=1.0), patience_s=60)
    refusal = await world.refused(world.service.carry_out(lambda t: teams.prepare(t, lease.episode_id, wish, "sealed")))
    assert refusal.code is ErrorCode.LEASE_LOST
    assert await world.states() == ["dropped aborted"]


async def test_a_lease_that_runs_out_over_calls_that_cannot_be_kept_costs_that_episode_alone(world: World) -> None:
    lease, other = await world.claim(idle_limit_s=60), await world.claim("t-2", idle_limit_s=600)
    await call_that_cannot_be_kept(world, lease)
    await world.call(other)
    await world.passes(61)
    assert await world.states() == ["dropped expired", "running"]
    assert "its calls cannot be kept" in ((await world.service.entry(lease.episode_id)).detail or "")
    await world.passes(541)
    assert await world.states() == ["dropped expired", "dropped expired"]
    assert len((await world.service.trace(other.episode_id)).calls) == 1


# -- a full disk ------------------------------------------------------------------------------------------------------


async def test_with_a_full_disk_requests_are_refused_nothing_changes_and_later_ones_work(world: World) -> None:
    lease = await world.claim("t-1")
    await world.call(lease)
    pages = world.store._db.execute("PRAGMA page_count").fetchone()[0]
    world.store._db.execute(f"PRAGMA max_page_count = {pages}")
    large = {"note": "x" * 200_000}
    assert (await world.refused(world.end(lease, 1.0, metadata=large))).code is ErrorCode.STORAGE_FULL
    assert await world.states() == ["running"]
    told = (await world.service.status()).storage_full
    assert told is not None
    assert "make room on the disk" in told.reason
    assert await world.call(lease)
    world.store._db.execute("PRAGMA max_page_count = 1000000")
    assert (await world.end(lease, 1.0, metadata=large)).status == "pooled"
    await world.pause()
    assert (await world.service.status()).storage_full is None
    assert len((await world.service.trace(lease.episode_id)).calls) == 2
    assert await world.states() == ["ended"]


async def test_while_another_program_holds_the_pool_requests_are_refused_and_the_server_goes_on(world: World) -> None:
    lease = await world.claim("t-1", idle_limit_s=10)
    held = await world.claim("t-1", idle_limit_s=1e4)
    await world.call(held)
    world.store._db.execute("PRAGMA busy_timeout = 20")
    with contextlib.closing(sqlite3.connect(world.store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        refusal = await world.refused(world.end(held))
        assert (refusal.code, "another program" in refusal.detail) == (ErrorCode.STORAGE_FULL, True)
        await world.passes(20)  # a lease runs out, which cannot be written either
        other.execute("ROLLBACK")
    await world.hurry(lambda: lease.episode_id not in world.service.state.live)
    assert (await world.end(held)).status == "pooled"
    assert await world.states() == ["dropped expired", "ended"]


async def test_what_was_decided_on_top_of_a_failed_write_is_refused_with_it(world: World) -> None:
    lease = await world.claim("t-1")
    await world.call(lease)
    pages = world.store._db.execute("PRAGMA page_count").fetchone()[0]
    world.store._db.execute(f"PRAGMA max_page_count = {pages}")
    large = {"note": "x" * 200_000}
    outcomes = await asyncio.gather(
        world.refused(world.end(lease, metadata=large)),
        world.refused(world.claim("t-1")),
        world.refused(world.claim("t-2")),
    )
    assert {refusal.code for refusal in outcomes} == {ErrorCode.STORAGE_FULL}
    world.store._db.execute("PRAGMA max_page_count = 1000000")
    assert (await world.claim("t-1")).slot == 1
    assert await world.states() == ["running", "running"]


async def test_a_call_that_closes_during_an_end_that_fails_does_not_keep_its_episode_open_for_ever(
    world: World,
) -> None:
    lease = await world.claim("t-1", idle_limit_s=60)
    await world.call(lease)
    opened = world.service.open_call(lease.episode_id, lease.lease)
    pages = world.store._db.execute("PRAGMA page_count").fetchone()[0]
    world.store._db.execute(f"PRAGMA max_page_count = {pages}")
    ending = asyncio.create_task(world.refused(world.end(lease, 1.0, metadata={"note": "x" * 200_000})))
    while lease.episode_id in world.service.state.live:
        world.clock.advance(RECORD_LIMIT_S)
        await asyncio.sleep(0)
    assert not world.service.close_call(opened, None)
    assert (await ending).code is ErrorCode.STORAGE_FULL
    world.store._db.execute("PRAGMA max_page_count = 1000000")
    assert await world.states() == ["running"]
    await world.passes(61)
    assert await world.states() == ["dropped expired"]


async def test_where_what_is_on_disk_cannot_be_read_after_a_failed_write_nobody_waits_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await world.claim("t-1")
    await world.call(lease)
    pages = world.store._db.execute("PRAGMA page_count").fetchone()[0]
    world.store._db.execute(f"PRAGMA max_page_count = {pages}")

    def unreadable() -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(world.store.read, "snapshot", unreadable)
    async with asyncio.timeout(PATIENCE_S):
        refused = await world.refused(world.end(lease, metadata={"note": "x" * 200_000}))
        assert refused.code is ErrorCode.STORAGE_FULL
        for later in (world.claim("t-1"), world.service.ledger()):
            with pytest.raises(sqlite3.OperationalError, match="disk I/O"):
                await later
        assert world.task is not None
        with pytest.raises(
            sqlite3.OperationalError, match="disk I/O"
        ):  # which ends the server: only a new one can know
            await world.task


@pytest.mark.parametrize("reward", [1e200, -1e308, 1e13, math.inf, math.nan])
async def test_a_reward_that_no_sum_can_hold_is_refused_and_the_run_is_reported_all_the_same(
    tmp_path: Path, reward: float
) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin()
        lease = await world.claim()
        await world.call(lease)
        with pytest.raises(InvalidSpec):
            await world.end(lease, reward)
        with pytest.raises(InvalidSpec):
            await world.end(lease, 1.0, agent_rewards={"planner": reward})
        await world.end(lease, 1e12)
        await world.episode(reward=-1e12)
        assert (await world.service.report(run_id)).versions[0].reward_std == pytest.approx(1e12)
