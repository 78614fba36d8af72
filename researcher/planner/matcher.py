"""Plans without an LLM: a topic in the field's words becomes a draft of a `StudySpec`.

Every word of the topic is used, or has no content, or stops the matcher: then a person gets the draft and the words that were not
understood. Two readings, a second metric or a number without a place stop it too. It declines what names nothing to vary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from foundation.strict import explain
from researcher.instruments.catalogue import InstrumentFolder, level_problem
from researcher.instruments.instrument import Factor, Scalar
from researcher.planner.matcher_words import (
    SCREENED,
    SWITCHED_ON,
    Item,
    Said,
    choose_instrument,
    factors_of,
    items,
    said,
)
from researcher.planner.outcome import Declined, NeedsEdit, Outcome, Proposed, TopicRequest
from researcher.study.draft import Draft, Source
from researcher.study.spec import StudySpec

FEWEST_RACED = 4
"""Treatments against one baseline from which a race is cheaper than all comparisons."""
LEARNING_RATE, STEPS, WALL = "learning_rate", "steps", "wall_s"
_JOINS = (
    "list",
    "vs",
    "than",
    "beat",
    "lose",
    "equal",
    "to",
    "from",
    "between",
    "better",
    "worse",
    "faster",
    "slower",
    "more",
    "less",
    "base",
    "default",
    "which",
    "balance",
    "learns",
)
_SIDES = ("vs", "than", "beat", "lose", "equal")


class Matcher:
    """The planner that needs no key."""

    name = "builtin"

    async def propose(self, request: TopicRequest) -> Outcome:
        return match(request.topic, request.instruments, request.given)


def match(topic: str, folders: Sequence[InstrumentFolder], given: dict[str, Any]) -> Outcome:
    """given: fields of the spec that hold whatever the topic says."""
    wanted = given.get("instrument")
    known = [each for each in folders if wanted in (None, each.instrument.name, str(each.path))]
    if not known or not topic.strip():
        return Declined(
            reason=f"There is no instrument {wanted!r}."
            if wanted
            else "There is no topic, or no instrument to ask it of."
        )
    read = said(topic)
    chosen, named = choose_instrument(read.text, known)
    study = _Study(topic, chosen[0], read)
    if len(chosen) > 1:
        study.stop(
            f"The topic fits {' and '.join(each.instrument.name for each in chosen)}; choose one with --instrument."
        )
    study.put("instrument", chosen[0].instrument.name, "topic" if named else "default")
    study.read()
    return study.outcome(given)


@dataclass(frozen=True, slots=True)
class Level:
    """A level of a factor at an index of the items. source planner: the topic gives none."""

    factor: Factor
    value: Scalar
    at: int
    source: Source = "topic"


class _Stop(Exception):
    """There are two readings, or none."""


@dataclass(slots=True)
class _Study:
    topic: str
    folder: InstrumentFolder
    words: Said
    fields: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)
    """Which way the topic says that a factor goes."""
    used: set[int] = field(default_factory=set)
    factors: dict[str, Factor] = field(default_factory=dict)
    sided: bool = False
    """Whether the topic says which levels are the treatments."""
    declined: str = ""

    def stop(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def put(self, path: str, value: Any, source: Source) -> None:
        *above, last = path.split(".")
        at = self.fields
        for name in above:
            at = at.setdefault(name, {})
        at[last] = value
        self.sources[path] = source

    # -- the whole -------------------------------------------------------------------------------------------------

    def read(self) -> None:
        self.factors = factors_of(self.folder.instrument)
        self.put("question", " ".join(self.topic.split()), "topic")
        for problem in self.words.problems:
            self.stop(problem)
        self._bounds()
        text = self.words.text
        try:
            for reading in (self._listed_arms, self._splits):
                if (arms := reading(text)) is not None:
                    self._put_arms(arms)
                    return
            self._load(text)
            self._design()
        except _Stop as stop:
            self.stop(str(stop))
            self._draft_levels()
        self._name_unused()

    def _draft_levels(self) -> None:
        """Something to edit, of a topic that stopped: what has several levels is compared."""
        self.used |= {i for i, item in enumerate(self.items) if item.kind != "unknown"}
        if "arms" in self.fields or "compare" in self.fields:
            return
        for name in dict.fromkeys(level.factor.name for level in self.levels):
            values = [level.value for level in self._distinct(name)]
            if len(values) > 1:
                self._put_compare(self.factors[name], values[0], values[1:], "topic")
            elif name != STEPS:
                self.put(f"set.{name}", values[0], "topic")

    def outcome(self, given: dict[str, Any]) -> Outcome:
        differs = any(key in given for key in ("compare", "arms"))
        if self.declined and not differs:
            return Declined(reason=self.declined, nearest=tuple(self._nearest()))
        self._give(given)
        try:
            StudySpec.model_validate(self.fields)
        except ValidationError as error:
            for each in explain(error, StudySpec):
                self.stop(f"{each}.")
        draft = Draft(fields=self.fields, sources=self.sources, author=Matcher.name, because="Matched word by word.")
        return NeedsEdit(draft=draft, problems=tuple(self.problems)) if self.problems else Proposed(draft=draft)

    def _give(self, given: dict[str, Any]) -> None:
        if "compare" in given or "arms" in given:
            for name in ("compare", "arms", "design"):
                self.fields.pop(name, None)
        for name, value in given.items():
            if isinstance(value, dict) and name not in ("compare", "arms"):
                for inner, each in value.items():
                    self.put(f"{name}.{inner}", each, "flag")
            else:
                self.put(name, value, "flag")

    def _nearest(self) -> list[str]:
        names = [item.what for item in self.items if item.kind in ("factor", "level", "metric")]
        return list(dict.fromkeys([*names, *(name for name in SCREENED if name in self.factors)]))[:5]

    def _bounds(self) -> None:
        fields = dict(self.words.fields)
        if "seeds.from" in fields:
            first, last = fields.pop("seeds.from"), fields.pop("seeds.to")
            fields |= {"seeds.first": first, "seeds.min": last - first + 1, "seeds.max": last - first + 1}
        if "seeds.all" in fields:
            count = fields.pop("seeds.all")
            if fields.keys() & {"seeds.min", "seeds.max"} and fields.get("seeds.min") != count:
                self.stop("The topic gives the seeds twice.")
            fields |= {"seeds.min": count, "seeds.max": count}
        if "schedule.windows" in fields:
            fields["schedule.windows"] = [fields["schedule.windows"]]
        for path, value in fields.items():
            self.put(path, value, "topic")

    def _load(self, text: str) -> None:
        self.items = items(text, self.folder.instrument, self.words.data)
        title = {word.lower() for word in re.findall(r"\w+", self.folder.instrument.title)}
        for i, item in enumerate(self.items[:-1]):
            if item.kind in ("class", "unknown") and item.text in title and self.items[i + 1].kind == "instrument":
                self.used.add(i)  # `small sums` are no smaller ones
        self.used |= {
            i
            for i, item in enumerate(self.items)
            if item.kind in ("instrument", "mark", "model") or item.isa("list", "which", "learns", "first")
        }
        for item, behind in zip(self.items, self.items[1:], strict=False):
            if (
                item.kind == "instrument"
                and behind.kind == "factor"
                and not behind.led
                and self.folder.instrument.roles
            ):
                self.stop(f"{item.text} {behind.text}: {behind.what} is set for all models, or by a factor of its own.")
        self._place()
        self._switches()
        self._stand_ins()
        self._bare_switches()
        self.levels.sort(key=lambda level: level.at)
        for level in self.levels:
            if level.source == "topic" and (problem := level_problem(level.factor, level.value)):
                self.stop(f"{problem}.")

    def _name_unused(self) -> None:
        left = [item.text for i, item in enumerate(self.items) if i not in self.used and item.kind != "mark"]
        for word in dict.fromkeys(left):
            self.stop(f"{word!r} is not understood here.")

    # -- levels ----------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Each number goes to the factor beside it, else to the last factor without one, else along a list, else to the only one left."""
        found, at = self.items, dict[int, Factor]()
        numbers = [i for i, item in enumerate(found) if item.kind == "number" and not self._counts(i)]
        filled: set[int] = set()
        for steps in (self._beside, self._before):
            for i in numbers:
                near = next(
                    (j for j in steps(i) if i not in at and j not in filled and self._takes(found[j].what, i)), None
                )
                near = next((j for j in steps(i) if i not in at and j not in filled), None) if near is None else near
                if near is not None:
                    at[i] = self.factors[found[near].what]
                    filled |= {
                        near,
                        *(j for j in self._beside(i) if found[j].what == found[near].what and abs(i - j) == 1),
                    }
        for restricted in (True, False):
            for way, order in ((-1, numbers), (1, numbers[::-1])):
                for i in order:
                    self._continue(i, way, at, filled, restricted=restricted)
            owners = {factor.name for factor in at.values()}
            lacking = {found[j].what for j in self._bare(filled)} or (owners if len(owners) == 1 else set())
            if len(lacking) == 1:
                last = self.factors[lacking.pop()]
                at |= {
                    i: last
                    for i in numbers
                    if i not in at and (not restricted or self._takes(last.name, i)) and not self._of_a_thing(i)
                }
        for i, factor in at.items():
            self.levels.append(Level(factor, _typed(factor, found[i].value), i))
        self.used |= at.keys()
        self.levels += [
            Level(self.factors[item.what], item.text if item.value is None else item.value, i)
            for i, item in enumerate(found)
            if item.kind == "level"
        ]
        self.used |= {i for i, item in enumerate(found) if item.kind in ("level", "factor")}

    def _continue(self, i: int, way: int, at: dict[int, Factor], filled: set[int], *, restricted: bool) -> None:
        """Along a list. restricted: not over a comma or colon, where a factor still lacks its levels."""
        near = self.items[i + way] if 0 <= i + way < len(self.items) else None
        if (
            i in at
            or near is None
            or self._of_a_thing(i)
            or (restricted and near.kind == "mark" and self._bare(filled))
        ):
            return
        other = self._along(i, way, at, filled)
        if other is None or not self._takes(other.name, i):
            return
        opposite = self._along(i, -way, at, filled)
        if opposite is not None and opposite != other and self._takes(opposite.name, i):
            raise _Stop(f"{self.items[i].text!r} may be a level of {other.name} or of {opposite.name}.")
        at[i] = other

    def _counts(self, i: int) -> bool:
        """`two group sizes, 4 and 8`: how many levels there are."""
        if [item.kind for item in self.items[i + 1 : i + 2]] != ["factor"] or not self.items[i + 1].text.endswith("s"):
            return False
        behind = [
            j
            for j in range(i + 2, len(self.items))
            if all(self._joins(k) and not self.items[k].isa(*_SIDES) for k in range(i + 2, j + 1))
        ]
        listed = sum(self.items[j].kind in ("number", "level") for j in behind)
        if listed >= 2 and not (behind and self.items[i + 2].isa("list")):
            if listed != self.items[i].value:
                raise _Stop(f"{self.items[i].text!r} may be a level, or how many there are.")
            self.used.add(i)
            return True
        return False

    def _of_a_thing(self, i: int) -> bool:
        """`3 numbers`, `32 heads`."""
        behind = self.items[i + 1] if i + 1 < len(self.items) else None
        return (
            behind is not None
            and not behind.led
            and (behind.kind == "unknown" or behind.text in ("number", "numbers", "digits"))
        )

    def _takes(self, name: str, i: int) -> bool:
        factor = self.factors[name]
        return level_problem(factor, _typed(factor, self.items[i].value)) is None

    def _bare(self, filled: set[int]) -> list[int]:
        """Numeric factors that no number stands at."""
        names = {self.items[j].what for j in filled}
        return [
            j
            for j, item in enumerate(self.items)
            if item.kind == "factor" and item.what not in names and self.factors[item.what].type in ("int", "float")
        ]

    def _beside(self, i: int) -> list[int]:
        """`lr of 1e-5`, `16 rollouts`, `1e-5 a better learning rate`: the factors right at a number."""
        near = []
        for way, passed in (
            (-1, ("to", "from", "base", "between", "default")),
            (1, ("better", "worse", "which", "default", "base", "too")),
        ):
            j = i + way
            while 0 <= j < len(self.items) and (
                self.items[j].isa(*passed)
                or (way < 0 and self.items[j].kind == "mark" and self.items[j].what in "=:(~")
            ):
                j += way
            ok = (
                0 <= j < len(self.items)
                and self.items[j].kind == "factor"
                and self.factors[self.items[j].what].type in ("int", "float")
            )
            if ok and (
                self.items[i].led not in ("on", "for", "in", "with", "when", "under", "by")
                if way < 0
                else not self.items[j].led
            ):
                near.append(j)
        return near

    def _before(self, i: int) -> list[int]:
        """`Which rate is best, 1e-5 or 4e-5?`: the last factor before a number, over connecting words."""
        j = i - 1
        while j >= 0 and self.items[j].kind != "number" and self._joins(j, "?"):
            j -= 1
        return (
            [j]
            if j >= 0 and self.items[j].kind == "factor" and self.factors[self.items[j].what].type in ("int", "float")
            else []
        )

    def _joins(self, j: int, *marks: str) -> bool:
        item = self.items[j]
        return (
            item.isa(*_JOINS)
            or item.kind in ("metric", "number", "instrument", "level")
            or (item.kind == "mark" and (item.what not in ".;!|?" or item.what in marks))
        )

    def _along(self, i: int, way: int, at: dict[int, Factor], filled: set[int]) -> Factor | None:
        """The factor of the next level that way, over connecting words only; a colon ends it where a factor still lacks its levels."""
        j = i + way
        if (
            way < 0
            and self.items[i].led not in ("", "of")
            and j >= 0
            and not self.items[j].isa(*_SIDES, "list", "better", "worse", "faster", "slower", "from", "to")
            and self.items[j].what not in (",", "(")
        ):
            return None
        while 0 <= j < len(self.items):
            if j in at:
                return at[j]
            if j in filled and way < 0:
                return self.factors[self.items[j].what]
            if not self._joins(j) or (self.items[j].what in (":", "(") and self._bare(filled)):
                return None
            j += way
        return None

    def _switches(self) -> None:
        """`without KL`, `with LoRA turned off`, `with and without hints`."""
        found = self.items
        for i, item in enumerate(found):
            if not item.isa("off", "on", "off_behind", "on_behind"):
                continue
            behind = item.isa("off_behind", "on_behind")
            j = i - 1 if behind else i + 1
            while not behind and j < len(found) and (found[j].isa("list", "off", "on", "default")):
                j += 1
            target = found[j] if 0 <= j < len(found) else None
            factor = (
                self.factors.get(target.what) if target is not None and target.kind in ("factor", "level") else None
            )
            if factor is None and item.isa("off"):
                factor = self._only_factor()
            if factor is None:
                continue
            numbered = any(
                level.at == j + 1 and level.factor == factor and found[j + 1].kind == "number" for level in self.levels
            )
            level = off_level(factor) if item.isa("off", "off_behind") else on_level(factor)
            if item.isa("on", "on_behind") and (numbered or (target is not None and target.kind == "level")):
                self.used.add(i)
                continue
            if item.isa("on") and not any(other.isa("off", "off_behind") for other in found):
                self.used.add(i)
                continue
            if level is None:
                raise _Stop(f"{factor.name} cannot be switched off.")
            if (
                item.isa("off", "off_behind")
                and target is not None
                and target.kind == "level"
                and target.value != level
            ):
                self.levels = [each for each in self.levels if each.at != j]
            elif item.isa("off") and numbered:
                raise _Stop(f"{item.text!r} before a level of {factor.name} can be read in two ways.")
            source: Source = "topic" if item.isa("off", "off_behind") else "planner"
            stated = [each for each in self.levels if each.factor == factor and each.value != off_level(factor)]
            if source == "topic" or not stated:
                self.levels.append(Level(factor, level, i, source))
            self.used.add(i)

    def _bare_switches(self) -> None:
        """`KL penalty beats no KL penalty`: a bare mention of what is switched off elsewhere is the level at which it is on."""
        off = {level.factor.name for level in self.levels if level.value == off_level(level.factor)}
        taken = {
            i + d for i, item in enumerate(self.items) if item.isa("off", "on", "default", "none") for d in (1, 2)
        } | {i - 1 for i, item in enumerate(self.items) if item.isa("off_behind", "on_behind")}
        for i, item in enumerate(self.items):
            if (
                item.kind == "factor"
                and item.what in off
                and i not in taken
                and len(self._distinct(item.what)) < 2
                and not any(
                    abs(level.at - i) <= 2 and self.items[level.at].kind == "number"
                    for level in self.levels
                    if level.factor.name == item.what
                )
            ):
                self.levels.append(Level(self.factors[item.what], on_level(self.factors[item.what]), i, "planner"))

    def _only_factor(self) -> Factor | None:
        names = {item.what for item in self.items if item.kind == "factor"} | {
            level.factor.name for level in self.levels if not _scenery(level)
        }
        return self.factors[next(iter(names))] if len(names) == 1 else None

    def _stand_ins(self) -> None:
        """`than the default`, `better than none`; `LoRA rank 8 against full fine-tuning`."""
        for i, item in enumerate(self.items):
            if not item.isa("default", "none"):
                continue
            near = self.items[i + 1] if i + 1 < len(self.items) else None
            factor = self.factors[near.what] if near is not None and near.kind == "factor" else self._only_factor()
            value = None if factor is None else factor.default if item.isa("default") else off_level(factor)
            if near is not None and (
                near.kind == "number" or (near.kind == "level" and near.value == self.factors[near.what].default)
            ):
                self.used.add(i)
            elif factor is not None and value is not None:
                numbered = (
                    near is not None and near.kind == "factor" and any(level.at == i + 2 for level in self.levels)
                )
                if not numbered:
                    self.levels.append(Level(factor, value, i))
                self.used.add(i)
        whole = self.factors.get("parameters")
        adapters = [level for level in self.levels if level.factor.name.startswith("lora_")]
        if (
            whole is not None
            and adapters
            and {level.value for level in self.levels if level.factor == whole} == {"full"}
        ):
            self.levels.append(Level(whole, "lora", adapters[0].at))

    def _distinct(self, name: str) -> list[Level]:
        return list({level.value: level for level in reversed(self.levels) if level.factor.name == name}.values())[::-1]

    # -- which design ----------------------------------------------------------------------------------------------

    def _design(self) -> None:
        self._motions()
        by_factor = {level.factor.name: self._distinct(level.factor.name) for level in self.levels}
        varied = [name for name, levels in by_factor.items() if len(levels) > 1]
        bare = [
            name
            for name in dict.fromkeys(item.what for item in self.items if item.kind == "factor")
            if name not in by_factor
        ]
        asks = {item.what for item in self.items if item.kind == "class"}
        self._mark("then", "balance", "interact", "weigh", "open", "far", "too")
        models = self.words.models
        if len(models) > 1:
            if varied or set(bare) - {"model_size"}:
                raise _Stop(f"The topic compares models, and {(varied + bare)[0]} too.")
            self.sided = any(item.isa(*_SIDES) for item in self.items)
            self.put("model", models[::-1] if self.sided else models, "topic")
            self._mark("vs", "than", "from", "to")
            bare = [name for name in bare if name != "model_size"]
            self._settle(by_factor, [])
            self._claim([], asks)
            return
        if models:
            self.put("model", models[0], "topic")
            if "model_size" in bare:
                raise _Stop("The topic compares model sizes, and names one model.")
        if self.words.text.strip().startswith("why") and not varied:
            self.declined = "A study tests what a setting does; it finds no cause of what was seen. Ask about one of the factors named."
        elif "then" in asks:
            self._sequence(varied, by_factor)
        elif "untrained" in asks or (
            not varied
            and not bare
            and all(_scenery(level) or level.at < 0 or self.items[level.at].led for level in self.levels)
            and "open" not in asks
            and not self._asked(by_factor, strict=True)
        ):
            self._control(by_factor, asks)
        elif len(varied) > 1:
            self._several(varied, by_factor, bare, asks)
        elif len(varied) == 1 and not bare:
            self._compare(varied[0], by_factor, asks)
        elif len(varied) == 1 and "interact" in asks:
            self._explore([*varied, *bare], by_factor, asks)
        elif len(varied) == 1:
            raise _Stop(f"{bare[0]} is named without a level beside {varied[0]}.")
        else:
            self._unlevelled(bare, by_factor, asks)

    def _mark(self, *classes: str) -> None:
        self.used |= {i for i, item in enumerate(self.items) if item.isa(*classes)}

    def _motions(self) -> None:
        """`a higher rate`, `raising the rate`, `rises with the group size`: which way each factor goes."""
        for i, item in enumerate(self.items):
            if item.kind == "factor" and item.text == "clip higher":
                self.moved[item.what] = 1
            if item.kind == "times" and self._moved_by(i) is not None:
                self.used.add(i)
            if not item.isa("more", "less", "double", "halve") or i in self.used:
                continue
            factor = self._moved_by(i)
            if factor is not None:
                way = 1 if item.isa("more", "double") else -1
                if self.moved.get(factor, way) != way:
                    raise _Stop(f"The topic has {factor} go up and down.")
                self.moved[factor] = way
                self.used.add(i)

    def _moved_by(self, i: int) -> str | None:
        found = self.items
        j = i + 1
        if (j < len(found) and found[j].isa("than")) or (
            i > 1 and found[i - 1].isa("list") and found[i - 2].kind == "number"
        ):
            return None  # `higher than 1e-4`, `16 or more`
        if j < len(found) and found[j].kind == "metric":
            return None
        k = j + (j < len(found) and found[j].isa("on"))
        if (
            i
            and found[i - 1].kind == "metric"
            and k < len(found)
            and found[k].kind == "factor"
            and found[k].led == "with"
            and [item.kind for item in found[k + 1 : k + 2]] != ["number"]
        ):
            self.moved[found[k].what] = 1  # accuracy rises with the group size
            self.used |= {k - 1} - {i}
            return None
        if i and found[i - 1].kind == "metric" and (j >= len(found) or found[j].led or found[j].kind != "factor"):
            return None
        while j < len(found) and (
            found[j].isa("more", "less") or found[j].kind == "times" or (found[j].isa("list") and found[j].text == "or")
        ):
            j += 1
        if j < len(found) and found[j].kind == "factor" and not found[j].led:
            return found[j].what
        before = i - 1
        while before > 0 and found[before].kind == "times":
            before -= 1
        return found[before].what if before >= 0 and found[before].kind == "factor" else None

    def _asked(self, by_factor: dict[str, list[Level]], *, strict: bool = False) -> list[str]:
        """Factors with one level that is no setting: not behind a preposition, and no usual choice."""
        single = [levels[0] for levels in by_factor.values() if len(levels) == 1]
        asked = [level.factor.name for level in single if not self._is_setting(level)]
        if not asked and not strict:
            asked = [level.factor.name for level in single if not _scenery(level) and level.factor.name not in (STEPS,)]
        return asked

    def _is_setting(self, level: Level) -> bool:
        item = self.items[level.at]
        around = [
            item,
            *(
                self.items[j]
                for j in (level.at - 1, level.at + 1)
                if 0 <= j < len(self.items)
                and self.items[j].kind == "factor"
                and self.items[j].what == level.factor.name
            ),
        ]
        return _scenery(level) or any(each.led and each.led not in ("under", "as") for each in around)

    def _unlevelled(self, bare: list[str], by_factor: dict[str, list[Level]], asks: set[str]) -> None:
        asked = self._asked(by_factor, strict=bool(bare) or len(by_factor) > 1)
        if bare and asked:
            raise _Stop(f"The topic names a level of {asked[0]}, and {bare[0]} without one: say which is compared.")
        if len(bare) > 1 or (len(bare) == 0 and not asked and "open" in asks):
            self._explore(bare, by_factor, asks)
        elif bare:
            self._moved(bare[0], by_factor, asks)
        elif len(asked) == 1:
            self._against_default(asked[0], by_factor, asks)
        elif asked:
            raise _Stop(f"The topic names one level of {' and of '.join(asked)}: say which is compared, and with what.")
        else:
            self._control(by_factor, asks)

    def _several(self, varied: list[str], by_factor: dict[str, list[Level]], bare: list[str], asks: set[str]) -> None:
        if bare:
            raise _Stop(f"{bare[0]} is named without a level.")
        if "interact" in asks:
            self._explore(varied, by_factor, asks)
            return
        places = [
            i
            for i, item in enumerate(self.items)
            if item.isa(*_SIDES) and i > min(level.at for level in self.levels if level.factor.name in varied)
        ]
        if len(places) != 1:
            raise _Stop(
                f"The topic varies {' and '.join(varied)}: ask about one, or whether they interact, or name the arms."
            )
        sides = [[level for level in self.levels if (level.at < places[0]) == first] for first in (True, False)]
        arms = [{level.factor.name: level.value for level in side} for side in sides]
        whole = all(len(arm) == len(side) for arm, side in zip(arms, sides, strict=True))
        if not whole or arms[0].keys() != arms[1].keys():
            raise _Stop(
                f"The two sides do not set the same factors ({', '.join(sorted(arms[0].keys() ^ arms[1].keys()) or varied)})."
            )
        self.used.add(places[0])
        self._put_arms({"baseline": arms[1], "treatment": arms[0]})
        self.sided = True
        self._claim([], asks)

    def _put_arms(self, arms: dict[str, dict[str, Scalar]]) -> None:
        same = {
            name: value
            for name, value in next(iter(arms.values())).items()
            if all(arm.get(name) == value for arm in arms.values())
        }
        for name, value in same.items():
            self.put(f"set.{name}", value, "topic")
        self.fields["arms"] = {
            arm: {name: value for name, value in each.items() if name not in same} for arm, each in arms.items()
        }
        self.sources |= dict.fromkeys([f"arms.{arm}" for arm in arms], "topic")

    # -- one factor ------------------------------------------------------------------------------------------------

    def _compare(self, name: str, by_factor: dict[str, list[Level]], asks: set[str]) -> None:
        levels = by_factor[name]
        self._refuse_twice(name)
        if "balance" in asks:
            ordered = sorted((level.value for level in levels), key=lambda value: (isinstance(value, str), value))
            self._put_compare(levels[0].factor, ordered[0], ordered[1:], "topic")
            self._mark("between")
            self.put("design", "balance", "topic")
        else:
            treatments, baselines = self._sides(levels)
            if len(baselines) > 1:
                raise _Stop(
                    f"The topic sets {name} against several baselines: {', '.join(str(each.value) for each in baselines)}."
                )
            source: Source = "topic" if all(level.source == "topic" for level in levels) else "planner"
            self._put_compare(levels[0].factor, baselines[0].value, [level.value for level in treatments], source)
            if len(treatments) >= FEWEST_RACED:
                self.put("design", "race", "planner")
        self._settle(by_factor, [name])
        self._claim(levels, asks)

    def _refuse_twice(self, name: str) -> None:
        values = [level.value for level in self.levels if level.factor.name == name and level.source == "topic"]
        if len(values) > len(set(values)):
            raise _Stop(f"The topic names a level of {name} twice.")

    def _put_compare(self, factor: Factor, baseline: Scalar, levels: Sequence[Scalar], source: Source) -> None:
        self.put(f"compare.{factor.name}", {"baseline": baseline, "levels": list(levels)}, source)

    def _between(self, one: Level, other: Level) -> list[Item]:
        return [self.items[i] for i in range(one.at + 1, other.at)]

    def _sides(self, levels: list[Level]) -> tuple[list[Level], list[Level]]:
        """The treatments and the baselines."""
        name = levels[0].factor.name
        cuts: list[tuple[int, str]] = []
        for i, (one, other) in enumerate(zip(levels, levels[1:], strict=False), 1):
            kinds = [item.what for item in self._between(one, other) if item.kind == "class" or item.what == "->"]
            leads = [self.items[j].what for j in range(max(0, one.at - 2), one.at)]
            if any(kind in _SIDES for kind in kinds):
                cuts.append((i, next(kind for kind in kinds if kind in _SIDES)))
            elif "from" in kinds:
                cuts.append((i, "than"))
            elif "->" in kinds or ("to" in kinds and ("from" in leads or name in self.moved)):
                cuts.append((i, "to"))
        self._mark(*_SIDES, "from", "to", "between", "base")
        based = [level for level in levels if self._is_based(level.at)]
        based = based or [
            level for level in levels if [item.what for item in self.items[level.at + 1 : level.at + 2]] == ["base"]
        ]
        if based and any(cut and levels.index(based[0]) < cut for cut, kind in cuts if kind != "vs"):
            raise _Stop("The topic claims something of its baseline: say it of the other level.")
        ahead = [i for i, item in enumerate(self.items) if item.isa("than", "vs") and i < levels[0].at]
        way = self.moved.get(name)
        numeric = not isinstance(levels[0].value, str | bool)
        marked = bool(cuts) and any(kind != "vs" for _, kind in cuts)
        again = any(
            item.kind == "factor" and item.what == name and i > levels[-1].at + 1 for i, item in enumerate(self.items)
        )
        self.sided = bool(based or ahead or (cuts and (marked or not again)) or (way is not None and numeric))
        if len(based) == 1:
            return [level for level in levels if level is not based[0]], based
        if ahead and not cuts:
            return self._agreeing(levels[1:], levels[:1])
        if len(cuts) == 1 and cuts[0][1] == "to":
            return self._agreeing(levels[cuts[0][0] :], levels[: cuts[0][0]])
        if way is not None and numeric and not marked:
            lowest = (min if way > 0 else max)(levels, key=lambda level: float(level.value))
            return [level for level in levels if level is not lowest], [lowest]
        if len(cuts) == 1 and (cuts[0][0] == len(levels) - 1 or marked):
            return self._agreeing(levels[: cuts[0][0]], levels[cuts[0][0] :])
        if len(cuts) > 1 and marked:
            raise _Stop(f"The topic sets levels of {name} against each other in more than one way.")
        self.sided = False
        usual = next((level for level in levels if level.value == level.factor.default), levels[0])
        return [level for level in levels if level is not usual], [usual]

    def _is_based(self, at: int) -> bool:
        """`a baseline of 8`, `baseline group size 8`."""
        near = self.items[max(0, at - 2) : at]
        return bool(near) and (
            near[-1].isa("base")
            or (
                near[0].isa("base")
                and near[-1].kind in ("factor", "mark")
                and near[-1].text != ";"
                and near[-1].text != "."
            )
        )

    def _agreeing(self, treatments: list[Level], baselines: list[Level]) -> tuple[list[Level], list[Level]]:
        way = self.moved.get(treatments[0].factor.name)
        if (
            way is not None
            and not isinstance(treatments[0].value, str | bool)
            and not isinstance(baselines[0].value, str | bool)
        ):
            if any((float(one.value) - float(other.value)) * way < 0 for one in treatments for other in baselines):
                raise _Stop(f"The topic has {treatments[0].factor.name} go one way, and its levels the other.")
        return treatments, baselines

    def _against_default(self, name: str, by_factor: dict[str, list[Level]], asks: set[str]) -> None:
        level = by_factor[name][0]
        self._refuse_twice(name)
        self._mark(*_SIDES, "from", "to", "base")
        off, default = off_level(level.factor), level.factor.default
        baseline: Scalar | None = default
        if level.value == default:
            baseline = on_level(level.factor) if level.value == off else off
        if baseline is None or baseline == level.value:
            raise _Stop(f"{name}={level.value} is the default: name the level to compare it with.")
        if any(item.isa("than", "vs", "beat", "lose", "equal") for item in self.items) and not any(
            item.isa("default", "none", "off", "off_behind") for item in self.items
        ):
            raise _Stop(f"The topic sets {name}={level.value} against something that is no level of it.")
        pair = self._agreeing([level], [Level(level.factor, baseline, -1)])
        self._put_compare(
            level.factor,
            pair[1][0].value,
            [level.value],
            "topic" if level.value != default and level.source == "topic" else "planner",
        )
        self._settle(by_factor, [name])
        self._claim([level], asks)

    def _moved(self, name: str, by_factor: dict[str, list[Level]], asks: set[str]) -> None:
        """A factor without levels: the default against levels on the side that the topic says, or on both."""
        factor = self.factors[name]
        if any(item.isa(*_SIDES) for item in self.items):
            raise _Stop(f"The topic compares {name} with something, and names no level of it.")
        scales = [2.0 if item.what == "double" else 0.5 for item in self.items if item.isa("double", "halve")]
        scales += [float(item.value or 1) ** self.moved.get(name, 1) for item in self.items if item.kind == "times"]
        if len(scales) > 1:
            raise _Stop("The topic names several multiples of the default: name the levels themselves.")
        default, off = factor.default, off_level(factor)
        one_sided = True
        if scales and not isinstance(default, str):
            levels: list[Scalar] = [_typed(factor, _rounded(default * scales[0]))]
        elif factor.type in ("choice", "bool"):
            levels = (
                [not default] if factor.type == "bool" else [choice for choice in factor.choices if choice != default]
            )
        elif (
            "far" in asks
            or asks & {"open", "which"}
            or (
                "better" in asks and any(item.isa("better") and item.text in ("best", "optimal") for item in self.items)
            )
        ):
            levels, one_sided = _spread(factor), False
        elif name in self.moved:
            usual = SWITCHED_ON.get(name) if self.moved[name] > 0 else None
            levels = [level for level in [usual or moved_from_default(factor, self.moved[name])] if level is not None]
        elif default == off:
            levels = [on_level(factor)]
        elif factor.off is not None:
            self._put_compare(factor, factor.off, [default], "planner")
            self._settle(by_factor, [name])
            self._claim([Level(factor, default, 0)], asks)
            return
        else:
            levels, one_sided = (
                [each for way in (-1, 1) if (each := moved_from_default(factor, way)) is not None],
                False,
            )
        if not levels:
            raise _Stop(f"{name} cannot go further: its default is at the end of its range.")
        self._put_compare(factor, default, levels, "planner")
        if len(levels) >= FEWEST_RACED:
            self.put("design", "race", "planner")
        self._settle(by_factor, [name])
        self._claim([Level(factor, levels[0], 0)] if one_sided else [], asks)

    # -- several factors -------------------------------------------------------------------------------------------

    def _explore(self, names: list[str], by_factor: dict[str, list[Level]], asks: set[str]) -> None:
        """Two levels of each: whether they interact, or which of them matters."""
        if not names:
            names = [name for name in SCREENED if name in self.factors and name not in by_factor]
            source: Source = "planner"
        elif {"interact", "weigh", "open", "which"} & asks or any(
            item.text in ("best", "optimal") for item in self.items
        ):
            source = "topic"
        else:
            raise _Stop(f"The topic names {' and '.join(names)}, and not how they are compared.")
        if "interact" not in asks and not asks & {"open", "weigh"} and any(item.isa(*_SIDES) for item in self.items):
            raise _Stop(f"The topic compares {' and '.join(names)}, and names no levels.")
        for name in names:
            factor, levels = self.factors[name], by_factor.get(name, [])
            if len(levels) > 2:
                raise _Stop(
                    f"{name} has {len(levels)} levels; where several factors are varied together, each has two."
                )
            if len(levels) == 2:
                usual = next((level for level in levels if level.value == factor.default), levels[0])
                self._put_compare(factor, usual.value, [level.value for level in levels if level is not usual], "topic")
            else:
                other = moved_from_default(factor, self.moved.get(name, 1)) or on_level(factor)
                if levels and levels[0].value != factor.default:
                    other = levels[0].value
                self._put_compare(factor, factor.default, [other], source if levels else "planner")
        self._mark(*_SIDES)
        self.put(
            "design", "factorial" if "interact" in asks else "screen", "topic" if "interact" in asks else "planner"
        )
        self._settle(by_factor, names)
        self._claim([], asks | {"which"})

    def _sequence(self, varied: list[str], by_factor: dict[str, list[Level]]) -> None:
        cut = next(i for i, item in enumerate(self.items) if item.isa("then"))
        order = sorted(varied, key=lambda name: by_factor[name][0].at)
        parted = len(order) == 2 and by_factor[order[0]][-1].at < cut < by_factor[order[1]][0].at
        if not parted:
            raise _Stop("A sequence compares two factors one after the other, each with its own levels.")
        for name in order:
            treatments, baselines = self._sides(by_factor[name])
            if len(baselines) > 1:
                raise _Stop(f"The topic sets {name} against several baselines.")
            self._put_compare(self.factors[name], baselines[0].value, [level.value for level in treatments], "topic")
        self.put("design", "sequence", "topic")
        self._settle(by_factor, order)
        self._claim([], {"which"})

    def _control(self, by_factor: dict[str, list[Level]], asks: set[str]) -> None:
        """`Does GRPO improve accuracy?`: the model as it is trained against one that is not (learning rate 0)."""
        factor = self.factors.get(LEARNING_RATE)
        opposed = [i for i, item in enumerate(self.items) if item.isa(*_SIDES)]
        if any(item.isa("untrained") and opposed and i < opposed[0] for i, item in enumerate(self.items)):
            raise _Stop("The topic claims something of the untrained model: say it of the trained one.")
        settings = [
            level.factor.name
            for level in self.levels
            if not _scenery(level)
            and level.factor.name != LEARNING_RATE
            and not level.factor.target.startswith("task.")
        ]
        if settings and "untrained" not in asks:
            raise _Stop(f"The topic may ask about {settings[0]}, or about training at all.")
        claims = asks & {"better", "worse", "learns", "faster", "more_accurate", "more", "less"}
        trains = re.search(r"\b(train|rl|reinforcement|teach|learn|post-train|fine-?tun)", self.words.text) or any(
            level.factor.name == "algorithm" for level in self.levels
        )
        understood = not any(item.kind == "unknown" for item in self.items)
        others = (
            any(len(levels) > 1 for levels in by_factor.values())
            or any(item.isa(*_SIDES) for item in self.items)
            and "untrained" not in asks
        )
        if factor is None or not claims or not trains or not understood or others or "faster" in asks:
            self.declined = "The topic names nothing that can be varied and compared here."
            unknown = [item.text for item in self.items if item.kind == "unknown"]
            if unknown:
                self.declined += f" Not understood: {', '.join(dict.fromkeys(unknown))}."
            return
        self._mark("untrained", *_SIDES)
        rates = by_factor.pop(LEARNING_RATE, [])
        level = Level(factor, rates[0].value if rates else factor.default, 0)
        self._put_compare(factor, 0.0, [level.value], "planner")
        self._settle(by_factor, [])
        self._claim([level], asks)

    # -- settings and claim ----------------------------------------------------------------------------------------

    def _refuse_idle(self, asked: Sequence[str]) -> None:
        given = {level.factor.name for level in self.levels}
        for factor in self.factors.values():
            if factor.type == "data" and not factor.default and factor.name not in given:
                self.stop(f"{self.folder.instrument.name} needs data: name a .jsonl file or a data set hf:OWNER/NAME.")
            if (
                factor.name in asked
                and factor.needs is not None
                and factor.needs not in given
                and not self.factors[factor.needs].default
            ):
                self.stop(f"{factor.name} does nothing while {factor.needs} is 0: name a level of it.")

    def _settle(self, by_factor: dict[str, list[Level]], asked: Sequence[str]) -> None:
        """Every other level is the same in all arms."""
        self._refuse_idle(asked)
        compared = [level for level in self.levels if level.factor.name in asked]
        cut = next(
            (i for i, item in enumerate(self.items) if item.isa(*_SIDES) and compared and compared[0].at < i), None
        )
        for name, levels in by_factor.items():
            if name in asked:
                continue
            level = levels[0]
            inside = (
                cut is not None
                and compared[0].at <= level.at <= compared[-1].at
                and sum(each.factor.name == name for each in self.levels) < 2
            )
            adapter = name.startswith("lora_") and "parameters" in asked
            if inside and level.value != level.factor.default and not adapter:
                self.stop(f"The topic gives {name}={level.value} to one side, and not to the other.")
            last = self.items[level.at - 1] if level.at else None
            if (
                cut is not None
                and level.at > compared[-1].at
                and isinstance(compared[-1].value, str)
                and off_level(level.factor) is not None
                and last is not None
                and last.kind != "mark"
                and level.value != level.factor.default
                and not adapter
            ):
                self.stop(f"{name}={level.value} may belong to one side only.")
            if level.source == "planner":
                self.stop(f"{name} is named without a level.")
            self.put("steps" if name == STEPS else f"set.{name}", level.value, "topic")

    def _claim(self, levels: Sequence[Level], asks: set[str]) -> None:
        """The metric, and which way the treatments are said to move it."""
        metrics = {metric.name: metric for metric in self.folder.instrument.metrics}
        implied: list[str] = []
        signs: list[int] = []
        raw: list[int] = []
        chooses = (
            bool(asks & {"which", "balance"})
            or not self.sided
            and any(item.text in ("best", "fastest", "optimal", "highest", "lowest") for item in self.items)
        )
        named = [item.what for item in self.items if item.kind == "metric"]
        for i, item in enumerate(self.items):
            if i in self.used and not item.isa(*_SIDES):
                continue
            if item.isa("better", "worse", "faster", "slower", "more_accurate", "less_accurate", "beat", "lose"):
                signs.append(1 if item.isa("better", "faster", "more_accurate", "beat") else -1)
                implied += self._implied(item)
            elif item.isa("more", "less") and self._is_of_metric(i):
                raw.append(1 if item.isa("more") else -1)
            elif item.kind == "metric" and isinstance(item.value, int):
                raw.append(item.value)
            elif not item.isa("equal"):
                continue
            self.used.add(i)
        self.used |= {i for i, item in enumerate(self.items) if item.kind == "metric"}
        explicit = list(dict.fromkeys(named))
        if explicit == ["final_reward"] and "auc_reward" in implied:
            explicit = []  # rewards that rise faster
        if (
            explicit
            and set(implied) <= {"heldout_accuracy"}
            and not any(item.isa("more_accurate", "less_accurate") for item in self.items)
        ):
            implied = []
        decided = list(dict.fromkeys([*explicit, *implied]))
        if "balance" in asks:
            decided = [name for name in decided if name != WALL] or decided
        if len(decided) > 1:
            self.stop(
                f"The topic names several metrics ({', '.join(decided)}), and one decides: move the others to secondary."
            )
        if decided:
            self.put("metric", decided[0], "topic" if explicit else "planner")
        metric = metrics[decided[0] if decided else self.folder.instrument.defaults.metric]
        better = 1 if metric.direction == "increase" else -1
        moves = {*(sign * better for sign in signs), *raw}
        if self.moved and not (moves or decided or chooses or len(levels) > 1 or "equal" in asks or "far" in asks):
            self.stop("The topic does not say what is to change.")
        if any(item.isa("equal") for item in self.items):
            if signs or raw:
                self.stop("The topic claims both that the arms are equal and that they differ.")
            self.put("claim", "equal", "topic")
        elif len(moves) > 1:
            self.stop("The topic claims opposite effects.")
        elif moves and not chooses and (self.sided or len(levels) == 1):
            self.put("claim", "increase" if moves.pop() > 0 else "decrease", "topic")
        elif (
            moves
            and not chooses
            and len(levels) > 1
            and not any(item.text == "or" for item in self.items[levels[0].at : levels[-1].at])
        ):
            self.stop("The topic claims an effect, and does not say of which level against which.")

    def _implied(self, item: Item) -> list[str]:
        metrics = self.folder.instrument.metrics
        if item.isa("more_accurate", "less_accurate"):
            return ["heldout_accuracy"]
        words = [item.text] if item.isa("better", "worse") else ["faster"] if item.isa("faster", "slower") else []
        return [metric.name for metric in metrics for word in words if word in metric.aliases][:1]

    def _is_of_metric(self, i: int) -> bool:
        near = [self.items[j] for j in (i - 1, i + 1) if 0 <= j < len(self.items)]
        return any(item.kind == "metric" for item in near)

    # -- arms that are written out ---------------------------------------------------------------------------------

    def _listed_arms(self, text: str) -> dict[str, dict[str, Scalar]] | None:
        """`(a) GRPO, (b) with clip-higher 0.28, (c) with clip-higher and token-level loss`."""
        parts = re.split(r"(?<![\w])(?:\(([a-z]|[ivx]{1,4}|\d)\)|\b([a-z1-9])\))", text)
        labels = [a or b for a, b in zip(parts[1::3], parts[2::3], strict=False)]
        if len(labels) < 2 or labels not in [
            list(each[: len(labels)]) for each in ("abcdefgh", "123456789", ("i", "ii", "iii", "iv", "v", "vi"))
        ]:
            return None
        arms: dict[str, dict[str, Scalar]] = {}
        stated: dict[str, Scalar] = {}
        bare: list[tuple[str, str]] = []
        last, _, behind = parts[-1].partition(".")
        for n, segment in enumerate([*parts[3:-1:3], last]):
            label = labels[n]
            self._part(segment)
            arms[label] = {level.factor.name: level.value for level in self.levels}
            stated |= {level.factor.name: level.value for level in self.levels if level.source == "topic"}
            bare += [
                (label, item.what) for item in self.items if item.kind == "factor" and item.what not in arms[label]
            ]
        for label, name in bare:
            if name not in stated:
                self.stop(f"Arm {label} names {name} without a level.")
            arms[label][name] = stated.get(name, self.factors[name].default)
        self._part(f"{parts[0]} . {behind}")
        self.fields.pop("set", None)
        settings = {
            level.factor.name: level.value
            for level in self.levels
            if not any(level.factor.name in arm for arm in arms.values())
        }
        if len({tuple(sorted(arm.items(), key=str)) for arm in arms.values()}) < len(arms):
            self.stop("Two of the arms are the same.")
        for name, value in settings.items():
            self.put(f"set.{name}", value, "topic")
        self._claim([], {"which"})
        self._name_unused()
        return arms

    def _part(self, text: str) -> None:
        self._name_unused()
        self.levels, self.used, self.moved = [], set(), {}
        self._load(text)
        self._mark("on", "default", "base", "prep")
        self._motions()

    def _splits(self, text: str) -> dict[str, dict[str, Scalar]] | None:
        """`4 tasks x 16, 8 x 8 or 16 x 4`: tasks of a step times rollouts of a task."""
        pair = r"(?<![\w.])(\d+) ?(?:tasks?|prompts?|groups?)? ?(?:x|×|by|\*) ?(\d+)(?: ?(?:rollouts|samples|episodes|completions|generations)(?: (?:each|per task|per prompt))?)?(?![\w.])"
        found = [(int(a), int(b)) for a, b in re.findall(pair, text)]
        if len(found) < 2 or not re.search(r"rollout|task|prompt|group|sample|episode|completion", text):
            return None
        total = r"(?:with |at |of |for )?(?:a (?:total|budget) of )?(\d+) (?:rollouts|episodes|samples|completions)(?: (?:per|a|each) (?:step|batch))?(?: in total)?"
        rest = re.sub(pair, " , ", text)
        totals = [int(each) for each in re.findall(total, rest)]
        self._part(re.sub(r"\b(split|splits|division|divisions)\b", " ", re.sub(total, " , ", rest)))
        if any(a * b != each for each in totals for a, b in found) or len(set(found)) < len(found):
            self.stop("The splits do not all come to the total that the topic gives, or one is named twice.")
        for level in self.levels:
            self.put("steps" if level.factor.name == STEPS else f"set.{level.factor.name}", level.value, "topic")
        self._claim([], {"which"})
        self._name_unused()
        return {f"{a}x{b}": {"tasks_per_step": a, "group_size": b} for a, b in found}


