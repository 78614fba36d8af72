"""When enough has been collected for a step, how many groups may be open, and what a batch looks like in numbers."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from swarm.protocol.episodes import RecordedCall
from swarm.protocol.runspec import BatchSpec, RunSpec
from swarm.server.state.groups import Group, Groups
from swarm.server.state.mix import EVERYTHING, Turns, family_of
from swarm.server.state.rows import EpisodeRow, MixRow, PlannedGroup


def groups_needed(batch: BatchSpec) -> int:
    """Groups that make a step, when all of them get full."""
    if batch.rule == "episodes":
        return math.ceil((batch.episodes or 1) / batch.group_size)
    return batch.tasks


def one_batch(batch: BatchSpec) -> int:
    """What one step takes: groups, or with rule `episodes` episodes."""
    return (batch.episodes or 1) if batch.rule == "episodes" else batch.tasks


def most_flat(batch: BatchSpec) -> int:
    """Groups of equal rewards that rule `informative_tasks` drops for one step."""
    return batch.tasks * batch.max_gen_batches


def horizon(spec: RunSpec, *, step: int, versions_ahead: int) -> int:
    """What may be in the pool, open groups counted as full: as much as can still be used within `max_staleness`, the limit
    of steps and `max_pool_episodes`. In the units of `one_batch`.

    step: the newest that is done. versions_ahead: 1 while a step is made whose weights are not served yet, else 0. Each
    later batch is one version further on.
    """
    batch = spec.batch
    batches = spec.max_staleness - versions_ahead + 1
    if spec.limits.steps is not None:
        batches = min(batches, spec.limits.steps - step - versions_ahead)
    usable = one_batch(batch) * max(0, batches)
    if batch.rule == "episodes":
        return min(usable, batch.max_pool_episodes)
    return min(usable, max(batch.tasks, batch.max_pool_episodes // batch.group_size))


@dataclass(slots=True, kw_only=True)
class Draw:
    """Turns, and the groups that take them."""

    groups: list[Group]
    """In the order of their turns."""
    missing: Counter[str]
    """Turns of each family that no group takes; not all of them once each family has one and no group is left."""
    complete: bool


def draw(batch: BatchSpec, balance: MixRow, groups: Iterable[Group], wanted: int, passed: Set[str]) -> Draw:
    """Give the next turns to groups of the families whose turns they are, until there is as much as `wanted`.

    groups: in the order in which those of one family are taken. passed: families that are waited for no longer; they take
    a turn only while a group of theirs is there.
    """
    turns = Turns(balance)
    queues: dict[str, deque[Group]] = {name: deque() for name in turns.families}
    for group in groups:
        family = family_of(group.row.mix, batch.mix)
        if family in queues:
            queues[family].append(group)
    found = Draw(groups=[], missing=Counter(), complete=False)
    while wanted > 0:
        among = [name for name in turns.families if queues[name] or name not in passed]
        if not among:
            return found
        if not any(queues.values()) and found.missing.keys() >= set(among):
            return found  # what is wanted may be out of all reach: the turns left say nothing new
        name = turns.whose(among)
        turns.take(name)
        if queues[name]:
            found.groups.append(queues[name].popleft())
            wanted -= _worth(batch, found.groups[-1].expected)
        else:
            found.missing[name] += 1
            wanted -= _worth(batch, batch.group_size)
    found.complete = not found.missing
    return found


def _worth(batch: BatchSpec, episodes: int) -> int:
    return episodes if batch.rule == "episodes" else 1


def openings(batch: BatchSpec, balance: MixRow, groups: Groups, wanted: int, passed: Set[str]) -> frozenset[str]:
    """Families that may open another group now. wanted: the horizon."""
    held = [group.expected for group in groups]
    # After a patch of the bound or of the groups' size, what is held may fill the pool and still be less than a batch.
    if sum(held) >= batch.max_pool_episodes and sum(_worth(batch, each) for each in held) >= one_batch(batch):
        return frozenset()
    counted = [group for group in groups if group.counts]
    if not batch.mix:  # one family has all the turns
        taken = sum(_worth(batch, group.expected) for group in counted)
        return frozenset({EVERYTHING}) if taken < wanted else frozenset()
    # What a family that is passed has not finished holds no turn of the others up; itself it may catch up.
    sure = [group for group in counted if not (group.open and family_of(group.row.mix, batch.mix) in passed)]
    found = set(draw(batch, balance, sure, wanted, passed).missing)
    for late in passed:
        if draw(batch, balance, counted, wanted, passed - {late}).missing[late]:
            found.add(late)
    return frozenset(found)


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


def mix_values(groups: Sequence[Group], balance: MixRow) -> dict[str, float]:
    """The metrics of a batch by family, where the run has a mix. balance: after the batch."""
    if not set(balance.ratios) - {EVERYTHING}:
        return {}
    counts = Counter(group.row.mix for group in groups)
    values = {f"mix_groups/{name}": float(counts[name]) for name in balance.ratios}
    return values | {f"mix_debt/{name}": debt for name, debt in Turns(balance).debts().items()}


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
