"""Whose turn it is: which family of tasks the next groups of the optimiser's steps belong to. Knows groups by number alone.

The next turn is the furthest behind family's. In whole numbers this is exact: from a balance of zero, every family has its
share again after as many groups as the ratios add up to in lowest terms. Without a mix all groups are of one family, "".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from swarm.protocol.runspec import MixSpec
from swarm.server.state.rows import MixRow

EVERYTHING = ""
"""The one family of a run without a mix."""
Mix = Mapping[str, MixSpec]


def family_of(label: str | None, mix: Mix) -> str:
    """The family that a group of this label belongs to; only for labels that the mix names, when there is one."""
    return label or EVERYTHING if mix else EVERYTHING


def in_force(row: MixRow, mix: Mix) -> MixRow:
    """The balance under the ratios of `mix`. When they changed, it begins anew with the whole groups that are owed."""
    ratios = {name: family.ratio for name, family in mix.items()} or {EVERYTHING: 1.0}
    if ratios == row.ratios:
        return row
    debts = Turns(row).debts()
    owed = {name: int(debts.get(name, 0.0)) for name in ratios}
    carried = {name: groups for name, groups in owed.items() if groups}
    return MixRow(ratios=ratios, carried=carried, trained=row.trained)


def after(row: MixRow, mix: Mix, labels: Iterable[str | None]) -> MixRow:
    """The balance after a step that groups of these labels entered."""
    now = in_force(row, mix)
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
    told_of: bool = False


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
        """Those whose patience ran out and who were not told of yet: each once, however often this is asked."""
        passed = self.passed(mix, now)
        late = sorted(name for name in passed if not self.waits[name].told_of)
        for name, wait in self.waits.items():
            wait.told_of = name in passed
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