# -- levels of a factor -----------------------------------------------------------------------------------------------


def _typed(factor: Factor, value: Any) -> Scalar:
    number = float(value)
    return int(number) if factor.type == "int" and number == int(number) else number


def _scenery(level: Level) -> bool:
    """The usual choice, as in `does GRPO learn faster …`, or what the tasks are."""
    return (
        level.factor.type == "choice"
        and (level.value == level.factor.default or level.factor.proper)
        or level.factor.type == "data"
    )


def off_level(factor: Factor) -> Scalar | None:
    """The level at which it does nothing; None when it has none."""
    if factor.type == "bool":
        return False
    if factor.off is not None:
        return factor.off
    numeric = factor.type in ("int", "float") and level_problem(factor, 0) is None
    return _typed(factor, 0) if numeric else None


def on_level(factor: Factor) -> Scalar:
    """A level at which it does something: the default, another choice, or a tenth of its range."""
    if factor.type == "bool":
        return True
    if factor.default != off_level(factor) or isinstance(factor.default, str):
        return (
            factor.default
            if factor.default != off_level(factor)
            else next(each for each in factor.choices if each != factor.off)
        )
    tenth = (factor.high if factor.high is not None else 1.0) / 10
    return max(1, round(tenth)) if factor.type == "int" else _rounded(tenth)


