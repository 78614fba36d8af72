"""What becomes of an episode one of whose calls failed on the server's side: it is stored, not trained, and offered again."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.protocol.episodes import CallFailure, Cause, DropReason, EpisodeGrant
from swarm.protocol.errors import ErrorCode
from swarm.protocol.status import QuarantineRequest
from swarm.protocol.summary import LedgerFilter
from swarm.protocol.teams import Decider, EpisodeCommit, EpisodePreparation, TeamResult
from swarm.server.gateway.failures import Failures, KeptCall
from swarm.server.state.calls import CallAttempt, FailedCall
from swarm.server.state.calls import Outcome as CallOutcome
from swarm.server.state.health import UNNOTICED_S
from swarm.server.state.runs import best_of
from tests.swarm.server.state.world import World, running

pytestmark = pytest.mark.anyio

FAILURE = CallFailure(cause=Cause.SERVER, reason="engine_down", detail="killed")


async def broken_call(world: World, lease: EpisodeGrant, outcome: CallOutcome = "failed") -> FailedCall:
    """A call without an answer; what to say of it where it is found to have failed later."""
    opened = world.service.open_call(lease.episode_id, lease.lease)
    sampled = await world.sampled(opened)
    failure = FAILURE if outcome == "failed" else None
    record = sampled.model_copy(update={"complete": False, "finish_reason": None, "failure": failure})
    attempt = CallAttempt(asked="the same", began=opened.index, ended=opened.index, outcome=outcome)
    world.service.close_call(opened, record, attempt)
    return FailedCall(
        episode_id=lease.episode_id,
        call_ids=frozenset({record.call_id}),
        failure=FAILURE,
        attempt=attempt,
        attempts=opened.attempts,
    )


async def tainted(world: World, task_id: str = "t-1", **fields: object) -> EpisodeGrant:
    """An episode that is open, with one call that was answered and one that failed."""
    lease = await world.claim(task_id, wait_s=1e2, **fields)
    await world.call(lease)
    await broken_call(world, lease)
    return lease


async def found_hung(world: World, found: FailedCall) -> None:
    if not world.service.fail_open(found):
        await world.service.fail_closed(found)


async def test_its_reward_is_stored_and_its_slot_is_offered_again(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await tainted(world)
        receipt = await world.end(lease, 0.25)
        assert (receipt.status, receipt.dropped) == ("pooled", DropReason.TAINTED)
        entry = await world.service.entry(lease.episode_id)
        assert (entry.state, entry.reason, entry.cause, entry.reward) == ("dropped", "tainted", "server", 0.25)
        assert (entry.tainted, entry.calls) == (True, 2)
        assert "engine_down: killed" in (entry.detail or "")
        again = await world.claim("t-1")
        assert (again.group_id, again.slot) == (lease.group_id, lease.slot)
        repeated = await world.end(lease, 0.25)
        assert (repeated.status, repeated.dropped) == ("already_ended", DropReason.TAINTED)
        assert (await world.service.tasks())[0:] == []


async def test_it_is_trained_despite_the_failure_where_its_client_says_so_and_the_failed_call_is_not(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await tainted(world)
        assert (await world.end(lease, 0.0, despite="it asked again")).dropped is None
        for task, reward in (("t-1", 1.0), ("t-2", 1.0), ("t-2", 0.0)):
            await world.episode(task, reward)
        await world.until_step(1)
        (batch,) = world.engine.made
        calls = [len(episode.calls) for group in batch.groups for episode in group.episodes]
        assert calls == [1, 1, 1, 1]
        entry = await world.service.entry(lease.episode_id)
        assert (entry.step, entry.tainted, entry.despite, entry.calls) == (1, True, "it asked again", 2)


@pytest.mark.parametrize("kind", ["train", "eval"])
async def test_an_episode_all_of_whose_calls_failed_says_nothing_of_the_model(tmp_path: Path, kind: str) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await world.claim(kind=kind)
        await broken_call(world, lease)
        assert (await world.end(lease, despite="it guessed")).dropped is DropReason.NO_CALLS
        assert (await world.service.entry(lease.episode_id)).cause is Cause.SERVER


async def test_what_is_found_later_takes_an_episode_out_of_a_group_that_was_ready(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await world.claim("t-1")
        await world.call(lease)
        found = await broken_call(world, lease, "left")
        assert (await world.end(lease, 0.0)).dropped is None
        await world.episode("t-1", 1.0)
        await found_hung(world, found)
        entry = await world.service.entry(lease.episode_id)
        assert (entry.state, entry.reason, entry.cause) == ("dropped", "tainted", "server")
        assert [call.failure for call in (await world.service.trace(lease.episode_id)).calls] == [None, FAILURE]
        again = await world.claim("t-1")
        assert (again.group_id, again.slot) == (lease.group_id, lease.slot)
        await world.call(again)
        await world.end(again, 0.5)
        for reward in (1.0, 0.0):
            await world.episode("t-2", reward)
        await world.until_step(1)
        taught = [episode.episode_id for group in world.engine.made[0].groups for episode in group.episodes]
        assert again.episode_id in taught
        assert lease.episode_id not in taught


async def test_what_a_step_has_taken_stays_as_it_was_trained(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await world.claim("t-1")
        await world.call(lease)
        found = await broken_call(world, lease, "left")
        await world.end(lease, 0.0)
        for task, reward in (("t-1", 1.0), ("t-2", 1.0), ("t-2", 0.0)):
            await world.episode(task, reward)
        await world.until_step(1)
        before = await world.service.trace(lease.episode_id)
        await found_hung(world, found)
        assert await world.service.trace(lease.episode_id) == before


@pytest.mark.parametrize("fields", [{}, {"despite": "it asked again"}])
async def test_so_does_what_a_step_takes_while_it_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, str]
) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await world.claim("t-1")
        await world.call(lease)
        found = await broken_call(world, lease, "left")
        await world.end(lease, 0.0, **fields)
        read = world.service.reader.episode
        stale = read(lease.episode_id)
        for task, reward in (("t-1", 1.0), ("t-2", 1.0), ("t-2", 0.0)):
            await world.episode(task, reward)
        await world.until_step(1)
        before = await world.service.trace(lease.episode_id)
        looked = [stale]
        monkeypatch.setattr(world.service.reader, "episode", lambda name: looked.pop() if looked else read(name))
        await found_hung(world, found)
        assert looked == []
        assert await world.service.trace(lease.episode_id) == before
    async with running(tmp_path) as world:
        assert await world.service.trace(lease.episode_id) == before


async def test_an_answer_to_the_same_request_makes_a_failure_good_that_is_found_later(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await world.claim("t-1")
        found = await broken_call(world, lease, "left")
        opened = world.service.open_call(lease.episode_id, lease.lease)
        answered = CallAttempt(asked="the same", began=1, ended=2, outcome="answered")
        world.service.close_call(opened, await world.sampled(opened), answered)
        await world.end(lease)
        await found_hung(world, found)
        entry = await world.service.entry(lease.episode_id)
        assert (entry.state, entry.tainted) == ("ended", False)
        assert [call.failure for call in (await world.service.trace(lease.episode_id)).calls] == [FAILURE, None]


@pytest.mark.parametrize("found_later", [False, True])
async def test_a_tainted_evaluation_counts_nowhere_and_is_offered_again(tmp_path: Path, found_later: bool) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await world.claim("held-out", kind="eval")
        await world.call(lease)
        found = await broken_call(world, lease, "left" if found_later else "failed")
        receipt = await world.end(lease, 0.0)
        assert receipt.dropped is (None if found_later else DropReason.TAINTED)
        await found_hung(world, found)
        entry = await world.service.entry(lease.episode_id)
        assert (entry.state, entry.reason, entry.tainted, entry.reward) == ("dropped", "tainted", True, 0.0)
        assert await world.service.tasks() == []
        assert world.store.read.held_out(world.run_id) == []
        again = await world.claim("held-out", kind="eval")
        await world.call(again)
        await world.end(again, 1.0)
        numbers = [world.store.read.episode(one.episode_id) for one in (lease, again)]
        assert [row.ordinal for row in numbers if row] == [0, 0]
        (held_out,) = world.store.read.held_out(world.run_id)
        assert (held_out.reward, held_out.episodes) == (1.0, 1)
        assert best_of([0], [held_out]) == held_out
        assert [progress.ended for progress in await world.service.tasks()] == [1]


async def test_a_restart_keeps_what_is_tainted(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        dropped, despite = await tainted(world), await tainted(world)
        await world.end(dropped)
        await world.end(despite, despite="it asked again")
    async with running(tmp_path) as world:
        entries = [await world.service.entry(lease.episode_id) for lease in (dropped, despite)]
        assert [(entry.state, entry.tainted, entry.despite) for entry in entries] == [
            ("dropped", True, None),
            ("ended", True, "it asked again"),
        ]
        assert (await world.end(dropped)).dropped is DropReason.TAINTED
        failures = [call.failure for call in (await world.service.trace(despite.episode_id)).calls]
        assert failures == [None, FAILURE]


async def test_an_episode_that_expires_after_a_failure_is_tainted_too(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await tainted(world, idle_limit_s=60)
        await world.passes(61)
        entry = await world.service.entry(lease.episode_id)
        assert (entry.reason, entry.tainted) == ("expired", True)


# -- a client gave up, and the server is restarted before anyone knows why ----------------------------------------------


async def given_up(world: World, lease: EpisodeGrant) -> Failures:
    """One call was answered, and a client gave up on the next; the gateway's view of it."""
    await world.call(lease)
    found = await broken_call(world, lease, "left")
    failures = Failures(world.service, world.clock)
    kept = KeptCall(
        at=world.clock.now(),
        episode_id=lease.episode_id,
        call_ids=found.call_ids,
        attempt=found.attempt,
        attempts=found.attempts,
    )
    failures.left(kept)
    return failures


