"""The levels of a topic: which factor each number, choice and switch belongs to, and which way factors are said to move.

Knows one instrument's factors; what is compared with what is for `matcher.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from researcher.instruments.catalogue import level_problem
from researcher.instruments.instrument import Factor, Instrument, Scalar
from researcher.instruments.levels import as_level, off_level, on_level
from researcher.planner.matcher_words import Items, items
from researcher.study.draft import Source

SIDES = ("vs", "than", "beat", "lose", "equal")
"""Words between what is compared."""
CLAIMS = {"best": 1, "better": 1, "faster": 1, "beat": 1, "worse": -1, "slower": -1, "lose": -1}
"""Words that say which way is better."""
_PASSED = (*SIDES, *CLAIMS, "list", "to", "from", "more", "less", "which", "balance", "metric", "instrument", "level")
_APART = ("on", "for", "in", "with", "when", "using", "under", "by")


@dataclass(frozen=True, slots=True)
class Level:
    """A level of a factor at an index of the items. source planner: the topic gives none."""

    factor: Factor
    value: Scalar
    at: int = -1
    source: Source = "topic"


class TwoReadings(Exception):
    """There are two readings, or none."""


@dataclass(slots=True)
class Levels:
    """items: the phrases of the topic; used: those that play a part. moved: which way the topic says that a factor goes."""

    instrument: Instrument
    items: Items = field(default_factory=Items)
    levels: list[Level] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    factors: dict[str, Factor] = field(default_factory=dict)

    def stop(self, problem: str) -> None:
        self.problems += [problem] * (problem not in self.problems)

    def _load(self, text: str) -> None:
        self.factors = {factor.name: factor for factor in self.instrument.factors}
        self.items = items(text, self.instrument)
        self.levels, self.used, self.moved = [], set(), {}
        for one, other in pairwise(self.items):
            named = sorted(item.text != item.what for item in (one, other) if item.isa("instrument"))
            if self.instrument.roles and named == [True] and not other.led and "factor" in (one.kind, other.kind):
                self.stop(f"Which model of {self.instrument.name} is meant by {one.text} {other.text}?")
        self._mark("instrument", "mark", "model", "list", "which", "factor", "level", "on")
        self._place()
        self._switches()
        self.levels.sort(key=lambda level: level.at)
        for level in self.levels:
            if level.source == "topic" and (problem := level_problem(level.factor, level.value)):
                self.stop(f"{problem}.")

    def _mark(self, *kinds: str) -> None:
        self.used |= set(self.items.places(*kinds))

    def _place(self) -> None:
        """Each number goes to the factor beside it, else to that of a neighbour in its list, else to the only one left."""
        found, at, filled = self.items, dict[int, Factor](), set[int]()
        numbers = [i for i in found.places("number") if found[i].led != "by"]  # `raised by 4` is no level
        for i in numbers:
            near = [j for j in self._near(i) if j not in filled]
            for j in near[:1]:
                at[i] = self.factors[found[j].what]
                filled.add(j)
        bare = {item.what for j, item in enumerate(found) if self._is_numeric(j)} - {each.name for each in at.values()}
        for i in [*numbers, *numbers[::-1]]:
            ways = [at[k] for k in self._neighbours(i, numbers, bool(bare)) if k in at and self._takes(at[k], i)]
            if i not in at and ways:
                if ways[0] != ways[-1]:
                    raise TwoReadings(f"{found[i].text!r} may be a level of {ways[0].name} or of {ways[-1].name}.")
                at[i] = ways[0]
        lacking = bare or {factor.name for factor in at.values()}
        if len(lacking) == 1:
            at |= {i: self.factors[next(iter(lacking))] for i in numbers if i not in at}
        for i, factor in at.items():
            counted = found.at(i + 1).isa("factor") and found[i + 1].text.endswith("s") and at.get(i + 3) == factor
            if counted and found[i + 2].text in (":", "(", ","):
                raise TwoReadings(f"{found[i].text!r} may be a level of {factor.name}, or how many there are.")
            self.levels.append(Level(factor, as_level(factor, found[i].value), i))
        self.used |= at.keys()
        self.levels += [Level(self.factors[found[i].what], found[i].value, i) for i in found.places("level")]

    def _takes(self, factor: Factor, i: int) -> bool:
        return level_problem(factor, as_level(factor, self.items[i].value)) is None

    def _is_numeric(self, j: int) -> bool:
        return self.items.at(j).isa("factor") and self.factors[self.items[j].what].type in ("int", "float")

    def _skip(self, i: int, way: int, kinds: Sequence[str], marks: str = "") -> int:
        while self.items.at(i).isa(*kinds) or (self.items.at(i).isa("mark") and self.items[i].text in marks):
            i += way
        return i

    def _near(self, i: int) -> list[int]:
        """`lr of 1e-5`, `16 rollouts`, `which rate is best, 1e-5 or 4e-5`: the factors at a number."""
        left = self._skip(i - 1, -1, ("to", "from"), "=:(~")
        right = self._skip(i + 1, 1, ("better", "worse", "which"))
        far = self._skip(i - 1, -1, _PASSED, ",:()?-'\"")
        near = [left] * (self.items[i].led not in _APART) + [right] * (not self.items.at(right).led) + [far]
        return [j for j in near if self._is_numeric(j)]

    def _neighbours(self, i: int, numbers: Sequence[int], bare: bool) -> list[int]:
        """The numbers before and behind it in one list. bare: some factor has no number, so a colon or comma may begin a list."""
        n = numbers.index(i)
        before = [k for k in numbers[max(0, n - 1) : n] if self._listed(k, i, bare, "factor")]
        return before + [k for k in numbers[n + 1 : n + 2] if not self.items[k].led and self._listed(i, k, bare)]

    def _listed(self, one: int, other: int, bare: bool, *passed: str) -> bool:
        last = self.items[other - 1]
        if bare and last.isa("mark") and (other - one > 2 or last.text in ":("):
            return False
        ends = [item for item in self.items[one + 1 : other] if not item.isa(*_PASSED, *passed)]
        return all(item.isa("mark") and item.text not in ".;!|?" for item in ends)

    def _switches(self) -> None:
        """`without KL`, `with LoRA turned off`, `KL against no KL`: what is off, and elsewhere on."""
        found, targets, off = self.items, set[int](), set[str]()
        for i in found.places("off", "off_behind"):
            j = i - 1 if found[i].isa("off_behind") else self._skip(i + 1, 1, ("list", "off", "on"))
            factor = self.factors[found.at(j).what] if found.at(j).isa("factor", "level") else None
            value = None if factor is None else off_level(factor)
            if factor is None or value is None or found.at(j + 1).isa("number"):
                continue
            self.used.add(i)
            targets.add(j)
            off.add(factor.name)
            self.levels = [level for level in self.levels if level.at != j] + [Level(factor, value, i)]
        for j in [j for j in found.places("factor") if found[j].what in off and j not in targets]:
            if len(self._of(found[j].what)) < 2:  # a bare mention of what is off elsewhere
                factor = self.factors[found[j].what]
                self.levels.append(Level(factor, on_level(factor), j, "planner"))
        adapters = [level for level in self.levels if level.factor.name.startswith("lora_")]
        if adapters and [level.value for level in self.levels if level.factor.name == "parameters"] == ["full"]:
            self.levels.append(Level(self.factors["parameters"], "lora", adapters[0].at))

    def _of(self, name: str) -> list[Level]:
        """The levels of a factor, each once."""
        levels = [level for level in self.levels if level.factor.name == name]
        return list({level.value: level for level in levels[::-1]}.values())[::-1]

    def _motions(self) -> None:
        """`a higher rate`, `raising the rate`, `the rate is raised`: which way each factor goes."""
        for i in [i for i in self.items.places("more", "less") if i not in self.used]:
            before, behind = self.items.at(i - 1), self.items.at(i + 1)
            listed = before.isa("list") and self.items.at(i - 2).isa("number")  # `16 or more`
            if before.isa("metric") and behind.isa("on") and not self.items.at(i + 3).isa("number"):
                self.moved[self.items[i + 2].what] = 1  # `accuracy rises with the group size`
            if listed or before.isa("metric") or behind.isa("than", "metric"):
                continue
            near = behind if behind.isa("factor") and not behind.led else before
            if near.isa("factor"):
                way = 1 if self.items[i].isa("more") else -1
                if self.moved.setdefault(near.what, way) != way:
                    raise TwoReadings(f"The topic has {near.what} go up and down.")
                self.used.add(i)


def is_scenery(level: Level) -> bool:
    """The usual choice, as in `does GRPO learn faster …`, or what the tasks are."""
    usual = level.value == level.factor.default and level.factor.off is None
    return level.factor.type == "data" or (level.factor.type == "choice" and (usual or level.factor.proper))