def moved_from_default(factor: Factor, way: int) -> Scalar | None:
    """A level clearly above or below the default: twice it for counts, four times on a wide scale, else half the way to the bound."""
    if factor.type not in ("int", "float") or isinstance(factor.default, str):
        return None
    default, bound = float(factor.default), factor.high if way > 0 else factor.low
    wide = factor.scale == "log" or (default > 0 and factor.high is not None and factor.high > 20 * default)
    if factor.type == "int" or wide:
        level = default * (2.0 if factor.type == "int" else 4.0) ** way
        level = level if bound is None else min(level, bound) if way > 0 else max(level, bound)
    else:
        level = default + way if bound is None else (default + bound) / 2
    moved: Scalar = max(1, round(level)) if factor.type == "int" else _rounded(level)
    return None if (float(moved) - default) * way <= 0 or level_problem(factor, moved) else moved


def _spread(factor: Factor) -> list[Scalar]:
    """Levels on both sides of the default, or from it to the end of its range."""
    sides = [each for way in (-1, 1) if (each := moved_from_default(factor, way)) is not None]
    if sides or factor.high is None or isinstance(factor.default, str):
        return sides
    start = max(float(factor.default), 1.0 if factor.type == "int" else factor.high / 100)
    steps = [start * (factor.high / start) ** (n / 2) for n in range(3)]
    return list(
        dict.fromkeys(
            each
            for step in steps
            if (each := _typed(factor, round(step) if factor.type == "int" else _rounded(step))) != factor.default
        )
    )


def _rounded(value: float) -> float:
    return float(f"{value:.1e}") if math.isfinite(value) else value
