"""The words of a topic after its bounds are removed, and the factor levels that they name.

Uses the instruments' declarations and the tables of `matcher.toml`; `matcher.py` decides what to compare.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from foundation.durations import duration_s
from researcher.instruments.catalogue import InstrumentFolder
from researcher.instruments.instrument import STUDY_MODEL, Factor, Instrument, Scalar
from researcher.instruments.levels import as_level, level_problem, off_level, on_level
from researcher.study.draft import Source
from researcher.study.spec import duration_text
from swarm.models.catalogue import CATALOGUE

_NUMERALS = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_DIGITS = {word: str(n) for n, word in enumerate(_NUMERALS.split(), 2)} | {"twenty": "20", "thirty": "30"}
_PLAIN = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹−–‐‑’", "0123456789----'")
_SPELT = str.maketrans({"⁻": "^-", "→": " to ", "β": " beta ", "η": " learning rate ", "—": " - "})
_NUMBER = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?|\.\d+"
_LENGTH = r"\d+(?:\.\d+)? ?(?:h(?:ours?|rs?)?|m(?:in(?:ute)?s?)?|s(?:ec(?:ond)?s?)|d(?:ays?)?)(?: ?\d+ ?m(?:in(?:ute)?s?)?)?\b"
_TOKEN = re.compile(rf"(?:{_NUMBER})(?![\w%]|[.:]\d)|[a-z][a-z0-9+]*(?:'[a-z]+)?|[\w.:]*\w%?|[^\s\w]")
_HUB = r"[a-z][\w.-]*/[a-z][\w.-]*\d[bm]\b[\w.-]*"
_COUNTED = ("numbers", "problems", "questions", "models", "tasks", "agents", "sizes", "values", "runs")
_MARKS = frozenset(",.?!:;()[]{}/-|&'\"`*~=")
SIDES = ("vs", "than", "beat", "lose", "equal")
"""Kinds of words that stand between compared things."""
CLAIMS = {"best": 1, "better": 1, "faster": 1, "beat": 1, "worse": -1, "slower": -1, "lose": -1}
"""Kinds of words that claim a direction: 1 for better, -1 for worse."""
_PASSED = (*SIDES, *CLAIMS, "list", "to", "more", "less", "which", "metric", "instrument", "level")
_APART = ("on", "for", "in", "with", "when", "using", "under", "by")


@dataclass(frozen=True, slots=True)
class Item:
    """A recognised phrase, or one unknown word.

    `kind` says what it is: a factor, level, metric, number and so on, or a word class of the table. `what` is its declared name.
    `value` is a level or a number; for a metric, the claimed direction. `led` is the preposition before the phrase.
    """

    kind: str
    text: str
    what: str = ""
    value: Scalar = 0
    led: str = ""

    def isa(self, *kinds: str) -> bool:
        return self.kind in kinds


NOTHING = Item("", "")


class Items(list[Item]):
    """The phrases of a topic, in order."""

    def at(self, i: int) -> Item:
        return self[i] if 0 <= i < len(self) else NOTHING

    def places(self, *kinds: str) -> list[int]:
        return [i for i, item in enumerate(self) if item.kind in kinds]


@dataclass(slots=True)
class Said:
    """A topic with its bounds and models removed. `bounds` holds the bounds' values by dotted path of the spec."""

    text: str = ""
    bounds: dict[str, Any] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@cache
def table() -> dict[str, Any]:
    """Return the parsed `matcher.toml`."""
    return tomllib.loads(Path(__file__).with_name("matcher.toml").read_text(encoding="utf-8"))


def said(topic: str) -> Said:
    """Remove models and bounds from the topic, and rewrite the rest in the words of the tables."""
    found = Said()
    text = normal(_without_models(topic, found))
    for pattern, meant in table()["rewrites"]:
        text = re.sub(pattern, meant, text)
    for pattern, fields in table()["bounds"]:
        whole = pattern.replace("{n}", r"(?P<n>\d+)").replace("{d}", f"(?P<d>{_LENGTH})")
        behind = r"(?! (?:per|each|a|apart)\b)" if "{d}" in pattern else ""
        bounded = rf"(?<![\w.]){whole}(?![\w-]|\.\d){behind}"
        text = re.sub(bounded, partial(_bound, fields=fields, found=found), text)
    found.text = text
    return found


def normal(text: str) -> str:
    """Normalise text: lower case, plain dashes and quotes, powers of ten and numerals as digits."""
    text = re.sub(r"\bN(?= ?=)", "sample-size", text.translate(_PLAIN).translate(_SPELT)).lower()
    power = r"(?:(\d+(?:\.\d+)?)\s*[x×*·]\s*|\b)10\s*(?:\^|\*\*)\s*[({]?(-\d+)[)}]?"
    text = re.sub(power, lambda match: f"{match[1] or 1}e{match[2]}", text)
    return re.sub(r"\b[a-z]+\b", lambda match: _DIGITS.get(match[0], match[0]), text)


