"""The levels of a topic: which factor each number, choice and switch belongs to, and which way factors are said to move.

Knows one instrument's factors; what is compared with what is for `matcher.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from researcher.instruments.catalogue import level_problem
from researcher.instruments.instrument import Factor, Instrument, Scalar
from researcher.instruments.levels import as_level, off_level
from researcher.planner.matcher_words import Item, Items, items, table
from researcher.study.draft import Source

SIDES = ("vs", "than", "beat", "lose", "equal")
"""Words between what is compared."""
_GOOD, _BAD = ("best", "better", "faster", "more_accurate", "beat"), ("worse", "slower", "less_accurate", "lose")
CLAIMS = dict.fromkeys(_GOOD, 1) | dict.fromkeys(_BAD, -1)
"""Words that say which way is better."""
_JOINS = (*SIDES, *CLAIMS, "list", "to", "from", "between", "more", "less", "default", "which", "balance", "learns")
_PASSED = (*_JOINS, "metric", "number", "instrument", "level")
_LEADS = ("list", "to", "from", "better", "worse", "faster", "slower", *SIDES)
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
        title = re.findall(r"\w+", self.instrument.title.lower())
        for i, item in enumerate(self.items):
            before, behind = self.items.at(i - 1), self.items.at(i + 1)
            if item.text in title and behind.isa("instrument"):
                self.used.add(i)  # `small sums` are no smaller ones
            beside = (behind.isa("factor") and not behind.led) or (before.isa("factor") and not item.led)
            if item.isa("instrument") and item.text != item.what and beside and self.instrument.roles:
                self.stop(f"{item.text!r} beside a setting: which of the models has it?")
        self._mark(
            "instrument", "mark", "model", "list", "which", "learns", "first", "factor", "level", "on", "on_behind"
        )
        self._place()
        self._switches()
        self.levels.sort(key=lambda level: level.at)
        for level in self.levels:
            if level.source == "topic" and (problem := level_problem(level.factor, level.value)):
                self.stop(f"{problem}.")

    def _mark(self, *kinds: str) -> None:
        self.used |= set(self.items.places(*kinds))

    def _place(self) -> None:
        """Each number goes to the factor beside it, else to the last without one, else along a list, else to the only one left."""
        found, at, filled = self.items, dict[int, Factor](), set[int]()
        numbers = [i for i in found.places("number") if found[i].led != "by"]  # `raised by 4` is no level
        for near in (self._beside, self._before):
            for i in numbers:
                free = [j for j in near(i) if i not in at and j not in filled]
                for j in sorted(free, key=lambda j: not self._takes(self.factors[found[j].what], i))[:1]:
                    at[i] = self.factors[found[j].what]
                    filled |= {
                        k
                        for k in (j, i - 1, i + 1)
                        if (found.at(k).kind, found.at(k).what) == ("factor", found[j].what)
                    }
        for listed in (True, False):
            for i in [*numbers, *numbers[::-1]]:
                anew = (
                    listed and self._bare(filled) and found.at(i - 1).isa("mark") and not found.at(i - 2).isa("number")
                )
                ways = [each for way in (-1, 1) if (each := self._along(i, way, at, filled)) and self._takes(each, i)]
                if i not in at and ways and not anew:
                    if ways[0] != ways[-1]:
                        raise TwoReadings(f"{found[i].text!r} may be a level of {ways[0].name} or of {ways[-1].name}.")
                    at[i] = ways[0]
            owners = {factor.name for factor in at.values()}
            lacking = self._bare(filled) or owners
            for i in [i for i in numbers if len(lacking) == 1 and i not in at]:
                factor = self.factors[next(iter(lacking))]
                at |= {i: factor} if not listed or self._takes(factor, i) else {}
        for i, factor in at.items():
            name, listed = found.at(i + 1), found.at(i + 2).text in (":", "(", ",") and at.get(i + 3) == factor
            if name.isa("factor") and name.text.endswith("s") and listed and not found.at(i + 4).isa("factor"):
                raise TwoReadings(f"{found[i].text!r} may be a level of {factor.name}, or how many there are.")
            self.levels.append(Level(factor, as_level(factor, found[i].value), i))
        self.used |= at.keys()
        self.levels += [Level(self.factors[found[i].what], found[i].value, i) for i in found.places("level")]

    def _takes(self, factor: Factor, i: int) -> bool:
        return level_problem(factor, as_level(factor, self.items[i].value)) is None

    def _is_numeric(self, j: int) -> bool:
        return self.items.at(j).isa("factor") and self.factors[self.items[j].what].type in ("int", "float")

    def _bare(self, filled: set[int]) -> set[str]:
        """Numeric factors that no number stands at."""
        names = {self.items[j].what for j in filled}
        return {item.what for j, item in enumerate(self.items) if self._is_numeric(j) and item.what not in names}

    def _skip(self, i: int, way: int, kinds: Sequence[str], marks: str = "") -> int:
        while self.items.at(i).isa(*kinds) or (self.items.at(i).isa("mark") and self.items[i].text in marks):
            i += way
        return i

    def _beside(self, i: int) -> list[int]:
        """`lr of 1e-5`, `16 rollouts`, `1e-5 a better learning rate`: the factors right at a number."""
        left = self._skip(i - 1, -1, ("to", "from", "between", "default"), "=:(~")
        right = self._skip(i + 1, 1, ("better", "worse", "which", "default", "too"))
        near = [left] if self._is_numeric(left) and self.items[i].led not in _APART else []
        return near + ([right] if self._is_numeric(right) and not self.items[right].led else [])

    def _before(self, i: int) -> list[int]:
        """`Which rate is best, 1e-5 or 4e-5?`: the last factor before a number, over connecting words."""
        j = self._skip(i - 1, -1, [kind for kind in _PASSED if kind != "number"], ",:()?-'\"")
        return [j] if self._is_numeric(j) else []

    def _along(self, i: int, way: int, at: dict[int, Factor], filled: set[int]) -> Factor | None:
        """The factor of the next level that way; a colon ends it where a factor still lacks its levels."""
        before = self.items.at(i - 1)
        if (
            way < 0
            and self.items[i].led not in ("", "of")
            and not before.isa(*_LEADS)
            and before.text not in (",", "(")
        ):
            return None
        j = i + way
        while True:
            item = self.items.at(j)
            if j in at and (way < 0 or not item.led):
                return at[j]
            if way < 0 and j in filled:
                return self.factors[item.what]
            ends = item.text in ".;!|?" or (item.text in ":(" and self._bare(filled))
            ends = ends if item.isa("mark") else way > 0 and item.led not in ("", "of")
            if ends or not item.isa(*_PASSED, "mark"):
                return None
            j += way

    def _switches(self) -> None:
        """`without KL`, `with LoRA turned off`, `than the default`, `better than none`, `KL against no KL`."""
        found, targets, off = self.items, set[int](), set[str]()
        for i in found.places("off", "off_behind", "default", "none"):
            j = i - 1 if found[i].isa("off_behind") else self._skip(i + 1, 1, ("list", "off", "on", "default"))
            target = found.at(j)
            near = target.isa("factor", "level") and (found[i].isa("off", "off_behind") or not target.led)
            factor = self.factors[target.what] if near and not found[i].isa("none") else self._last_factor(i)
            numbered = any(level.at == j + 1 and found[level.at].isa("number") for level in self.levels)
            usual = target.isa("number") or numbered or (factor is not None and target.value == factor.default)
            if found[i].isa("default") and usual:
                self.used.add(i)  # `the default of 8`, `vanilla GRPO`
                continue
            value = None if factor is None else factor.default if found[i].isa("default") else off_level(factor)
            vague = found[i].isa("off") and not near and found[i].text not in ("without", "no", "off")
            if factor is None or value is None or vague:
                continue
            if numbered and found[i].isa("off"):
                raise TwoReadings(f"{found[i].text!r} before a level of {factor.name} can be read in two ways.")
            self.used.add(i)
            targets.add(j)
            off |= set() if found[i].isa("default") else {factor.name}
            self.levels = [level for level in self.levels if level.at != j or not target.isa("level")]
            self.levels.append(Level(factor, value, i))
        for j in [j for j in found.places("factor") if found[j].what in off and j not in targets]:
            if len(self._of(found[j].what)) < 2:  # a bare mention of what is off elsewhere
                factor = self.factors[found[j].what]
                self.levels.append(Level(factor, on_level(factor), j, "planner"))
        adapters = [level for level in self.levels if level.factor.name.startswith("lora_")]
        if adapters and [level.value for level in self.levels if level.factor.name == "parameters"] == ["full"]:
            self.levels.append(Level(self.factors["parameters"], "lora", adapters[0].at))

    def _last_factor(self, i: int) -> Factor | None:
        """What `none`, `without` and `the default` mean: the last factor before that is no setting, else the only one."""
        named = [item for item in self.items if item.isa("factor", "level") and not self._is_usual(item)]
        before = [item for item in self.items[:i] if item in named and item.led not in (*_APART, "at")]
        names = {item.what for item in before[-1:] or named}
        return self.factors[names.pop()] if len(names) == 1 else None

    def _is_usual(self, item: Item) -> bool:
        return item.isa("level") and is_scenery(Level(self.factors[item.what], item.value))

    def _of(self, name: str) -> list[Level]:
        """The levels of a factor, each once."""
        levels = [level for level in self.levels if level.factor.name == name]
        return list({level.value: level for level in levels[::-1]}.values())[::-1]

    def _motions(self) -> None:
        """`a higher rate`, `raising the rate`, `rises with the group size`: which way each factor goes."""
        self.moved |= {item.what: 1 for item in self.items if item.isa("factor") and item.text == "clip higher"}
        for i in [i for i in self.items.places("more", "less") if i not in self.used]:
            name, way = self._moved_by(i), 1 if self.items[i].isa("more") else -1
            if name and self.moved.setdefault(name, way) != way:
                raise TwoReadings(f"The topic has {name} go up and down.")
            self.used |= {i} if name else set()

    def _moved_by(self, i: int) -> str | None:
        found, before, behind = self.items, self.items.at(i - 1), self.items.at(i + 1)
        if behind.isa("than", "metric") or (before.isa("list") and found.at(i - 2).isa("number")):
            return None  # `higher than 1e-4`, `higher accuracy`, `16 or more`
        k = i + 1 + behind.isa("on")
        if before.isa("metric"):
            if found.at(k).isa("factor") and found[k].led == "with" and not found.at(k + 1).isa("number"):
                self.moved[found[k].what] = 1  # accuracy rises with the group size
            if k > i + 1 or behind.led or not behind.isa("factor"):
                return None
        j = i + 1
        while found.at(j).isa("more", "less") or found.at(j).text == "or":
            j += 1
        ahead = found.at(j).isa("factor") and not found[j].led
        return found[j].what if ahead else before.what if before.isa("factor") else None


def is_scenery(level: Level) -> bool:
    """The usual choice, as in `does GRPO learn faster …`, or what the tasks are."""
    usual = level.value == level.factor.default and level.factor.off is None
    return level.factor.type == "data" or (level.factor.type == "choice" and (usual or level.factor.proper))


def on_level(factor: Factor) -> Scalar:
    """A level at which it does something: the default, another choice, or a usual one."""
    usual: Scalar | None = table()["shared"]["on"].get(factor.name)
    if factor.default != off_level(factor) and usual is None:
        return factor.default
    if factor.type in ("choice", "bool"):
        return next((each for each in factor.choices if each != factor.off), True)
    return as_level(factor, usual or (1 if factor.type == "int" else 0.1))


def moved_from_default(factor: Factor, way: int) -> Scalar | None:
    """A level clearly above or below the default: twice it for counts, four times on a log scale, else half as much again."""
    if factor.type not in ("int", "float") or isinstance(factor.default, str):
        return None
    if not factor.default:
        return on_level(factor) if way > 0 else None
    ratio = 2.0 if factor.type == "int" else 4.0 if factor.scale == "log" or factor.default < 0.01 else 1.5
    level = factor.default * ratio**way
    level = min(level, level if factor.high is None else factor.high)
    level = max(level, level if factor.low is None else factor.low)
    moved = as_level(factor, max(1, round(level)) if factor.type == "int" else float(f"{level:.2g}"))
    return None if moved == factor.default else moved


def spread(factor: Factor) -> list[Scalar]:
    """Levels on both sides of the default, or a few above none."""
    if factor.default:
        return [each for way in (-1, 1) if (each := moved_from_default(factor, way)) is not None]
    levels = [as_level(factor, float(on_level(factor)) * 4**n) for n in range(3)]
    return [level for level in levels if level_problem(factor, level) is None]
