"""Ungrouped episodes, whose clients name the task only at the end.

An open one belongs to no group, counts as one slot, and derives its seeds from its own id. At its end it takes a free slot in a
group of its task, or opens a group, in the transaction that stores its reward.
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
"""A time at which no group's patience has run out, because groups wait for ungrouped episodes (`Groups.awaits`)."""


class GuestClaim(EpisodeClaim):
    """A claim of another system's client: it may name no task yet, and its agents call the model by any name."""

    task_id: Name = ""
    """Empty: the end names it."""


def no_room(t: Transition, run: Run) -> NotYet | None:
    """Why an ungrouped train episode cannot begin now; None if one can. Codes: invalid_spec if the run has a mix.

    The bound is the number of episodes that the next steps can use. Of the incomplete groups, only the fullest count, as many
    as these steps take. So however thinly a client spreads its episodes over tasks, it can fill some group until the pool is full.
    """
    state, batch, groups = t.state, run.spec.batch, t.state.groups
    if batch.mix:
        problem = "is needed: this run mixes families of tasks, and a claim without a task belongs to none"
        raise invalid_spec([FieldError(field="task_id", problem=problem)])
    playing = groups.ungrouped + sum(len(group.running) for group in groups)
    if len(state.pooled) + playing >= batch.max_pool_episodes:
        return NotYet(code=ErrorCode.DRAINING, detail=f"the pool holds its {batch.max_pool_episodes} episodes")
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
    detail = f"what step {run.step + ahead} and max_staleness allow is being played; wait for the step"
    return NotYet(code=ErrorCode.DRAINING, detail=detail)


def name_task(t: Transition, row: EpisodeRow, task_id: str | None) -> None:
    """Set the task that the end of an episode names, if it was claimed without one. Codes: invalid_spec if the end names
    none or the name is too long."""
    if not task_id or len(task_id) > LONGEST_NAME:
        problem = f"must be a text of 1 to {LONGEST_NAME} characters: the episode was claimed without a task"
        raise invalid_spec([FieldError(field="task_id", problem=problem)])
    row.task_id = task_id
    if row.kind == "eval" and t.state.is_at_this_step(row):
        taken = t.state.eval_ordinals.setdefault(task_id, set())
        row.ordinal = next(i for i in range(len(taken) + 1) if i not in taken)
        taken.add(row.ordinal)


def too_stale(state: ServerState, row: EpisodeRow) -> str | None:
    """Why the episode may not join a group, in the ledger's words: it would make the whole group too stale."""
    run = state.run
    assert run is not None
    lag = run.step + (state.journalled is not None) - row.oldest_step
    return f"its oldest token is {lag} versions behind" if lag > run.spec.max_staleness else None


def join(t: Transition, row: EpisodeRow) -> Group:
    """Give a just-ended ungrouped episode a slot: in the first group of its task with a free one, else in a new group."""
    state, run = t.state, t.state.run
    assert run is not None
    key = (row.task_id, row.mix, row.client_version, row.config_version)
    group, slot = state.groups.offer(key, _IN_TIME) or (open_group(t, run, key), 0)
    group.clients.add(row.client_id)
    group.left.discard(row.client_id)
    row.group_id, row.slot, row.ordinal = group.row.group_id, slot, group.row.ordinal
    take_slot(t, group, slot, row.episode_id)
    return group