def _without_models(topic: str, found: Said) -> str:
    listed = {name.lower(): known.name for known in CATALOGUE for name in (known.name, *known.aliases)}
    listed |= {known.name.rpartition("-")[2]: known.name for known in CATALOGUE}
    names = "|".join(sorted(map(re.escape, listed), key=len, reverse=True))

    def named(match: re.Match[str]) -> str:
        name = listed.get(match["name"].lower(), match["name"])
        found.models += [name] * (name not in found.models)
        return " modelname "

    whole = rf"(?<![\w/.:-])(?P<name>{_HUB}|{names})(?: (?:parameter )?models?)?(?![\w-])"
    return re.sub(whole, named, topic, flags=re.IGNORECASE)


def _bound(match: re.Match[str], fields: dict[str, str], found: Said) -> str:
    """Store the bound's values in `found`. `fields` maps each regex group to the spec paths it sets, separated by spaces."""
    for path, written in [(path, match[group]) for group in fields for path in fields[group].split() if match[group]]:
        value: Any = written
        if path == "budget.wall":
            value = duration_text(duration_s(re.sub("([hmsd])[a-z]*| ", r"\1", written)) or 0)
        elif path != "budget.tokens":
            value = int(written)
        if path in found.bounds:
            found.problems.append(f"The topic gives {path} twice: {found.bounds[path]} and {value}.")
        found.bounds[path] = value
    return " | "


@cache
def keys(text: str) -> tuple[str, ...]:
    """Return the words of a phrase in the form used for comparison: singular, without hyphens."""
    return tuple(_key(token) for token in re.findall(r"[\w+']+|[/:]", re.sub(r"[_-]", " ", normal(text))))


def _key(word: str) -> str:
    word = word.removesuffix("'s")
    if len(word) > 4 and word.endswith(("ches", "shes", "sses", "xes")):
        return word[:-2]
    kept = word.endswith(("ss", "us", "is")) or word == "seconds"  # the unit of time, not the ordinal
    return word[:-1] if len(word) > 3 and word.endswith("s") and not kept else word


@cache
def _classes() -> dict[tuple[str, ...], Item]:
    listed = {keys(word): Item("stop", word) for word in table()["stop"].split()}
    for name, line in table()["classes"].items():
        listed |= {keys(word): Item(name, word) for word in line.split()}
    return listed


def _vocabulary(instrument: Instrument) -> dict[tuple[str, ...], Item]:
    """Return every phrase that the instrument and the tables define."""
    factors = [factor for factor in instrument.factors if factor.target != STUDY_MODEL]  # models are found by name
    classes, names = _classes(), {factor.name for factor in factors}
    listed = classes | {keys(instrument.model.partition("-")[0]): Item("stop", ""), ("modelname",): Item("model", "")}
    words = (instrument.name, *instrument.keywords)
    listed |= {keys(word): Item("instrument", "", instrument.name) for word in words if keys(word) not in classes}
    for metric in instrument.metrics:
        for name in (metric.name, *metric.aliases):
            if not any(classes.get((word,), NOTHING).isa("more", "less", *CLAIMS) for word in keys(name)):
                listed[keys(name)] = Item("metric", "", metric.name)
    listed |= {keys(word): Item("metric", "", name, way) for word, (name, way) in table()["shared"]["metrics"].items()}
    for factor in factors:
        listed |= {keys(name): Item("factor", "", factor.name) for name in (factor.name, *factor.aliases)}
        if factor.name in table()["shared"]["bare"] or factor.proper:
            alone = [each for each in factor.choices if each not in ("none", "full")]
            listed |= {keys(str(each)): Item("level", "", factor.name, each) for each in alone}
        listed |= {keys(f"{factor.name} {each}"): Item("level", "", factor.name, each) for each in factor.choices}
    levels = table()["shared"]["levels"].items()
    return listed | {keys(word): Item("level", "", name, value) for word, (name, value) in levels if name in names}


def choose_instrument(text: str, folders: Sequence[InstrumentFolder]) -> tuple[list[InstrumentFolder], bool]:
    """Return the instruments that the topic may be about, and whether it mentions them by name or keyword.

    If it mentions none, these are the general instruments, or all of them if none is general.
    """
    words, ordinary = keys(text), _classes().keys()
    phrases = {words[i : i + n] for i in range(len(words)) for n in range(1, 6)} - ordinary
    named = [folder for folder in folders if keys(folder.instrument.name) in phrases]
    chosen = named or [each for each in folders if phrases & set(map(keys, each.instrument.keywords))]
    general = [folder for folder in folders if folder.instrument.general] or list(folders)
    return chosen or general, bool(chosen)


