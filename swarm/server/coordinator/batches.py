"""When enough has been collected for a step, how many groups may be open, and what a batch looks like in numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm.protocol.episodes import RecordedCall
from swarm.protocol.runspec import BatchSpec, RunSpec
from swarm.server.coordinator.groups import Group, Groups
from swarm.server.pool.rows import EpisodeRow, PlannedGroup


def groups_needed(batch: BatchSpec) -> int:
    """Groups that make a step, when all of them get full."""
    if batch.rule == "episodes":
        return math.ceil((batch.episodes or 1) / batch.group_size)
    return batch.tasks


def may_open_group(spec: RunSpec, groups: Groups, *, pooled: int, step: int, versions_ahead: int) -> bool:
    """Whether one more group can still be used within `max_staleness` and the limit of steps.

    pooled: ended episodes that no batch has taken. step: the newest that is done. versions_ahead: 1 while a step is made whose weights are not served yet, else 0. Each later
    batch is one version further on.
    """
    batches = spec.max_staleness - versions_ahead + 1
    if spec.limits.steps is not None:
        batches = min(batches, spec.limits.steps - step - versions_ahead)
    if pooled >= spec.batch.max_pool_episodes:
        return False
    if spec.batch.rule == "episodes":
        expected = sum(group.row.size if group.open else len(group.ended) for group in groups)
        return expected < (spec.batch.episodes or 1) * batches
    return len(groups) < spec.batch.tasks * batches


def cut(batch: BatchSpec, ready: Sequence[Group]) -> list[Group] | None:
    """The groups of the next step, in the order they were opened; None when there are not enough."""
    if batch.rule == "episodes":
        taken: list[Group] = []
        for group in ready:
            taken.append(group)
            if sum(len(one.ended) for one in taken) >= (batch.episodes or 1):
                return taken
        return None
    return list(ready[: batch.tasks]) if len(ready) >= batch.tasks else None


def plan(groups: Sequence[Group]) -> list[PlannedGroup]:
    """The batch as it is journalled: groups in their order, episodes by slot."""
    return [
        PlannedGroup(
            group_id=group.row.group_id,
            task_id=group.row.task_id,
            episode_ids=[row.episode_id for row in group.in_slot_order()],
        )
        for group in groups
    ]


def pool_values(groups: Sequence[Group], *, weights_step: int, generate_s: float) -> dict[str, float]:
    """The server's metrics of a batch (docs/metrics.md). weights_step: of the weights that the batch is trained from."""
    rows = [row for group in groups for row in group.ended.values()]
    sampled = sum(row.sampled_tokens for row in rows)
    lag = weights_step * sampled - sum(row.step_tokens for row in rows)
    return {
        "episodes": float(len(rows)),
        "groups": float(len(groups)),
        "success_rate": sum(row.success is True for row in rows) / len(rows),
        "sampled_tokens_mean": sampled / len(rows),
        "staleness_mean": lag / sampled if sampled else 0.0,
        "staleness_max": float(max(weights_step - row.oldest_step for row in rows)),
        "generate_s": generate_s,
    }


def count_tokens(row: EpisodeRow, calls: Sequence[RecordedCall]) -> None:
    """Write into the row what its calls add up to."""
    row.calls = len(calls)
    row.prompt_tokens = sum(len(call.prompt_ids) for call in calls)
    row.sampled_tokens = sum(len(call.sampled_ids) for call in calls)
    spans = [span for call in calls for span in call.versions if span.end > span.start]
    row.oldest_step = min((span.version.step for span in spans), default=row.claimed_step)
    spanned = sum(span.end - span.start for span in spans)
    # Tokens that no span covers count as sampled by what was served at the claim.
    row.step_tokens = sum((span.end - span.start) * span.version.step for span in spans)
    row.step_tokens += (row.sampled_tokens - spanned) * row.claimed_step
