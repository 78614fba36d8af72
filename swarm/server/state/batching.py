"""What a step takes: whose turn it is, when enough has been collected, and how many groups may be open until then.

A run may mix families of tasks in given ratios. The next turn is the furthest behind family's. In whole numbers this is exact:
from a balance of zero, every family has its share again after as many groups as the ratios add up to in lowest terms. Without
a mix all groups are of one family, "".
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
"""The one family of a run without a mix."""
Mix = Mapping[str, MixSpec]


def family_of(label: str | None, mix: Mix) -> str:
    """The family that a group of this label belongs to; only for labels that the mix names, when there is one."""
    return label or EVERYTHING if mix else EVERYTHING


def balance_under(row: MixRow, mix: Mix) -> MixRow:
    """The balance under the ratios of `mix`. When they changed, it begins anew with the whole groups that are owed."""
    ratios = {name: family.ratio for name, family in mix.items()} or {EVERYTHING: 1.0}
    if ratios == row.ratios:
        return row
    debts = Turns(row).debts()
    owed = {name: int(debts.get(name, 0.0)) for name in ratios}
    carried = {name: groups for name, groups in owed.items() if groups}
    return MixRow(ratios=ratios, carried=carried, trained=row.trained)


def balance_after(row: MixRow, mix: Mix, labels: Iterable[str | None]) -> MixRow:
    """The balance after a step that groups of these labels entered."""
    now = balance_under(row, mix)
    entered, trained = dict(now.entered), dict(now.trained)
    for label in labels:
        name = family_of(label, mix)
        entered[name] = entered.get(name, 0) + 1
        if label is not None:
            trained[label] = trained.get(label, 0) + 1
    return MixRow(ratios=now.ratios, carried=now.carried, entered=entered, trained=trained)


class Turns:
    """A walk over the turns that follow a balance."""

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
        """The family furthest behind; among equals the one that the spec names first."""
        return max(among, key=lambda name: self._owed[name] + self._weights[name])

    def take(self, name: str) -> None:
        for other, weight in self._weights.items():
            self._owed[other] += weight
        self._owed[name] -= self._whole

    def debts(self) -> dict[str, float]:
        """Groups that each family is behind."""
        return {name: owed / self._whole for name, owed in self._owed.items()}


@lru_cache(maxsize=64)
def _weights(ratios: tuple[tuple[str, float], ...]) -> dict[str, int]:
    """The ratios as whole numbers in lowest terms. Never changed by who gets it."""
    exact = {name: Fraction(str(ratio)) for name, ratio in ratios}
    scale = math.lcm(*(ratio.denominator for ratio in exact.values()))
    whole = {name: int(ratio * scale) for name, ratio in exact.items()}
    shared = math.gcd(*whole.values())
    return {name: weight // shared for name, weight in whole.items()}


@dataclass(slots=True)
class _Wait:
    """Of others for one family, since then. Times are lease time."""

    since: float
    early: bool
    """It began before anybody had its part of the next step ready: only while nobody plays that family."""
    resting: bool = False
    """Somebody plays it: until an episode of it is in the pool, or is lost."""
    reported: bool = False


@dataclass(slots=True)
class Awaited:
    """Families that others wait for, which have done what they may. Times are lease time."""

    waits: dict[str, _Wait] = field(default_factory=dict)

    def ends_at(self, mix: Mix) -> dict[str, float]:
        """When the patience with each runs out."""
        return {
            name: wait.since + mix[name].patience_s
            for name, wait in self.waits.items()
            if name in mix and not wait.resting
        }

    def passed(self, mix: Mix, now: float) -> frozenset[str]:
        """Those whose patience ran out: steps are made without them until they deliver a group."""
        return frozenset(name for name, at in self.ends_at(mix).items() if at <= now)

    def newly_passed(self, mix: Mix, now: float) -> list[str]:
        """Families whose patience has run out since the last call: each is returned once."""
        passed = self.passed(mix, now)
        late = sorted(name for name in passed if not self.waits[name].reported)
        for name, wait in self.waits.items():
            wait.reported = name in passed
        return late

    def look(self, missing: Set[str], awaited: Set[str], mix: Mix, now: float, *, early: bool) -> list[str]:
        """Begin to wait for those who are `awaited`; returns whom. Forget who is not `missing`.

        early: nobody has its part of the next step ready yet.
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
        """Somebody took a slot of that family: what began early, and is not over, rests until it is known how that ends."""
        wait = self.waits.get(name)
        if wait is not None and wait.early and name not in self.passed(mix, now):
            wait.resting = True

    def delivered(self, name: str) -> None:
        """An episode of that family is in the pool."""
        if name in self.waits and self.waits[name].resting:
            del self.waits[name]

    def ready(self, name: str) -> None:
        """That family has finished a group."""
        self.waits.pop(name, None)

    def clear(self) -> None:
        """Nobody is waited for."""
        self.waits.clear()


# -- batches ----------------------------------------------------------------------------------------------------------


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
    pool = sum(held) + groups.ungrouped
    if pool >= batch.max_pool_episodes and sum(_worth(batch, each) for each in held) >= one_batch(batch):
        return frozenset()
    counted = [group for group in groups if group.counts]
    if not batch.mix:  # one family has all the turns
        ungrouped = groups.ungrouped if batch.rule == "episodes" else groups.ungrouped / batch.group_size
        taken = sum(_worth(batch, group.expected) for group in counted) + ungrouped
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
    """The server's metrics of a batch (docs/reference/metrics.md). weights_step: of the weights that the batch is trained from."""
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