@pytest.mark.parametrize("kind", ["train", "eval"])
async def test_a_call_given_up_shortly_before_a_restart_counts_as_failed_and_the_episode_is_offered_again(
    tmp_path: Path, kind: str
) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin()
        lease, despite = await world.claim("t-1", kind=kind), await world.claim("t-2", kind=kind)
        for one in (lease, despite):
            await given_up(world, one)
        assert (await world.end(lease, 0.0)).dropped is None
        assert (await world.end(despite, 0.0, despite="it asked somebody else")).dropped is None
    for _ in range(2):
        async with running(tmp_path) as world:
            world.run_id = run_id
            entry = await world.service.entry(lease.episode_id)
            assert (entry.state, entry.reason, entry.cause) == ("dropped", "tainted", "server")
            assert "before its engine showed a sign of life" in (entry.detail or "")
            for one in (lease, despite):
                trace = await world.service.trace(one.episode_id)
                assert trace.entry.tainted
                assert [call.failure and call.failure.reason for call in trace.calls] == [None, "engine_down"]
            assert trace.entry.reason is (DropReason.EVAL if kind == "eval" else None)
            assert [progress.task_id for progress in await world.service.tasks()] == ["t-2"]
    async with running(tmp_path) as world:
        world.run_id = run_id
        again = await world.claim("t-1", kind=kind, wait_s=1e2)
        assert (again.group_id, again.slot) == (lease.group_id, lease.slot)


