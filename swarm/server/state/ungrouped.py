"""Ungrouped episodes, whose clients name the task only at the end.

While it is open, such an episode belongs to no group, counts as one slot, and derives its seeds from its own id. When it ends, it
takes a free slot in a group of its task, or opens a group, in the same transaction that stores its reward.
"""

from __future__ import annotations

import math

from foundation.strict import FieldError
from swarm.protocol.episodes import LONGEST_NAME, EpisodeClaim, Name
from swarm.protocol.errors import ErrorCode
from swarm.protocol.problem import invalid_spec
from swarm.server.state.batching import horizon
from swarm.server.state.claim_queue import NotYet
from swarm.server.state.groups import Group
from swarm.server.state.rows import EpisodeRow
from swarm.server.state.runs import Run
from swarm.server.state.sample_pool import open_group, take_slot
from swarm.server.state.server_state import ServerState, Transition

_IN_TIME = -math.inf
"""A time before any group's patience runs out, for offering slots to ungrouped episodes: groups wait for them (`Groups.awaits`)."""


class GuestClaim(EpisodeClaim):
    """A claim from another system's client: it may leave the task open, and its agents may call the model by any name."""

    task_id: Name = ""
    """Task of the episode; empty if the client names it only at the end."""


def no_room(t: Transition, run: Run) -> NotYet | None:
    """Return why an ungrouped train episode cannot begin now; None if it can. Codes: invalid_spec if the run has a mix.

    The limit is the number of episodes that the next steps can use. Of the incomplete groups, only as many as those steps need are
    counted, the fullest first. So even a client that spreads its episodes over many tasks can go on filling
    groups until the pool is full.
    """
    state, batch, groups = t.state, run.spec.batch, t.state.groups
    if batch.mix:
        problem = "is required: this run mixes families of tasks, and a claim without a task belongs to no family"
        raise invalid_spec([FieldError(field="task_id", problem=problem)])
    playing = groups.ungrouped + sum(len(group.running) for group in groups)
    if len(state.pooled) + playing >= batch.max_pool_episodes:
        return NotYet(code=ErrorCode.DRAINING, detail=f"the pool is full ({batch.max_pool_episodes} episodes)")
    ahead = 0 if state.journalled is None else 1
    usable = horizon(run.spec, step=run.step, versions_ahead=ahead)
    size, by_episodes = batch.group_size, batch.rule == "episodes"
    wanted = usable if by_episodes else usable * size
    counted = [group for group in groups if group.counts]
    held = sum(group.expected if by_episodes else size for group in counted if not group.open)
    filled = sorted((len(group.ended) + len(group.running) for group in counted if group.open), reverse=True)
    held += sum(filled[: max(0, -(-(wanted - held) // size))]) + groups.ungrouped
    if held < wanted:
        return None
    detail = f"all episodes that max_staleness allows at step {run.step + ahead} are claimed; wait for the next step"
    return NotYet(code=ErrorCode.DRAINING, detail=detail)


def name_task(t: Transition, row: EpisodeRow, task_id: str | None) -> None:
    """Set the task of an episode that was claimed without one, when it ends. Codes: invalid_spec if no task is named or the
    name is too long."""
    if not task_id or len(task_id) > LONGEST_NAME:
        problem = f"must have 1 to {LONGEST_NAME} characters, because the episode was claimed without a task"
        raise invalid_spec([FieldError(field="task_id", problem=problem)])
    row.task_id = task_id
    if row.kind == "eval" and t.state.is_at_this_step(row):
        taken = t.state.eval_ordinals.setdefault(task_id, set())
        row.ordinal = next(i for i in range(len(taken) + 1) if i not in taken)
        taken.add(row.ordinal)


def too_stale(state: ServerState, row: EpisodeRow) -> str | None:
    """Return why the episode would make a whole group too stale, as the ledger reports it; None if it would not."""
    run = state.run
    assert run is not None
    lag = run.step + (state.journalled is not None) - row.oldest_step
    return f"its oldest token is {lag} versions behind" if lag > run.spec.max_staleness else None


def join(t: Transition, row: EpisodeRow) -> Group:
    """Give an ungrouped episode that has just ended a slot: in the first group of its task with a free slot, else in a new group."""
    state, run = t.state, t.state.run
    assert run is not None
    key = (row.task_id, row.mix, row.client_version, row.config_version)
    group, slot = state.groups.offer(key, _IN_TIME) or (open_group(t, run, key), 0)
    group.clients.add(row.client_id)
    group.left.discard(row.client_id)
    row.group_id, row.slot, row.ordinal = group.row.group_id, slot, group.row.ordinal
    take_slot(t, group, slot, row.episode_id)
    return group
