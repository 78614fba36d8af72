"""Every path that closes an attempt without a reward names who lost it, and the ledger adds it up."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from swarm.protocol.episodes import Cause, DropReason, EpisodeAbort, EpisodeGrant, EpisodeState
from swarm.protocol.status import RestoreRequest
from swarm.protocol.summary import LedgerFilter
from swarm.protocol.teams import Decider, EpisodeCommit, EpisodePreparation, TeamDecision, TeamResult
from swarm.server.state import teams
from swarm.server.state.call_codec import Unwritable
from swarm.server.state.episodes import RECORD_LIMIT_S, blamed
from swarm.server.state.rows import EpisodeRow
from swarm.server.storage.schema import EPISODE_BODY, LOST_BY_CAUSE
from swarm.server.storage.store import Store
from tests.fakes.engine import FaultyEngine
from tests.swarm.server.state.world import World, running
from tests.swarm.server.storage.test_store import row

pytestmark = pytest.mark.anyio


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path) as world:
        await world.begin(limits={"drain_limit_s": 10})
        yield world


async def causes(world: World) -> list[Cause | None]:
    """Of every episode, in the order of the claims."""
    return [entry.cause for entry in (await world.service.ledger(limit=1000)).entries]


async def prepared(world: World, decider_id: str | None = None) -> EpisodeGrant:
    """A member of a team, with the server's own decider unless another is named."""
    lease = await world.claim()
    await world.call(lease)
    await prepare(world, lease, decider_id)
    return lease


async def prepare(world: World, lease: EpisodeGrant, decider_id: str | None = None) -> None:
    decider = Decider(url="http://elsewhere:8642", episode_id=decider_id or lease.episode_id, key="swd_k")
    wish = EpisodePreparation(lease=lease.lease, decider=decider, result=TeamResult(reward=1.0), patience_s=60)
    await world.service.prepare(lease.episode_id, wish, "sealed")


@pytest.mark.parametrize("stated", [None, *Cause])
@pytest.mark.parametrize("in_team", [False, True])
async def test_an_abort_is_lost_by_whom_its_client_names_and_else_by_the_rollout(
    world: World, stated: Cause | None, in_team: bool
) -> None:
    lease = await prepared(world) if in_team else await world.claim()
    abort = EpisodeAbort(lease=lease.lease, reason="no", cause=stated)
    assert (await world.service.abort(lease.episode_id, abort)).cause is (stated or Cause.ROLLOUT)
    assert (await world.service.abort(lease.episode_id, abort)).cause is (stated or Cause.ROLLOUT)
    assert await causes(world) == [stated or Cause.ROLLOUT]


@pytest.mark.parametrize("stated", [None, Cause.ROLLOUT, Cause.CLIENT, Cause.NETWORK, Cause.LIMIT])
def test_what_failed_on_the_servers_side_was_lost_by_the_server_whatever_the_client_took_it_for(
    stated: Cause | None,
) -> None:
    assert blamed(stated, tainted=True) is Cause.SERVER
    assert blamed(stated, tainted=False) is (stated or Cause.ROLLOUT)


@pytest.mark.parametrize("stated", [Cause.GRADER, Cause.PERSON, Cause.SERVER])
def test_a_failed_call_excuses_neither_grader_nor_persons(stated: Cause) -> None:
    assert blamed(stated, tainted=True) is stated


async def test_silence_is_the_clients_loss_and_time_that_ran_out_the_limits(world: World) -> None:
    await world.claim(idle_limit_s=60)
    await world.passes(61)
    await world.claim(max_episode_s=100)
    await world.passes(101)
    called = await world.claim(idle_limit_s=20, max_call_s=50)
    world.service.open_call(called.episode_id, called.lease)
    await world.passes(51)
    await world.passes(RECORD_LIMIT_S)
    assert await causes(world) == [Cause.CLIENT, Cause.LIMIT, Cause.LIMIT]


@pytest.mark.parametrize("kind", ["train", "eval"])
async def test_an_end_without_a_call_is_the_rollouts_loss_and_its_receipt_says_so_each_time(
    world: World, kind: str
) -> None:
    lease = await world.claim(kind=kind)
    receipts = [await world.end(lease) for _ in range(2)]
    assert [(one.status, one.dropped) for one in receipts] == [
        ("pooled", DropReason.NO_CALLS),
        ("already_ended", DropReason.NO_CALLS),
    ]
    assert await causes(world) == [Cause.ROLLOUT]
    whole = await world.claim(kind=kind)
    await world.call(whole)
    assert (await world.end(whole)).dropped is None