async def test_a_call_given_up_on_an_engine_that_lived_on_is_no_failure_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await world.claim()
        failures = await given_up(world, lease)
        await world.end(lease, 0.0)
        world.clock.advance(1)
        failures.engine_lives()
    async with running(tmp_path) as world:
        entry = await world.service.entry(lease.episode_id)
        assert (entry.state, entry.tainted) == ("ended", False)


async def test_an_engine_that_was_not_found_hung_for_long_was_not_hung(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await world.claim(kind="eval")
        await given_up(world, lease)
        await world.end(lease, 0.0)
        await world.passes(UNNOTICED_S)
        await world.passes(10)
    async with running(tmp_path) as world:
        entry = await world.service.entry(lease.episode_id)
        assert (entry.reason, entry.tainted) == (DropReason.EVAL, False)


async def test_what_was_answered_after_all_is_known_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await world.claim()
        await given_up(world, lease)
        opened = world.service.open_call(lease.episode_id, lease.lease)
        answered = CallAttempt(asked="the same", began=8, ended=9, outcome="answered")
        world.service.close_call(opened, await world.sampled(opened), answered)
        await world.end(lease, 0.0)
    async with running(tmp_path) as world:
        trace = await world.service.trace(lease.episode_id)
        assert (trace.entry.state, trace.entry.tainted) == ("ended", False)
        assert [call.failure is None for call in trace.calls] == [True, False, True]


async def test_what_a_step_has_taken_stays_as_it_was_trained_over_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await world.claim("t-1")
        await given_up(world, lease)
        await world.end(lease, 0.0)
        for task, reward in (("t-1", 1.0), ("t-2", 1.0), ("t-2", 0.0)):
            await world.episode(task, reward)
        await world.until_step(1)
        before = await world.service.trace(lease.episode_id)
    async with running(tmp_path) as world:
        assert await world.service.trace(lease.episode_id) == before


async def test_what_the_restart_itself_drops_stays_dropped(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin()
        lease, other = await world.claim("t-1"), await world.claim("t-1")
        await given_up(world, lease)
        await world.end(lease, 0.0, despite="it asked somebody else")
        await world.call(other)
        await world.service.quarantine(run_id, QuarantineRequest(client_version="0"), "ann")
    for _ in range(3):
        async with running(tmp_path) as world:
            world.run_id = run_id
            entry = await world.service.entry(lease.episode_id)
            assert (entry.state, entry.reason) == ("dropped", "quarantined")


async def test_a_prepared_member_that_a_client_gave_up_on_is_dropped_when_its_team_commits_after_a_restart(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await world.claim()
        await given_up(world, lease)
        await world.service.prepare(lease.episode_id, preparation(lease), "sealed")
    async with running(tmp_path) as world:
        commit = EpisodeCommit(lease=lease.lease)
        receipt = await world.service.commit(lease.episode_id, commit)
        assert (receipt.status, receipt.dropped) == ("committed", DropReason.TAINTED)


# -- teams --------------------------------------------------------------------------------------------------------------


def preparation(lease: EpisodeGrant, **result: object) -> EpisodePreparation:
    decider = Decider(url="http://127.0.0.1:1", episode_id=lease.episode_id, key="k")
    return EpisodePreparation(
        lease=lease.lease, decider=decider, result=TeamResult.model_validate({"reward": 1.0} | result)
    )


async def test_a_tainted_member_cannot_be_prepared_and_says_so(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await tainted(world)
        service = world.service
        for _ in range(2):
            refusal = await world.refused(service.prepare(lease.episode_id, preparation(lease), "sealed"))
            assert (refusal.code, refusal.fields["dropped"]) == (ErrorCode.LEASE_LOST, "tainted")
        entry = await world.service.entry(lease.episode_id)
        assert (entry.reason, entry.cause, entry.reward) == ("tainted", "server", 1.0)


async def test_a_tainted_member_that_counts_despite_it_is_prepared_and_committed(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await tainted(world)
        service = world.service
        await service.prepare(lease.episode_id, preparation(lease, despite="it asked again"), "sealed")
        await service.commit(lease.episode_id, EpisodeCommit(lease=lease.lease))
        entry = await world.service.entry(lease.episode_id)
        assert (entry.state, entry.tainted, entry.despite) == ("ended", True, "it asked again")


async def test_a_member_that_nobody_called_counts_neither_in_training_nor_in_an_evaluation(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        service = world.service
        for kind in ("train", "eval"):
            lease = await world.claim(kind=kind)
            await service.prepare(lease.episode_id, preparation(lease), "sealed")
            for _ in range(2):
                receipt = await service.commit(lease.episode_id, EpisodeCommit(lease=lease.lease))
                assert (receipt.status, receipt.dropped) == ("committed", DropReason.NO_CALLS)
            entry = await world.service.entry(lease.episode_id)
            assert (entry.state, entry.reason, entry.cause) == ("dropped", "no_calls", "rollout")
        assert world.store.read.held_out(world.run_id) == []


async def test_a_member_found_tainted_after_it_was_prepared_is_dropped_by_itself(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await world.claim()
        await world.call(lease)
        found = await broken_call(world, lease, "left")
        service = world.service
        await service.prepare(lease.episode_id, preparation(lease), "sealed")
        await found_hung(world, found)
        await service.commit(lease.episode_id, EpisodeCommit(lease=lease.lease))
        entry = await world.service.entry(lease.episode_id)
        assert (entry.state, entry.reason, entry.cause) == ("dropped", "tainted", "server")


async def test_the_ledger_is_searched_and_summed_by_tainted(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        await world.end(await tainted(world), 0.5)
        summary = await world.service.summary(LedgerFilter(reason=DropReason.TAINTED))
        assert [(count.reason, count.episodes, count.reward_sum) for count in summary.counts] == [("tainted", 1, 0.5)]
