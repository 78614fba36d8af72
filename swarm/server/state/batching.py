"""Forms batches: decides which family's turn it is, when enough groups are collected, and how many may be open until then.

A run may mix families of tasks in given ratios. The next turn belongs to the family that is furthest behind its share. We count
in whole numbers, so that this is exact: starting from a balance of zero, every family has exactly its share again after n groups,
where n is the sum of the ratios in lowest terms. Without a mix, all groups belong to one family, "".
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from swarm.protocol.runspec import BatchSpec, MixSpec, RunSpec
from swarm.server.state.groups import Group, Groups
from swarm.server.state.rows import MixRow, PlannedGroup

EVERYTHING = ""
"""The only family of a run without a mix."""
Mix = Mapping[str, MixSpec]


def family_of(label: str | None, mix: Mix) -> str:
    """Return the family of a group with this label: the label itself if the run has a mix, else the only family."""
    return label or EVERYTHING if mix else EVERYTHING


def balance_under(row: MixRow, mix: Mix) -> MixRow:
    """Return the balance under the ratios of `mix`. If the ratios changed, counting starts again, and only whole groups that are owed
    carry over."""
    ratios = {name: family.ratio for name, family in mix.items()} or {EVERYTHING: 1.0}
    if ratios == row.ratios:
        return row
    debts = Turns(row).debts()
    owed = {name: int(debts.get(name, 0.0)) for name in ratios}
    carried = {name: groups for name, groups in owed.items() if groups}
    return MixRow(ratios=ratios, carried=carried, trained=row.trained)


def balance_after(row: MixRow, mix: Mix, labels: Iterable[str | None]) -> MixRow:
    """Return the balance after a step that trains groups with these labels."""
    now = balance_under(row, mix)
    entered, trained = dict(now.entered), dict(now.trained)
    for label in labels:
        name = family_of(label, mix)
        entered[name] = entered.get(name, 0) + 1
        if label is not None:
            trained[label] = trained.get(label, 0) + 1
    return MixRow(ratios=now.ratios, carried=now.carried, entered=entered, trained=trained)


class Turns:
    """Iterates over the turns that follow from a balance."""

    def __init__(self, row: MixRow) -> None:
        self._weights = _weights(tuple(row.ratios.items()))
        self._whole = sum(self._weights.values())
        groups = sum(row.entered.values())
        self._owed = {
            name: (row.carried.get(name, 0) - row.entered.get(name, 0)) * self._whole + weight * groups
            for name, weight in self._weights.items()
        }

    @property
    def families(self) -> list[str]:
        return list(self._weights)

    def whose(self, among: Iterable[str]) -> str:
        """Return the family that is furthest behind; of equals, the one that the spec names first."""
        return max(among, key=lambda name: self._owed[name] + self._weights[name])

    def take(self, name: str) -> None:
        for other, weight in self._weights.items():
            self._owed[other] += weight
        self._owed[name] -= self._whole

    def debts(self) -> dict[str, float]:
        """Return how many groups each family is behind its share; negative if it is ahead."""
        return {name: owed / self._whole for name, owed in self._owed.items()}


@lru_cache(maxsize=64)
def _weights(ratios: tuple[tuple[str, float], ...]) -> dict[str, int]:
    """Return the ratios as whole numbers in lowest terms. The result is cached, so callers must not change it."""
    exact = {name: Fraction(str(ratio)) for name, ratio in ratios}
    scale = math.lcm(*(ratio.denominator for ratio in exact.values()))
    whole = {name: int(ratio * scale) for name, ratio in exact.items()}
    shared = math.gcd(*whole.values())
    return {name: weight // shared for name, weight in whole.items()}


@dataclass(slots=True)
class _Wait:
    """State of the other families' wait for one family. Times are lease time."""

    since: float
    early: bool
    """Whether the wait began before any family had its part of the next step. It then pauses while a client plays the family."""
    resting: bool = False
    """Whether the wait is paused because a client plays the family. If that episode is lost, the wait resumes with the same `since`; if
    it reaches the pool, the wait ends."""
    reported: bool = False


@dataclass(slots=True)
class Awaited:
    """Families for which the others wait once they have done their own part. Times are lease time."""

    waits: dict[str, _Wait] = field(default_factory=dict)

    def ends_at(self, mix: Mix) -> dict[str, float]:
        """Return the time at which patience with each awaited family runs out. Omits paused waits."""
        return {
            name: wait.since + mix[name].patience_s
            for name, wait in self.waits.items()
            if name in mix and not wait.resting
        }

    def passed(self, mix: Mix, now: float) -> frozenset[str]:
        """Return the families with which patience has run out: steps run without them until they complete a group."""
        return frozenset(name for name, at in self.ends_at(mix).items() if at <= now)

    def newly_passed(self, mix: Mix, now: float) -> list[str]:
        """Return the families with which patience has run out since this method was last called."""
        passed = self.passed(mix, now)
        late = sorted(name for name in passed if not self.waits[name].reported)
        for name, wait in self.waits.items():
            wait.reported = name in passed
        return late

    def look(self, missing: Set[str], awaited: Set[str], mix: Mix, now: float, *, early: bool) -> list[str]:
        """Start or resume waiting for the `awaited` families. Return those for which a wait started or resumed.

        Stop waiting for families that are not `missing`, unless patience with them ran out or the wait is paused.
        `early` means that no family has its part of the next step ready yet.
        """
        kept = missing | self.passed(mix, now)
        self.waits = {name: wait for name, wait in self.waits.items() if name in kept or wait.resting}
        if not early:
            for wait in self.waits.values():
                wait.early = False
        begun = [name for name in awaited if name in mix and (name not in self.waits or self.waits[name].resting)]
        for name in begun:
            since = self.waits[name].since if name in self.waits else now
            self.waits[name] = _Wait(since, early)
        return begun

    def played(self, name: str, mix: Mix, now: float) -> None:
        """Pause an early wait for a family because a client took one of its slots, unless patience has run out."""
        wait = self.waits.get(name)
        if wait is not None and wait.early and name not in self.passed(mix, now):
            wait.resting = True

    def delivered(self, name: str) -> None:
        """End a paused wait for a family because one of its episodes reached the pool."""
        if name in self.waits and self.waits[name].resting:
            del self.waits[name]

    def ready(self, name: str) -> None:
        """End the wait for a family because it finished a group."""
        self.waits.pop(name, None)

    def clear(self) -> None:
        """End all waits."""
        self.waits.clear()