async def test_evaluations_and_what_was_rewarded_are_lost_by_nobody(world: World) -> None:
    await world.batch()
    await world.until_step(1)
    lease = await world.claim(kind="eval")
    await world.call(lease)
    await world.end(lease)
    assert await causes(world) == [None] * 5
    assert (await world.service.summary(LedgerFilter())).causes == {}


async def test_what_a_restart_a_stop_or_a_restore_closes_is_lost_by_the_server(tmp_path: Path) -> None:
    engine = FaultyEngine()
    async with running(tmp_path, engine) as world:
        await world.begin(limits={"drain_limit_s": 10})
        await world.claim()
        await world.die()
    async with running(tmp_path, engine) as world:
        run = world.service.state.run
        assert run is not None
        world.run_id = run.run_id
        assert await causes(world) == [Cause.SERVER]
        await world.claim(wait_s=100)
        await world.service.restore_run(world.run_id, RestoreRequest(step=0), by="tester")
        await world.claim(wait_s=100)
        await world.claim(wait_s=100, kind="eval")
        await world.service.stop_run(world.run_id)
        await world.passes(11)
        await world.until_status("stopped")
        assert await causes(world) == [Cause.SERVER] * 4


async def test_a_claimant_that_went_away_is_the_clients_loss(world: World) -> None:
    granted = await world.claim()
    world.service._abandon(world.wish(), granted)
    assert await causes(world) == [Cause.CLIENT]


