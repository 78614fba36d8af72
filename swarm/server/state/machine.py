"""The state machine: turns a command, a state and a moment into a reply, changes for the disk, and wake-ups.

This module and the modules that it imports use no asyncio, SQL or clock. Nothing else writes the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarm.protocol.episodes import Cause, DropReason, EpisodeGrant, EpisodeState, RecordedCall
from swarm.protocol.errors import Refusal
from swarm.server.state import episodes, teams
from swarm.server.state.batching import Awaited
from swarm.server.state.claims import claim, is_decided_by
from swarm.server.state.groups import Group, Groups
from swarm.server.state.leases import Deadlines, LiveEpisode, Prepared
from swarm.server.state.rows import Change, EpisodeRow, Snapshot
from swarm.server.state.run_lifecycle import number_evals
from swarm.server.state.runs import Run, Versions
from swarm.server.state.sample_pool import settle_all
from swarm.server.state.server_state import LogLine, Moment, ServerState, Transition
from swarm.server.state.status import stirs

Reply = TypeVar("Reply", covariant=True)
Command = Callable[[Transition], Reply]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[Reply]):
    """The result of a command. The caller must apply all of it, even if the command failed."""

    answer: Callable[[], Reply]
    """Returns the reply or raises the command's error. Call it only when `changes` are on disk."""
    changes: list[Change]
    """Changes to write to disk atomically."""
    claims: list[tuple[int, EpisodeGrant | Refusal]]
    """Tickets of waiting claims with their answers. Send grants once `changes` are on disk."""
    closed: list[str]
    """Episodes whose ends are among `changes`. Call `episodes.forget` once the changes are on disk."""
    broken_off: list[str]
    """Episodes whose open calls must be cut off, including the closed episodes."""
    log: list[LogLine]
    wakes_loop: bool
    """Whether the training loop may have something to do."""
    wakes_resolver: bool
    """Whether the decider of a prepared episode has to be asked."""


def apply(state: ServerState, command: Command[Reply], now: Moment) -> Outcome[Reply]:
    """Carry out a command and everything that follows from it."""
    t = Transition(state, now)
    before = _concerns_loop(t)
    answer = _attempt(t, command)
    claims: list[tuple[int, EpisodeGrant | Refusal]] = []
    while state.claims_decided_by != (decided_by := is_decided_by(state, t.lease_time)):
        state.claims_decided_by = decided_by
        claims += state.queue.admit(lambda wanted: claim(t, wanted))
    if stirs(t.changes):
        state.situation.quiet_since, state.situation.waiting_for = now.unix, None
    return Outcome(
        answer=answer,
        changes=t.changes,
        claims=claims,
        closed=t.closed,
        broken_off=[*t.closed, *t.broken_off],
        log=t.log,
        wakes_loop=_concerns_loop(t) != before,
        wakes_resolver=t.in_doubt,
    )


def _attempt(t: Transition, command: Command[Reply]) -> Callable[[], Reply]:
    try:
        reply = command(t)
    except Exception as error:  # noqa: BLE001 - for any error: earlier decisions of the command stand, and must be written
        failure = error

        def fail() -> Reply:
            raise failure

        return fail
    return lambda: reply


def _concerns_loop(t: Transition) -> tuple[object, ...]:
    """Return the values, other than time, that the training loop's decisions depend on."""
    state, situation, run = t.state, t.state.situation, t.state.run
    return (
        state.claims_decided_by,
        state.closed_count,
        situation.engine_ready,
        situation.engine_failed,
        situation.opened_run,
        situation.serve_again,
        situation.checkpoint_wanted,
        situation.restoration,
        run and run.kept_step,
    )


def expire(t: Transition) -> None:
    """Act on everything that is due: leases, patience with groups and families, silent teams."""
    episodes.expire(t)
    teams.expire(t)


def load(
    state: ServerState,
    snapshot: Snapshot,
    now: Moment,
    suspected: Sequence[tuple[EpisodeRow, Sequence[RecordedCall]]] = (),
) -> Transition:
    """Load the state from disk, at the start and after a failed write. The next command tries the waiting claims again.

    Running episodes that this process does not know are closed as server_restarted. At the start, `suspected` holds the episodes
    whose clients gave up on a call and for which we can no longer find out why.
    """
    t = Transition(state, now)
    known = {**state.closing, **state.live}
    state.closing, state.live, state.prepared, state.pooled = {}, {}, {}, {}
    state.claim_keys, state.eval_ordinals, state.groups_by_task = {}, {}, snapshot.groups_by_task
    state.sessions = snapshot.sessions
    state.groups, state.awaited, state.versions = Groups(state.groups.revision), Awaited(), Versions(snapshot.versions)
    state.deadlines, state.team_deadlines, state.flat_groups = Deadlines(), Deadlines(), 0
    state.next_episode_seq, state.next_group_seq = snapshot.next_episode_seq, snapshot.next_group_seq
    state.run, state.journalled = None, snapshot.journalled
    if snapshot.run is not None:
        state.run = Run(row=snapshot.run, configs=snapshot.configs, step=snapshot.step, tokens=snapshot.tokens)
    for row in snapshot.groups:
        assert state.run is not None
        # Patience with a group starts again, even if all its episodes were lost before.
        rules = state.run.specs[row.config_version].batch
        state.groups.add(Group(row=row, rules=rules, last_loss=t.lease_time))
    bound = {team.episode_id: team for team in snapshot.teams}
    for episode in snapshot.episodes:
        if episode.state is EpisodeState.PREPARED:
            teams.hold(t, Prepared(row=episode, team=bound[episode.episode_id], in_doubt=True))
        else:
            _take_up(t, episode, known.get(episode.episode_id))
    number_evals(state, snapshot.eval_ordinals)
    # Close episodes only now: closing one may decide on its group, for which every slot must be accounted for.
    for lost in [live for name, live in state.live.items() if name not in known]:
        episodes.close(t, lost, DropReason.SERVER_RESTARTED, cause=Cause.SERVER)
    settle_all(t)
    state.situation.lived_at = max(state.situation.lived_at, snapshot.lived_at)
    for unsettled, calls in suspected:
        episodes.fail_unsettled(t, unsettled, calls)
    state.claims_decided_by = ()
    return t


def _take_up(t: Transition, row: EpisodeRow, known: LiveEpisode | None) -> None:
    """Load an episode that was running or waiting in the pool."""
    state, now = t.state, t.lease_time
    group = state.groups.get(row.group_id) if row.group_id else None
    if group is not None:
        group.clients.add(row.client_id)
    if row.state is EpisodeState.ENDED:
        assert group is not None
        assert row.slot is not None
        group.ended[row.slot] = row
        group.last_end = now
        state.pooled[row.episode_id] = row
        return
    if group is not None and row.slot is not None:
        group.running[row.slot] = row.episode_id
    if row.ungrouped:
        state.groups.expect(row)
    live = known or LiveEpisode(row=row, lease="", idle_limit_s=0.0, idle_at=now)
    live.row, live.cached_entry, live.expiry, live.close_at = row, None, None, math.inf
    state.live[row.episode_id] = live
    if known is not None:
        live.check_at = math.inf  # the deadlines were dropped above
        state.deadlines.watch(live, now)
        if live.claim_key is not None:
            state.claim_keys[live.claim_key] = row.episode_id