def items(text: str, instrument: Instrument) -> Items:
    """Split the topic into phrases, preferring the longest, and drop words without content."""
    plain = re.sub(r"(?<=[a-z0-9])-(?=[a-z])|(?<=[a-z]{2})-(?=\d)|_", " ", text)
    if any(factor.share for factor in instrument.factors):
        plain = re.sub(r"\b(\d+) ?%", lambda match: f"{int(match[1]) / 100:g}", plain)
    return _led(_named(_TOKEN.findall(plain), _vocabulary(instrument)))


def _named(tokens: Sequence[str], listed: dict[tuple[str, ...], Item]) -> list[Item]:
    words, longest = [_key(token) for token in tokens], max(map(len, listed))
    result: list[Item] = []
    i = 0
    while i < len(tokens):
        phrases = [tuple(words[i : i + n]) for n in range(longest, 0, -1)]
        phrase = next((each for each in phrases if each in listed), (words[i],))
        if re.fullmatch(_NUMBER, tokens[i]):
            phrase = (words[i],)
            result.append(Item("number", tokens[i], value=float(tokens[i])))
        else:
            item = listed.get(phrase, Item("mark" if tokens[i] in _MARKS else "unknown", ""))
            result.append(replace(item, text=" ".join(tokens[i : i + len(phrase)])))
        i += len(phrase)
    return result


def _led(found: Sequence[Item]) -> Items:
    """Drop words without content, and attach each preposition to the item after it. Keeps `with` before a bare factor, where it may
    switch the factor on.
    """
    counted = {
        i for i in range(1, len(found)) if found[i - 1].isa("number") and found[i].text in _COUNTED
    }  # `3 numbers`
    kept, result, led = Items(each for i, each in enumerate(found) if i in counted or not each.isa("stop")), Items(), ""
    for i, item in enumerate(kept):
        behind = kept.at(i + 1)
        leads = item.isa("prep") or (item.isa("on") and item.text == "with" and not behind.isa("list"))
        if not leads or (item.isa("on") and behind.isa("factor")):
            result.append(replace(item, led="" if leads else led))
        led = item.text if leads else ""
    return result


@dataclass(frozen=True, slots=True)
class Level:
    """A level of a factor. `at` is its index among the items. `source` is `planner` if the topic does not state the level."""

    factor: Factor
    value: Scalar
    at: int = -1
    source: Source = "topic"


class TwoReadings(Exception):
    """The topic is ambiguous or makes no sense as it stands."""