async def test_calls_that_cannot_be_kept_are_the_servers_loss(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwritable(calls: object) -> bytes:
        raise Unwritable("nested too deeply")

    lease = await world.claim()
    await world.call(lease)
    monkeypatch.setattr("swarm.server.state.episodes.encode", unwritable)
    await world.refused(world.end(lease))
    assert await causes(world) == [Cause.SERVER]


@pytest.mark.parametrize("way", ["end", "abort", "expire", "commit"])
@pytest.mark.parametrize("answered_after", [False, True])
async def test_an_episode_that_was_lost_after_a_refused_request_says_why_it_was_refused(
    world: World, way: str, answered_after: bool
) -> None:
    lease = await world.claim()
    world.service.refused(lease.episode_id, "stop must be a text (400)")
    if answered_after:
        await world.call(lease)
    if way == "end":
        await world.end(lease)
    elif way == "abort":
        await world.service.abort(lease.episode_id, EpisodeAbort(lease=lease.lease, reason="no"))
    elif way == "expire":
        await world.passes(3601)
    else:
        await prepare(world, lease)
        await world.service.commit(lease.episode_id, EpisodeCommit(lease=lease.lease))
    entry = await world.service.entry(lease.episode_id)
    counts = answered_after and way in ("end", "commit")
    lost_as = {"end": "no_calls", "abort": "aborted", "expire": "expired", "commit": "no_calls"}
    assert entry.reason == (None if counts else lost_as[way])
    assert ("its last request was refused: stop must be a text (400)" in (entry.detail or "")) is not answered_after


# -- teams ------------------------------------------------------------------------------------------------------------


async def test_a_silent_team_is_its_clients_loss_and_one_that_its_run_left_behind_the_servers(world: World) -> None:
    await prepared(world)
    await world.passes(61)
    await prepared(world)
    await world.service.stop_run(world.run_id)
    await world.passes(11)
    assert await causes(world) == [Cause.CLIENT, Cause.SERVER]


@pytest.mark.parametrize("told", [None, Cause.GRADER, Cause.SERVER])
async def test_a_participant_is_lost_by_whom_the_decider_names(world: World, told: Cause | None) -> None:
    lease = await prepared(world, "ep-elsewhere")
    decision = TeamDecision(episode_id="ep-elsewhere", decision="aborted", cause=told)
    await world.service.carry_out(lambda t: teams.hear_decision(t, lease.episode_id, decision))
    assert await causes(world) == [told or Cause.CLIENT]


async def test_a_decider_says_who_lost_the_team(world: World) -> None:
    lease = await prepared(world)
    await world.service.abort(lease.episode_id, EpisodeAbort(lease=lease.lease, reason="no", cause=Cause.GRADER))
    decision = await world.service.decision(lease.episode_id)
    assert (decision.decision, decision.cause) == ("aborted", Cause.GRADER)
    ended = await prepared(world)
    await world.service.commit(ended.episode_id, EpisodeCommit(lease=ended.lease))
    assert (await world.service.decision(ended.episode_id)).cause is None


# -- sums -------------------------------------------------------------------------------------------------------------


async def test_the_ledger_adds_up_who_lost_what_by_client_version_and_task(world: World) -> None:
    async def lose(task: str, cause: Cause, **fields: str) -> None:
        lease = await world.claim(task, **fields)
        await world.service.abort(lease.episode_id, EpisodeAbort(lease=lease.lease, reason="no", cause=cause))

    for _ in range(3):
        await lose("t-1", Cause.GRADER)
    await lose("t-2", Cause.GRADER, client_id="c-2", client_version="2", kind="eval")
    await lose("t-2", Cause.PERSON)
    summary = await world.service.summary(LedgerFilter(run_id=world.run_id))
    assert summary.causes == {Cause.GRADER: 4, Cause.PERSON: 1}
    assert [
        (one.client_id, one.client_version, one.kind, one.task_id, one.cause, one.episodes) for one in summary.lost
    ] == [
        ("c-1", "0", "train", "t-1", Cause.GRADER, 3),
        ("c-2", "2", "eval", "t-2", Cause.GRADER, 1),
        ("c-1", "0", "train", "t-2", Cause.PERSON, 1),
    ]
    assert {(count.cause, count.episodes) for count in summary.counts} == {
        (Cause.GRADER, 3),
        (Cause.GRADER, 1),
        (Cause.PERSON, 1),
    }
    page = await world.service.ledger(run_id=world.run_id, cause=Cause.GRADER)
    assert len(page.entries) == 4
    assert (await world.service.summary(LedgerFilter(cause=Cause.PERSON))).causes == {Cause.PERSON: 1}
    assert (await world.service.lost(world.run_id)) == {**dict.fromkeys(Cause, 0), Cause.GRADER: 4, Cause.PERSON: 1}


def old_row(seq: int, reason: DropReason, reward: float | None = None) -> EpisodeRow:
    return row(seq, state=EpisodeState.DROPPED, reason=reason, reward=reward)


def test_of_an_older_pool_the_cause_is_read_where_the_reason_tells_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "pool.sqlite")
    rows = [
        old_row(1, DropReason.SERVER_RESTARTED),
        old_row(2, DropReason.NO_CALLS, 1.0),
        old_row(3, DropReason.RUN_ENDED),
        old_row(4, DropReason.RUN_ENDED, 1.0),
        old_row(5, DropReason.SUPERSEDED),
        old_row(6, DropReason.ABORTED),
        old_row(7, DropReason.EXPIRED),
        old_row(8, DropReason.EVAL, 1.0),
        row(9, state=EpisodeState.RUNNING),
    ]
    store.write(list(rows))
    store.close()
    older = EPISODE_BODY.index("cause")
    with sqlite3.connect(tmp_path / "pool.sqlite") as db:
        db.execute("DROP INDEX episodes_lost")
        for seq, body in db.execute("SELECT seq, body FROM episodes").fetchall():
            db.execute("UPDATE episodes SET body = ? WHERE seq = ?", (orjson.dumps(orjson.loads(body)[:older]), seq))
    db.close()
    store = Store(tmp_path / "pool.sqlite")
    server, rollout = Cause.SERVER, Cause.ROLLOUT
    found = [one.cause for one in store.read.ledger(LedgerFilter(), 0, 100)]
    assert found == [server, rollout, server, None, server, None, None, None, None]
    assert store.read.summary(LedgerFilter()).causes == {server: 3, rollout: 1}
    assert store.read.lost("run-1") == {server: 3, rollout: 1}
    store.close()


def test_who_lost_what_is_counted_over_what_was_lost_alone(store_with_plan: list[str]) -> None:
    assert any("episodes_lost" in line for line in store_with_plan)


@pytest.fixture
def store_with_plan(tmp_path: Path) -> list[str]:
    """How SQLite goes about the counts of /metrics."""
    Store(tmp_path / "pool.sqlite").close()
    with sqlite3.connect(tmp_path / "pool.sqlite") as db:
        plan = [str(line) for line in db.execute(f"EXPLAIN QUERY PLAN {LOST_BY_CAUSE}", ("run-1",))]
    db.close()
    return plan