# -- batches ----------------------------------------------------------------------------------------------------------


def groups_needed(batch: BatchSpec) -> int:
    """Return the number of groups that a step needs if all of them become full."""
    if batch.rule == "episodes":
        return math.ceil((batch.episodes or 1) / batch.group_size)
    return batch.tasks


def one_batch(batch: BatchSpec) -> int:
    """Return the size of one step's batch: in groups or, with rule `episodes`, in episodes."""
    return (batch.episodes or 1) if batch.rule == "episodes" else batch.tasks


def most_flat(batch: BatchSpec) -> int:
    """Return the maximum number of groups with equal rewards that rule `informative_tasks` drops for one step."""
    return batch.tasks * batch.max_gen_batches


def horizon(spec: RunSpec, *, step: int, versions_ahead: int) -> int:
    """Return how many groups (or episodes, as in `one_batch`) the pool may hold, counting open groups as full.

    That is as many as can still be used within `max_staleness`, the limit of steps and `max_pool_episodes`. `step` is the newest
    completed step. `versions_ahead` is 1 during a step whose weights are not served yet, else 0; each later batch is one version
    further ahead.
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
    """The result of assigning groups to turns."""

    groups: list[Group]
    """The groups that have a turn, in the order of their turns."""
    missing: Counter[str]
    """For each family, the number of turns that no group could fill. Counting stops once every family lacks one and none is left."""
    complete: bool


def draw(batch: BatchSpec, balance: MixRow, groups: Iterable[Group], wanted: int, passed: Set[str]) -> Draw:
    """Fill the next turns with groups of the right families, until the batch has size `wanted`.

    Args:
        batch: the run's batch settings.
        balance: the balance before these turns.
        groups: candidates; each family's groups are used in this order.
        wanted: size of the batch, in the unit of `one_batch`.
        passed: families for which nobody waits any longer. They get a turn only if they have a group.
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
            return found  # `wanted` may be unreachable, and further turns would tell us nothing new
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
    """Return the families that may open another group now. `wanted` is the size that the pool may have; see `horizon`."""
    held = [group.expected for group in groups]
    # After a patch of the pool's limit or of the group size, a full pool may still hold less than a batch.
    pool = sum(held) + groups.ungrouped
    if pool >= batch.max_pool_episodes and sum(_worth(batch, each) for each in held) >= one_batch(batch):
        return frozenset()
    counted = [group for group in groups if group.counts]
    if not batch.mix:  # one family has all the turns
        ungrouped = groups.ungrouped if batch.rule == "episodes" else groups.ungrouped / batch.group_size
        taken = sum(_worth(batch, group.expected) for group in counted) + ungrouped
        return frozenset({EVERYTHING}) if taken < wanted else frozenset()
    # Unfinished groups of a passed family do not hold up other families' turns, but the family itself may catch up.
    sure = [group for group in counted if not (group.open and family_of(group.row.mix, batch.mix) in passed)]
    found = set(draw(batch, balance, sure, wanted, passed).missing)
    for late in passed:
        if draw(batch, balance, counted, wanted, passed - {late}).missing[late]:
            found.add(late)
    return frozenset(found)


def plan(groups: Sequence[Group]) -> list[PlannedGroup]:
    """Return the batch in the form that the journal stores: groups in their order, episodes by slot."""
    return [
        PlannedGroup(
            group_id=group.row.group_id,
            task_id=group.row.task_id,
            episode_ids=[row.episode_id for row in group.in_slot_order()],
        )
        for group in groups
    ]


def pool_values(groups: Sequence[Group], *, weights_step: int, generate_s: float) -> dict[str, float]:
    """Return the server's metrics of a batch (docs/reference/metrics.md). `weights_step` is the step of the weights to train."""
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
    """Return a batch's metrics by family; empty without a mix. `balance` is the balance after the batch."""
    if not set(balance.ratios) - {EVERYTHING}:
        return {}
    counts = Counter(group.row.mix for group in groups)
    values = {f"mix_groups/{name}": float(counts[name]) for name in balance.ratios}
    return values | {f"mix_debt/{name}": debt for name, debt in Turns(balance).debts().items()}
