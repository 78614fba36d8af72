"""What a run stands still for: the oldest open episode of the groups that its next step needs, or the task whose slots nobody claims.

Pure bookkeeping. Nothing is named before it has been quiet for a while: groups that fill are what a run does all day.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.protocol.status import WaitingFor
from swarm.server.state.batches import draw, horizon, one_batch, openings
from swarm.server.state.groups import Group
from swarm.server.state.mix import in_force
from swarm.server.state.rows import Change, EpisodeRow, FreeCalls, PutCalls, PutEpisode, PutMeta
from swarm.server.state.runs import Run
from swarm.server.state.state import BookState

QUIET_S = 10.0
"""Seconds without a claim or an end, while nobody else may claim for the next step."""
LONG_QUIET_S = 60.0
"""The same while others may, and do not."""
LOOK_EVERY_S = 5.0


def waiting_for(state: BookState, quiet_since: float) -> WaitingFor | None:
    """What the run cannot go on without; None while it goes on, or waits for nobody in particular.

    quiet_since: Unix time of the newest change that `stirs`.
    """
    run = state.run
    if run is None or run.row.status != "running" or not state.serving or state.journalled is not None:
        return None
    quiet_s = state.clock.now() - quiet_since
    if quiet_s < QUIET_S or _complete(state, run):
        return None
    if quiet_s < LONG_QUIET_S and run.row.stop_requested_at is None and _may_open(state, run):
        return None
    groups = [group for group in state.groups if group.open and not group.useless]
    played = [row for group in groups for row in _played(state, group)]
    if run.row.stop_requested_at is not None:  # then every open episode is waited for
        played = [live.row for live in state.live.values()] or played
    if played:
        oldest = min(played, key=lambda row: row.seq)
        return WaitingFor(task_id=oldest.task_id, client_id=oldest.client_id, since=quiet_since)
    free = next((group for group in groups if group.free_slot(state.lease_time) is not None), None)
    return None if free is None else WaitingFor(task_id=free.row.task_id, since=quiet_since)


def stirs(changes: Sequence[Change]) -> bool:
    """Whether these changes bring the next step nearer, or take away from it. Evaluations do neither."""
    return any(
        not isinstance(change, PutCalls | FreeCalls | PutMeta) and not _of_evaluation(change) for change in changes
    )


def _of_evaluation(change: Change) -> bool:
    return isinstance(change, PutEpisode) and change.row.kind == "eval"


def _played(state: BookState, group: Group) -> list[EpisodeRow]:
    """Rows of the episodes that hold its slots."""
    holders = [state.live.get(name) or state.prepared.get(name) for name in group.running.values()]
    return [holder.row for holder in holders if holder is not None]


def _complete(state: BookState, run: Run) -> bool:
    batch = run.spec.batch
    balance = in_force(run.row.mix, batch.mix)
    return draw(batch, balance, state.groups.ready(), one_batch(batch), state.passed()).complete


def _may_open(state: BookState, run: Run) -> bool:
    """Whether a claim could open another group now."""
    batch = run.spec.batch
    wanted = horizon(run.spec, step=run.step, versions_ahead=0)
    return bool(openings(batch, in_force(run.row.mix, batch.mix), state.groups, wanted, state.passed()))