@dataclass(slots=True)
class Levels:
    """The levels that a topic names, and how its words are used.

    `words` is the topic and `items` its phrases. `used` holds the indices of phrases that have a role. `moved` is the direction in
    which the topic moves each factor: 1 for up, -1 for down.
    """

    instrument: Instrument
    words: Said
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
        if self.instrument.roles:
            self.stop(
                f"{self.instrument.name} trains several models: say in a study file which model each setting applies to."
            )
        self._mark("instrument", "mark", "model", "list", "which", "factor", "level", "on")
        self._place()
        self._switches()
        self.levels.sort(key=lambda level: level.at)

    def _mark(self, *kinds: str) -> None:
        self.used |= set(self.items.places(*kinds))

    def _place(self) -> None:
        """Assign each number to an adjacent factor; failing that, to the factor of a neighbour in its list, or to the only factor
        left.
        """
        found, at, filled = self.items, dict[int, Factor](), set[int]()
        numbers = [i for i in found.places("number") if found[i].led != "by"]  # `raised by 4` names no level
        for i in numbers:
            for j in [j for j in self._near(i) if j not in filled][:1]:
                at[i] = self.factors[found[j].what]
                filled.add(j)
        bare = {item.what for j, item in enumerate(found) if self._is_numeric(j)} - {each.name for each in at.values()}
        for i in [*numbers, *numbers[::-1]]:
            near = [at[k] for k in self._neighbours(i, numbers, bool(bare)) if k in at]
            ways = [each for each in near if level_problem(each, as_level(each, found[i].value)) is None]
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
                raise TwoReadings(f"{found[i].text!r} may be a level of {factor.name}, or the number of its levels.")
            self.levels.append(Level(factor, as_level(factor, found[i].value), i))
        self.used |= at.keys()
        self.levels += [Level(self.factors[found[i].what], found[i].value, i) for i in found.places("level")]

    def _is_numeric(self, j: int) -> bool:
        return self.items.at(j).isa("factor") and self.factors[self.items[j].what].type in ("int", "float")

    def _skip(self, i: int, way: int, kinds: Sequence[str], marks: str = "") -> int:
        while self.items.at(i).isa(*kinds) or (self.items.at(i).isa("mark") and self.items[i].text in marks):
            i += way
        return i

    def _near(self, i: int) -> list[int]:
        """Return the indices of factors near a number: `lr of 1e-5`, `16 rollouts`, `which rate is best, 1e-5 or 4e-5`."""
        left = self._skip(i - 1, -1, ("to",), "=:(~")
        right = self._skip(i + 1, 1, ("better", "worse", "which"))
        far = self._skip(i - 1, -1, _PASSED, ",:()?-'\"")
        near = [left] * (self.items[i].led not in _APART) + [right] * (not self.items.at(right).led) + [far]
        return [j for j in near if self._is_numeric(j)]

    def _neighbours(self, i: int, numbers: Sequence[int], bare: bool) -> list[int]:
        """Return the numbers just before and after number `i` that belong to the same list.

        `bare` means that some factor has no number yet; a colon or comma may then begin a list.
        """
        n = numbers.index(i)
        before = [k for k in numbers[max(0, n - 1) : n] if self._listed(k, i, bare, "factor")]
        return before + [k for k in numbers[n + 1 : n + 2] if not self.items[k].led and self._listed(i, k, bare)]

    def _listed(self, one: int, other: int, bare: bool, *passed: str) -> bool:
        last = self.items[other - 1]
        apart = self.items[other].led in _APART and not last.isa("list", "to", *SIDES)
        if apart or (bare and last.isa("mark") and (other - one > 2 or last.text in ":(")):
            return False
        ends = [item for item in self.items[one + 1 : other] if not item.isa(*_PASSED, *passed)]
        return all(item.isa("mark") and item.text not in ".;!|?" for item in ends)

    def _switches(self) -> None:
        """Find factors that are switched off, and those switched on for contrast: `without KL`, `with LoRA turned off`, `KL against
        no KL`.
        """
        found, off = self.items, dict[str, int]()
        for i in found.places("off", "off_behind"):
            j = i - 1 if found[i].isa("off_behind") else self._skip(i + 1, 1, ("list", "off", "on"))
            factor = self.factors[found.at(j).what] if found.at(j).isa("factor", "level") else None
            value = None if factor is None else off_level(factor)
            if factor is None or value is None or found.at(j + 1).isa("number"):
                continue
            self.used.add(i)
            off[factor.name] = j
            self.levels = [level for level in self.levels if level.at != j] + [Level(factor, value, i)]
        for j in [j for j in found.places("factor") if off.get(found[j].what, j) != j]:
            if len(self._of(found[j].what)) < 2:  # a bare mention of a factor that is off elsewhere
                factor = self.factors[found[j].what]
                self.levels.append(Level(factor, on_level(factor), j, "planner"))
        adapters = [level for level in self.levels if level.factor.name.startswith("lora_")]
        if adapters and [level.value for level in self.levels if level.factor.name == "parameters"] == ["full"]:
            self.levels.append(Level(self.factors["parameters"], "lora", adapters[0].at))

    def _of(self, name: str) -> list[Level]:
        """Return the distinct levels of a factor."""
        levels = [level for level in self.levels if level.factor.name == name]
        return list({level.value: level for level in levels[::-1]}.values())[::-1]

    def _motions(self) -> None:
        """Find the direction in which the topic moves each factor: `a higher rate`, `raising the rate`, `the rate is raised`."""
        for i in [i for i in self.items.places("more", "less") if i not in self.used]:
            before, behind = self.items.at(i - 1), self.items.at(i + 1)
            listed = before.isa("list") and self.items.at(i - 2).isa("number")  # `16 or more`
            if before.isa("metric") and behind.isa("on") and not self.items.at(i + 3).isa("number"):
                self.moved |= {self.items.at(i + 2).what: 1}  # `accuracy rises with the group size`
            if listed or before.isa("metric") or behind.isa("than", "metric"):
                continue
            near = behind if behind.isa("factor") and not behind.led else before
            if near.isa("factor"):
                way = 1 if self.items[i].isa("more") else -1
                if self.moved.setdefault(near.what, way) != way:
                    raise TwoReadings(f"The topic asks for both more and less {near.what}.")
                self.used.add(i)

    def _is_scenery(self, level: Level) -> bool:
        """Return whether a level is only context: the usual choice, as in `does GRPO learn faster …`, or the kind of tasks."""
        usual = level.value == level.factor.default and level.factor.off is None
        return level.factor.type == "choice" and (usual or level.factor.proper)
