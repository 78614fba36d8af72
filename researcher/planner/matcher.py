"""Plans without an LLM: a topic in the field's words becomes a draft of a `StudySpec`.

Every word of the topic is used, or has no content, or stops the matcher: then a person gets the draft and the words that were not
understood. Two readings, a second metric or a number without a place stop it too. It declines what names nothing to vary.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from foundation.strict import explain
from researcher.design.planning import plan_of
from researcher.instruments.catalogue import InstrumentFolder, level_problem
from researcher.instruments.instrument import Factor, Scalar
from researcher.instruments.levels import as_level, off_level
from researcher.planner.matcher_words import SCREENED, SWITCHED_ON, Items, Said, choose_instrument, items, said
from researcher.planner.outcome import Declined, NeedsEdit, Outcome, Proposed, TopicRequest
from researcher.refusals import PlanningRefused
from researcher.study.draft import Draft, Source
from researcher.study.spec import StudySpec

FEWEST_RACED = 4
"""Treatments against one baseline from which a race is cheaper than all comparisons."""
_SIDES = ("vs", "than", "beat", "lose", "equal")
_CLAIMS = {
    "better": 1,
    "worse": -1,
    "faster": 1,
    "slower": -1,
    "more_accurate": 1,
    "less_accurate": -1,
    "beat": 1,
    "lose": -1,
}
_JOINS = (
    *_SIDES,
    *_CLAIMS,
    "list",
    "to",
    "from",
    "between",
    "more",
    "less",
    "base",
    "default",
    "which",
    "balance",
    "learns",
)
_PASSED = (*_JOINS, "metric", "number", "instrument", "level")
_APART = ("on", "for", "in", "with", "when", "using", "under", "by")
_SUPERLATIVE = ("best", "fastest", "optimal", "optimum", "highest", "lowest")


class Matcher:
    """The planner that needs no key."""

    name = "builtin"

    async def propose(self, request: TopicRequest) -> Outcome:
        outcome = match(request.topic, request.instruments, request.given)
        if isinstance(outcome, Proposed):
            spec = StudySpec.model_validate(outcome.draft.fields)
            folder = next(
                each for each in request.instruments if spec.instrument in (each.instrument.name, str(each.path))
            )
            try:
                plan_of(spec, folder, known=request.known, servers=request.servers)
            except PlanningRefused as refusal:
                return NeedsEdit(draft=outcome.draft, problems=(str(refusal),))
        return outcome


def match(topic: str, folders: Sequence[InstrumentFolder], given: dict[str, Any]) -> Outcome:
    """given: fields of the spec that hold whatever the topic says."""
    wanted = given.get("instrument")
    known = [each for each in folders if wanted in (None, each.instrument.name, str(each.path))]
    if not known or not topic.strip():
        return Declined(reason="There is no topic." if known else f"There is no instrument {wanted or 'to ask'}.")
    words = said(topic)
    chosen, named = choose_instrument(words.text, known)
    study = _Study(topic, chosen[0], words)
    study.put("instrument", chosen[0].instrument.name, "topic" if named else "default")
    if len(chosen) > 1:
        names = " and ".join(each.instrument.name for each in chosen)
        study.stop(f"The topic fits {names}; choose one with --instrument.")
    study.read()
    return study.outcome(given)


@dataclass(frozen=True, slots=True)
class Level:
    """A level of a factor at an index of the items. source planner: the topic gives none."""

    factor: Factor
    value: Scalar
    at: int = -1
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
    items: Items = field(default_factory=Items)
    levels: list[Level] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)
    """Which way the topic says that a factor goes."""
    used: set[int] = field(default_factory=set)
    factors: dict[str, Factor] = field(default_factory=dict)
    sided: bool = False
    """Whether the topic says which levels are the treatments."""
    declined: str = ""

    def stop(self, problem: str) -> None:
        self.problems += [problem] * (problem not in self.problems)

    def put(self, path: str, value: Any, source: Source) -> None:
        *above, last = path.split(".")
        at = self.fields
        for name in above:
            at = at.setdefault(name, {})
        at[last] = value
        self.sources[path] = source

    def read(self) -> None:
        self.factors = {factor.name: factor for factor in self.folder.instrument.factors}
        self.put("question", " ".join(self.topic.split()), "topic")
        self.problems += self.words.problems
        self._bounds(dict(self.words.bounds))
        try:
            arms = self._listed_arms() or self._splits()
            if arms:
                self._put_arms(arms)
            else:
                self._load(self.words.text)
                self._design()
        except _Stop as stop:
            self.stop(str(stop))
            self._draft_levels()
        self._name_unused()

    def outcome(self, given: dict[str, Any]) -> Outcome:
        if self.declined and not given.keys() & {"compare", "arms"}:
            names = [item.what for item in self.items if item.isa("factor", "level", "metric")]
            return Declined(reason=self.declined, nearest=tuple(dict.fromkeys([*names, *SCREENED]))[:5])
        if given.keys() & {"compare", "arms"}:
            self.fields = {
                name: value for name, value in self.fields.items() if name not in ("compare", "arms", "design")
            }
        for name, value in given.items():
            whole = not isinstance(value, dict) or name in ("compare", "arms")
            for path, each in (
                {name: value} if whole else {f"{name}.{key}": inner for key, inner in value.items()}
            ).items():
                self.put(path, each, "flag")
        try:
            StudySpec.model_validate(self.fields)
        except ValidationError as error:
            for each in explain(error, StudySpec):
                self.stop(f"{each}.")
        draft = Draft(fields=self.fields, sources=self.sources, author=Matcher.name, because="Matched word by word.")
        return NeedsEdit(draft=draft, problems=tuple(self.problems)) if self.problems else Proposed(draft=draft)

    def _bounds(self, bounds: dict[str, Any]) -> None:
        if "seeds.from" in bounds:
            first, last = bounds.pop("seeds.from"), bounds.pop("seeds.to")
            bounds |= {"seeds.first": first, "seeds.all": last - first + 1}
        if "seeds.all" in bounds:
            bounds["seeds.min"] = bounds["seeds.max"] = bounds.pop("seeds.all")
        if "schedule.windows" in bounds:
            bounds["schedule.windows"] = [bounds["schedule.windows"]]
        for path, value in bounds.items():
            self.put(path, value, "topic")

    def _load(self, text: str) -> None:
        self.items, self.levels, self.used, self.moved = (
            items(text, self.folder.instrument, self.words.data),
            [],
            set(),
            {},
        )
        title = re.findall(r"\w+", self.folder.instrument.title.lower())
        for i, item in enumerate(self.items):
            before, behind = self.items.at(i - 1), self.items.at(i + 1)
            if item.text in title and behind.isa("instrument"):
                self.used.add(i)  # `small sums` are no smaller ones
            whose = item.isa("instrument") and item.text != item.what and self.folder.instrument.roles
            if whose and ((behind.isa("factor") and not behind.led) or (before.isa("factor") and not item.led)):
                self.stop(f"{item.text!r} beside a setting: which of the models has it?")
        self._mark("instrument", "mark", "model", "list", "which", "learns", "first", "factor", "level")
        self._place()
        self._switches()
        self.levels.sort(key=lambda level: level.at)
        for level in self.levels:
            if level.source == "topic" and (problem := level_problem(level.factor, level.value)):
                self.stop(f"{problem}.")

    def _mark(self, *kinds: str) -> None:
        self.used |= set(self.items.places(*kinds))

    def _name_unused(self) -> None:
        for i, item in enumerate(self.items):
            if i not in self.used:
                self.stop(f"{item.text!r} is not understood here.")

    def _draft_levels(self) -> None:
        """Something to edit, of a topic that stopped: what has several levels is compared."""
        self.used |= {i for i, item in enumerate(self.items) if not item.isa("unknown")}
        for name in (
            {}
            if self.fields.keys() & {"arms", "compare"}
            else dict.fromkeys(level.factor.name for level in self.levels)
        ):
            levels = self._of(name)
            if len(levels) > 1:
                self._put_compare(levels[0], levels[1:])
            else:
                self.put("steps" if name == "steps" else f"set.{name}", levels[0].value, "topic")

    # -- levels ----------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Each number goes to the factor beside it, else to the last without one, else along a list, else to the only one left."""
        found, at, filled = self.items, dict[int, Factor](), set[int]()
        numbers = found.places("number")
        for near in (self._beside, self._before):
            for i in numbers:
                free = [j for j in near(i) if i not in at and j not in filled]
                for j in sorted(free, key=lambda j: not self._takes(self.factors[found[j].what], i))[:1]:
                    at[i] = self.factors[found[j].what]
                    filled |= {
                        j,
                        *(k for k in (i - 1, i + 1) if found.at(k).isa("factor") and found[k].what == found[j].what),
                    }
        for listed in (True, False):
            for i in [*numbers, *numbers[::-1]]:
                comma = (
                    listed and self._bare(filled) and found.at(i - 1).isa("mark") and not found.at(i - 2).isa("number")
                )
                ways = [each for way in (-1, 1) if (each := self._along(i, way, at, filled)) and self._takes(each, i)]
                if i not in at and ways and not comma:
                    if ways[0] != ways[-1]:
                        raise _Stop(f"{found[i].text!r} may be a level of {ways[0].name} or of {ways[-1].name}.")
                    at[i] = ways[0]
            owners = {factor.name for factor in at.values()}
            lacking = self._bare(filled) or (owners if len(owners) == 1 else set())
            for i in [i for i in numbers if len(lacking) == 1 and i not in at]:
                factor = self.factors[next(iter(lacking))]
                at |= {i: factor} if not listed or self._takes(factor, i) else {}
        for i, factor in at.items():
            name, mark = found.at(i + 1), found.at(i + 2).text
            if name.isa("factor") and name.text.endswith("s") and mark in (":", "(", ",") and at.get(i + 3) == factor:
                if not found.at(i + 4).isa("factor"):  # `two group sizes, 4 and 8`
                    raise _Stop(f"{found[i].text!r} may be a level of {factor.name}, or how many there are.")
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
        left = self._skip(i - 1, -1, ("to", "from", "base", "between", "default"), "=:(~")
        right = self._skip(i + 1, 1, ("better", "worse", "which", "default", "base", "too"))
        near = [left] if self._is_numeric(left) and self.items[i].led not in _APART else []
        return near + ([right] if self._is_numeric(right) and not self.items[right].led else [])

    def _before(self, i: int) -> list[int]:
        """`Which rate is best, 1e-5 or 4e-5?`: the last factor before a number, over connecting words."""
        j = self._skip(i - 1, -1, [kind for kind in _PASSED if kind != "number"], ",:()?-'\"")
        return [j] if self._is_numeric(j) else []

    def _along(self, i: int, way: int, at: dict[int, Factor], filled: set[int]) -> Factor | None:
        """The factor of the next level that way; a colon ends it where a factor still lacks its levels."""
        before, joins = self.items.at(i - 1), ("list", "to", "from", "better", "worse", "faster", "slower", *_SIDES)
        if way < 0 and self.items[i].led not in ("", "of") and not before.isa(*joins) and before.text not in (",", "("):
            return None
        j = i + way
        while (
            (j not in at or (way > 0 and self.items[j].led)) and self.items.at(j).kind and not (way < 0 and j in filled)
        ):
            ends = self.items[j].text in ".;!|?" or (self.items[j].text in ":(" and self._bare(filled))
            anew = way > 0 and self.items[j].led not in ("", "of")
            if anew or not self.items[j].isa(*_PASSED, "mark") or (self.items[j].isa("mark") and ends):
                return None
            j += way
        return at[j] if j in at else self.factors[self.items[j].what] if j in filled and way < 0 else None

    def _switches(self) -> None:
        """`without KL`, `with LoRA turned off`, `than the default`, `better than none`, `KL against no KL`."""
        found, taken = self.items, set[int]()
        off_somewhere = found.has("off", "off_behind")
        for i, item in enumerate(found):
            behind = item.isa("off_behind") or (off_somewhere and item.isa("on_behind"))
            if not item.isa("off", "on", "off_behind", "on_behind", "default", "none"):
                continue
            j = i - 1 if behind else self._skip(i + 1, 1, ("list", "off", "on", "default"))
            target = found.at(j)
            factor = self.factors[target.what] if target.isa("factor", "level") else None
            numbered = not behind and any(
                level.at in (j, j + 1) and found[level.at].isa("number") for level in self.levels
            )
            if item.isa("on", "on_behind"):
                self.used.add(i)
                if factor is not None and off_somewhere and not numbered and target.isa("factor"):
                    taken.add(j)
                    if not any(level.factor == factor and level.value != off_level(factor) for level in self.levels):
                        self.levels.append(Level(factor, on_level(factor), i, "planner"))
                continue
            factor = factor or self._only_factor()
            named = item.isa("default") and (
                target.isa("number") or numbered or (target.isa("level") and factor and target.value == factor.default)
            )
            value = None if factor is None else factor.default if item.isa("default") else off_level(factor)
            if named:
                self.used.add(i)
            elif factor is not None and value is not None:
                if numbered and item.isa("off"):
                    raise _Stop(f"{item.text!r} before a level of {factor.name} can be read in two ways.")
                taken.add(j)
                self.used.add(i)
                self.levels = [level for level in self.levels if level.at != j or not target.isa("level")]
                self.levels.append(Level(factor, value, i))
        off = {
            level.factor.name
            for level in self.levels
            if level.at >= 0 and found[level.at].isa("off", "off_behind", "none")
        }
        for i in [i for i in found.places("factor") if found[i].what in off and i not in taken]:
            near = [
                level for level in self.levels if level.factor.name == found[i].what and found[level.at].isa("number")
            ]
            if not near and len(self._of(found[i].what)) < 2:
                self.levels.append(
                    Level(self.factors[found[i].what], on_level(self.factors[found[i].what]), i, "planner")
                )
        adapters = [level for level in self.levels if level.factor.name.startswith("lora_")]
        if adapters and [level.value for level in self.levels if level.factor.name == "parameters"] == ["full"]:
            self.levels.append(
                Level(self.factors["parameters"], "lora", adapters[0].at)
            )  # `LoRA rank 8 against full fine-tuning`

    def _only_factor(self) -> Factor | None:
        names = {item.what for item in self.items if item.isa("factor")}
        names |= {level.factor.name for level in self.levels if not _is_scenery(level)}
        return self.factors[next(iter(names))] if len(names) == 1 else None

    def _of(self, name: str) -> list[Level]:
        """The levels of a factor, each once."""
        levels = [level for level in self.levels if level.factor.name == name]
        return list({level.value: level for level in levels[::-1]}.values())[::-1]

    def _motions(self) -> None:
        """`a higher rate`, `raising the rate`, `rises with the group size`: which way each factor goes."""
        found = self.items
        for i, item in enumerate(found):
            if item.isa("factor") and item.text == "clip higher":
                self.moved[item.what] = 1
            if not item.isa("more", "less", "double", "halve", "times") or i in self.used:
                continue
            name, way = self._moved_by(i), -1 if item.isa("less", "halve") else 1
            if name and not item.isa("times") and self.moved.setdefault(name, way) != way:
                raise _Stop(f"The topic has {name} go up and down.")
            self.used |= {i} if name else set()

    def _moved_by(self, i: int) -> str | None:
        found, j = self.items, i + 1
        before, behind = found.at(i - 1), found.at(i + 1)
        if behind.isa("than", "metric") or (before.isa("list") and found.at(i - 2).isa("number")):
            return None  # `higher than 1e-4`, `higher accuracy`, `16 or more`
        k = j + behind.isa("on")
        if (
            before.isa("metric")
            and found.at(k).isa("factor")
            and found[k].led == "with"
            and not found.at(k + 1).isa("number")
        ):
            self.moved[found[k].what] = 1  # accuracy rises with the group size
            return None
        if before.isa("metric") and (behind.led or not behind.isa("factor")):
            return None
        while found.at(j).isa("more", "less", "times") or found.at(j).text == "or":
            j += 1
        k = self._skip(i - 1, -1, ("times",))
        ahead = found.at(j).isa("factor") and not found[j].led
        return found[j].what if ahead else found[k].what if found.at(k).isa("factor") else None

    # -- which design ----------------------------------------------------------------------------------------------

    def _design(self) -> None:
        self._motions()
        names = list(dict.fromkeys(level.factor.name for level in self.levels))
        varied = [name for name in names if len(self._of(name)) > 1]
        bare = [
            name for name in dict.fromkeys(item.what for item in self.items if item.isa("factor")) if name not in names
        ]
        self._mark("then", "balance", "interact", "weigh", "open", "far", "too")
        has, models = self.items.has, self.words.models
        if len(models) == 1:
            self.put("model", models[0], "topic")
        if len(models) > 1:
            if varied or bare:
                raise _Stop(f"The topic compares models, and {(varied + bare)[0]} too.")
            self.sided = has(*_SIDES)
            self.put("model", models[::-1] if self.sided else models, "topic")
            self._mark(*_SIDES, "from", "to")
            self._finish([], [])
        elif self.words.text.strip().startswith("why") and not varied:
            self.declined = (
                "A study tests what a setting does, and finds no cause of what was seen: ask about a factor."
            )
        elif has("then"):
            self._sequence(varied)
        elif has("untrained") or not (varied or bare or has("open", "weigh") or self._asked()):
            self._control()
        elif len(varied) > 1 and not bare and not has("interact"):
            self._bundles(varied)
        elif len(varied) == 1 and not bare:
            self._compare(self._of(varied[0]))
        elif varied and not has("interact"):
            raise _Stop(f"{bare[0]} is named without a level beside {varied[0]}.")
        elif bare and self._asked():
            raise _Stop(
                f"The topic names a level of {self._asked()[0]}, and {bare[0]} without one: say which is compared."
            )
        elif len(varied + bare) != 1 and (varied or len(bare) > 1 or not self._asked()):
            self._explore(varied + bare)
        elif bare:
            self._move(self.factors[bare[0]])
        elif len(self._asked()) == 1:
            self._against_default(self._of(self._asked()[0])[0])
        else:
            raise _Stop(f"The topic names one level each of {' and '.join(self._asked())}: say which is compared.")

    def _asked(self) -> list[str]:
        """Factors with one level that is no setting: not behind a preposition, not of the task, no usual choice."""
        single = [level for level in self.levels if len(self._of(level.factor.name)) == 1 and not _is_scenery(level)]
        names = dict.fromkeys(level.factor.name for level in single if not self._is_setting(level))
        return list(
            names
            or {level.factor.name: 0 for level in single if len(single) == 1 and not self.items.has("factor", "learns")}
        )

    def _is_setting(self, level: Level) -> bool:
        near = [self.items.at(level.at + d) for d in (-1, 0, 1)]
        own = [item for item in near if item is near[1] or (item.isa("factor") and item.what == level.factor.name)]
        return any(item.led not in ("", "under", "as") for item in own) or self.items.at(level.at + 2).isa("instrument")

    def _compare(self, levels: list[Level]) -> None:
        self._refuse_twice(levels[0].factor.name)
        if self.items.has("balance"):
            ordered = sorted(levels, key=lambda level: (isinstance(level.value, str), level.value))
            self._put_compare(ordered[0], ordered[1:])
            self.put("design", "balance", "topic")
            self._mark("between")
        else:
            treatments, baseline = self._sides(levels)
            self._put_compare(baseline, treatments)
        self._finish([levels[0].factor.name], levels)

    def _refuse_twice(self, name: str) -> None:
        values = [level.value for level in self.levels if level.factor.name == name and level.source == "topic"]
        if len(values) > len(set(values)):
            raise _Stop(f"The topic names a level of {name} twice.")

    def _put_compare(self, baseline: Level, treatments: Sequence[Level]) -> None:
        source: Source = "planner" if any(level.source == "planner" for level in (baseline, *treatments)) else "topic"
        compared = {"baseline": baseline.value, "levels": [level.value for level in treatments]}
        self.put(f"compare.{baseline.factor.name}", compared, source)
        if len(treatments) >= FEWEST_RACED:
            self.put("design", "race", "planner")

    def _sides(self, levels: list[Level]) -> tuple[list[Level], Level]:
        """The treatments and the baseline."""
        name, found = levels[0].factor.name, self.items
        way = None if isinstance(levels[0].value, str | bool) else self.moved.get(name)
        cuts: list[tuple[int, str]] = []
        for n, (one, other) in enumerate(itertools.pairwise(levels), 1):
            between = [item.kind if item.text != "->" else "to" for item in found[one.at + 1 : other.at]]
            begun = way is not None or any(found.at(one.at - d).isa("from") for d in (1, 2)) or "->" in self.words.text
            sides = (
                [kind for kind in between if kind in _SIDES]
                + ["than"] * ("from" in between)
                + ["to"] * ("to" in between and begun)
            )
            cuts += [(n, sides[0])] if sides else []
        self._mark(*_SIDES, "from", "to", "between", "base")
        based = [level for level in levels if self._is_based(level.at)]
        based = based or [level for level in levels if found.at(level.at + 1).isa("base")]
        ahead = any(found[i].isa("than", "vs") for i in range(levels[0].at))
        marked = any(kind != "vs" for _, kind in cuts)
        late = any(i > levels[-1].at + 1 for i in found.places("factor", *_CLAIMS) if found[i].what in ("", name))
        asked_late = (
            late
            and not found.at(levels[-1].at + 1).isa("factor")
            and any(item.text in ",:.?;" for item in found[levels[-1].at :])
        )
        self.sided = bool(based or ahead or way is not None or (cuts and (marked or not asked_late)))
        if based and any(levels.index(based[0]) < n for n, kind in cuts if kind != "vs"):
            raise _Stop("The topic claims something of its baseline: say it of the other level.")
        if len(based) == 1:
            return [level for level in levels if level is not based[0]], based[0]
        if ahead and not cuts:
            return self._agreeing(levels[1:], levels[:1], way)
        if cuts and cuts[0][1] == "to" and len(cuts) == 1:
            return self._agreeing(levels[cuts[0][0] :], levels[: cuts[0][0]], way)
        if way is not None and not marked:
            lowest = (min if way > 0 else max)(levels, key=lambda level: float(level.value))
            return [level for level in levels if level is not lowest], lowest
        if len(cuts) == 1 and (marked or cuts[0][0] == len(levels) - 1):
            return self._agreeing(levels[: cuts[0][0]], levels[cuts[0][0] :], way)
        if len(cuts) > 1 and marked:
            raise _Stop(f"The topic sets levels of {name} against each other in more than one way.")
        self.sided = False
        usual = next((level for level in levels if level.value == level.factor.default), levels[0])
        return [level for level in levels if level is not usual], usual

    def _is_based(self, at: int) -> bool:
        """`a baseline of 8`, `baseline group size 8`."""
        one, two = self.items.at(at - 1), self.items.at(at - 2)
        return one.isa("base") or (two.isa("base") and (one.isa("factor") or one.text in (":", "=", "(")))

    def _agreeing(self, treatments: list[Level], baselines: list[Level], way: int | None) -> tuple[list[Level], Level]:
        name = treatments[0].factor.name
        if len(baselines) > 1:
            raise _Stop(f"The topic sets {name} against several baselines.")
        if way is not None and any((float(each.value) - float(baselines[0].value)) * way < 0 for each in treatments):
            raise _Stop(f"The topic has {name} go one way, and its levels the other.")
        return treatments, baselines[0]

    def _against_default(self, level: Level) -> None:
        factor, off = level.factor, off_level(level.factor)
        self._refuse_twice(factor.name)
        self._mark("from", "to", "base")
        if self.items.has("than", "vs", "beat", "lose", "equal"):
            raise _Stop(f"The topic sets {factor.name}={level.value} against something that is no level of it.")
        other = (
            factor.default if level.value != factor.default else on_level(factor) if level.value == off else factor.off
        )
        if other is None or other == level.value:
            raise _Stop(f"{factor.name}={level.value} is the default: name the level to compare it with.")
        source: Source = "topic" if other == factor.default else "planner"
        treatments, baseline = self._agreeing(
            [level], [Level(factor, other, source=source)], self.moved.get(factor.name)
        )
        self._put_compare(baseline, treatments)
        self._finish([factor.name], [level])

    def _move(self, factor: Factor) -> None:
        """A factor without levels: the default against levels on the side that the topic says, or on both."""
        found, default, way = self.items, factor.default, self.moved.get(factor.name)
        if found.has(*_SIDES):
            raise _Stop(f"The topic compares {factor.name} with something, and names no level of it.")
        scales = [2.0 if item.isa("double") else 0.5 for item in found if item.isa("double", "halve")]
        scales += [float(item.value) ** (way or 1) for item in found if item.isa("times")]
        open_end = found.has("far", "open", "which") or any(item.text in _SUPERLATIVE for item in found)
        values: list[Scalar] = []
        if len(scales) > 1:
            raise _Stop("The topic names several multiples of the default: name the levels themselves.")
        if scales and not isinstance(default, str):
            values = [as_level(factor, float(f"{default * scales[0]:.1e}"))]
        elif factor.type in ("choice", "bool"):
            values = [not default] if factor.type == "bool" else [each for each in factor.choices if each != default]
        elif open_end or (way is None and default != off_level(factor) and factor.off is None):
            values = _spread(factor)
        elif way is None and default != off_level(factor):
            default, values = factor.off or 0, [factor.default]
        else:
            usual = (
                on_level(factor)
                if way is None or (way > 0 and factor.name in SWITCHED_ON)
                else moved_from_default(factor, way)
            )
            values = [usual] if usual is not None else []
        if not values:
            raise _Stop(f"{factor.name} cannot go further: its default is at the end of its range.")
        levels = [Level(factor, value, source="planner") for value in values]
        self._put_compare(Level(factor, default), levels)
        self.sided = factor.type == "choice"
        self._finish([factor.name], levels if self.sided or len(levels) == 1 else [])

    def _explore(self, names: list[str]) -> None:
        """Two levels of each: whether they interact, or which of them matters."""
        crossed = self.items.has("interact")
        asked = self.items.has("interact", "weigh", "open", "which") or any(
            item.text in _SUPERLATIVE for item in self.items
        )
        if not asked or (not self.items.has("interact", "weigh", "open") and self.items.has(*_SIDES)):
            raise _Stop(f"The topic names {' and '.join(names)}, and not how they are compared.")
        settled = {level.factor.name for level in self.levels}
        for name in names or [name for name in SCREENED if name in self.factors and name not in settled]:
            factor, levels = self.factors[name], self._of(name)
            if len(levels) > 2:
                raise _Stop(
                    f"{name} has {len(levels)} levels; where several factors are varied together, each has two."
                )
            other = None if factor.default == off_level(factor) else moved_from_default(factor, self.moved.get(name, 1))
            moved = Level(factor, on_level(factor) if other is None else other, source="planner")
            usual = next(
                (each for each in levels if each.value == factor.default),
                levels[0] if levels else Level(factor, factor.default),
            )
            self._put_compare(usual, [each for each in levels if each is not usual] or [moved])
        self._mark(*_SIDES)
        self.put("design", "factorial" if crossed else "screen", "topic" if crossed else "planner")
        self._finish(list(self.fields["compare"]), [])

    def _sequence(self, varied: list[str]) -> None:
        cut = self.items.places("then")[0]
        order = sorted(varied, key=lambda name: self._of(name)[0].at)
        if (
            len(order) != 2
            or not self._of(order[0])[-1].at < cut < self._of(order[1])[0].at
            or self.items.has("interact")
        ):
            raise _Stop("A sequence compares two factors one after the other, each with its own levels.")
        for name in order:
            treatments, baseline = self._sides(self._of(name))
            self._put_compare(baseline, treatments)
        self.put("design", "sequence", "topic")
        self.sided = False
        self._finish(order, [])

    def _control(self) -> None:
        """`Does GRPO improve accuracy?`: the model as it is trained against one that is not (learning rate 0)."""
        found, opposed, untrained = self.items, self.items.places(*_SIDES), self.items.places("untrained")
        if untrained and opposed and untrained[0] < opposed[0]:
            raise _Stop("The topic claims something of the untrained model: say it of the trained one.")
        trains = re.search(r"\b(train|rl|reinforcement|teach|learn)", self.words.text) or found.has("level")
        claims = found.has("better", "worse", "learns", "more_accurate", "more", "less") and not found.has(
            "faster", "slower"
        )
        if (
            not (trains and claims and "learning_rate" in self.factors)
            or found.has("unknown")
            or (opposed and not untrained)
        ):
            unknown = ", ".join(dict.fromkeys(item.text for item in found if item.isa("unknown")))
            self.declined = "The topic names nothing that can be varied and compared here."
            self.declined += f" Not understood: {unknown}." if unknown else ""
            return
        settings = [
            level.factor
            for level in self.levels
            if not _is_scenery(level) and not level.factor.target.startswith("task.")
        ]
        if settings and not untrained:
            raise _Stop(f"The topic may ask about {settings[0].name}, or about training at all.")
        self._mark("untrained", *_SIDES)
        factor = self.factors["learning_rate"]
        rate = next(
            (level for level in self.levels if level.factor == factor), Level(factor, factor.default, source="planner")
        )
        self._put_compare(Level(factor, 0.0, source="planner"), [rate])
        self._finish(["learning_rate"], [rate])

    def _bundles(self, varied: list[str]) -> None:
        """`GRPO at lr 1e-5 against RLOO at lr 2e-5`."""
        first = min(level.at for level in self.levels if level.factor.name in varied)
        cuts = [i for i in self.items.places(*_SIDES) if i > first]
        if len(cuts) != 1:
            raise _Stop(
                f"The topic varies {' and '.join(varied)}: ask about one, or whether they interact, or name the arms."
            )
        sides = [[level for level in self.levels if (level.at < cuts[0]) is early] for early in (False, True)]
        arms = [{level.factor.name: level.value for level in side} for side in sides]
        if arms[0].keys() != arms[1].keys() or any(len(arm) < len(side) for arm, side in zip(arms, sides, strict=True)):
            raise _Stop("The two sides do not set the same factors, once each.")
        self.used.add(cuts[0])
        self._put_arms({"baseline": arms[0], "treatment": arms[1]})
        self.sided = True
        self._claim(sides[1])

    def _put_arms(self, arms: dict[str, dict[str, Scalar]]) -> None:
        first = next(iter(arms.values()))
        same = {name for name, value in first.items() if all(arm.get(name) == value for arm in arms.values())}
        for name in same:
            self.put(f"set.{name}", first[name], "topic")
        for label, arm in arms.items():
            self.put(f"arms.{label}", {name: value for name, value in arm.items() if name not in same}, "topic")

    # -- settings and claim ----------------------------------------------------------------------------------------

    def _finish(self, asked: Sequence[str], levels: Sequence[Level]) -> None:
        """Every other level is the same in all arms; then the claim. levels: of the one factor that is compared."""
        compared = [level for level in self.levels if level.factor.name in asked]
        opposed = bool(compared) and any(compared[0].at < i for i in self.items.places(*_SIDES))
        for level in [each for each in self.levels if each.factor.name not in asked]:
            name = level.factor.name
            usual = level.value == level.factor.default or (name.startswith("lora_") and "parameters" in asked)
            inside = opposed and compared[0].at <= level.at <= compared[-1].at
            once = sum(each.factor.name == name for each in self.levels) < 2
            trails = opposed and level.at > compared[-1].at and isinstance(compared[-1].value, str)
            switch = off_level(level.factor) is not None and not self.items.at(level.at - 1).isa("mark")
            if once and not usual and (inside or (trails and switch)):
                self.stop(f"{name}={level.value} may belong to one side only.")
            if level.source == "planner":
                self.stop(f"{name} is named without a level.")
            self.put("steps" if name == "steps" else f"set.{name}", level.value, "topic")
        self._claim(levels)

    def _claim(self, levels: Sequence[Level]) -> None:
        """The metric, and which way the treatments are said to move it."""
        found, instrument = self.items, self.folder.instrument
        chooses = found.has("which", "balance") or (not self.sided and any(item.text in _SUPERLATIVE for item in found))
        implied, signs, raw = list[str](), list[int](), list[int]()
        for i, item in enumerate(found):
            if item.kind in _CLAIMS:
                signs.append(_CLAIMS[item.kind])
                word = (
                    "accuracy"
                    if item.kind.endswith("accurate")
                    else "faster"
                    if item.isa("faster", "slower")
                    else item.text
                )
                implied += [
                    each.name for each in instrument.metrics if word in each.aliases and not item.isa("beat", "lose")
                ][:1]
            elif (
                item.isa("more", "less")
                and i not in self.used
                and (found.at(i - 1).isa("metric") or found.at(i + 1).isa("metric"))
            ):
                raw.append(1 if item.isa("more") else -1)
            elif item.isa("metric") and item.value:
                raw.append(int(item.value))
            elif not item.isa("equal", "metric"):
                continue
            self.used.add(i)
        explicit = list(dict.fromkeys(item.what for item in found if item.isa("metric")))
        if explicit == ["final_reward"] and "auc_reward" in implied:
            explicit = []  # rewards that rise faster
        if explicit and not found.has("more_accurate", "less_accurate", "faster", "slower"):
            implied = []
        decided = list(dict.fromkeys([*explicit, *implied]))
        if found.has("balance"):
            decided = [name for name in decided if name != "wall_s"] or decided
        if len(decided) > 1:
            self.stop(
                f"The topic names several metrics ({', '.join(decided)}), and one decides: move the others to secondary."
            )
        if decided:
            self.put("metric", decided[0], "topic" if explicit else "planner")
        name = decided[0] if decided else instrument.defaults.metric
        rises = next(metric.direction for metric in instrument.metrics if metric.name == name) == "increase"
        moves = {*(sign if rises else -sign for sign in signs), *raw}
        if len(moves) > 1 or (moves and found.has("equal")):
            self.stop("The topic makes two claims.")
        if self.moved and not (moves or decided or chooses or len(levels) > 1 or found.has("equal", "far")):
            self.stop("The topic does not say what is to change.")
        listed = [item.text for item in found[levels[0].at : levels[-1].at]] if len(levels) > 1 else []
        if found.has("equal"):
            self.put("claim", "equal", "topic")
        elif moves and not chooses and (self.sided or len(levels) == 1):
            self.put("claim", "increase" if moves.pop() > 0 else "decrease", "topic")
        elif moves and not chooses and listed and "or" not in listed:
            self.stop("The topic claims an effect, and does not say of which level against which.")

    # -- arms that are written out ---------------------------------------------------------------------------------

    def _listed_arms(self) -> dict[str, dict[str, Scalar]]:
        """`(a) GRPO, (b) with clip-higher 0.28, (c) with clip-higher and token-level loss`."""
        first, *parts = re.split(r"(?<!\w)\(?(?<![\d.])\b([a-z1-9])\)", self.words.text)
        labels, segments = parts[::2], parts[1::2]
        if len(labels) < 2 or "".join(labels) not in ("abcdefgh"[: len(labels)], "123456789"[: len(labels)]):
            return {}
        segments[-1], behind = [*re.split(r"\.(?!\d)", segments[-1], maxsplit=1), ""][:2]
        arms: dict[str, dict[str, Scalar]] = {}
        bare: list[tuple[str, str]] = []
        for label, segment in zip(labels, segments, strict=True):
            self._part(segment)
            arms[label] = {level.factor.name: level.value for level in self.levels}
            bare += [(label, item.what) for item in self.items if item.isa("factor") and item.what not in arms[label]]
        stated = {name: value for arm in arms.values() for name, value in arm.items()}
        for label, name in bare:
            if name not in stated:
                self.stop(f"Arm {label} names {name} without a level.")
            arms[label][name] = stated.get(name, self.factors[name].default)
        if any(one == other for n, one in enumerate(arms.values()) for other in list(arms.values())[:n]):
            self.stop("Two of the arms are the same.")
        self._rest(f"{first} . {behind}", set(stated))
        return arms

    def _splits(self) -> dict[str, dict[str, Scalar]]:
        """`4 tasks x 16, 8 x 8 or 16 x 4`: tasks of a step times rollouts of a task."""
        kinds = "(?:rollouts|samples|episodes|completions|generations)"
        pair = rf"(?<![\w.])(\d+) ?(?:tasks?|prompts?|groups?)? ?(?:x|×|by|\*) ?(\d+)(?: ?{kinds}(?: each)?)?(?![\w.])"
        total = rf"(?:with |at |of |for )?(\d+) {kinds}(?: (?:per|a|each) (?:step|batch))?(?: in total)?"
        found = [(int(a), int(b)) for a, b in re.findall(pair, self.words.text)]
        if len(found) < 2 or not re.search(r"rollout|task|prompt|group|sample|episode|completion", self.words.text):
            return {}
        rest = re.sub(pair, " , ", self.words.text)
        if any(a * b != int(each) for each in re.findall(total, rest) for a, b in found) or len(set(found)) < len(
            found
        ):
            self.stop("The splits do not come to the total that the topic gives, or one is named twice.")
        self._rest(re.sub(rf"\b(?:splits?|divisions?)\b|{total}", " ", rest), {"tasks_per_step", "group_size"})
        return {f"{a}x{b}": {"tasks_per_step": a, "group_size": b} for a, b in found}

    def _part(self, text: str) -> None:
        self._name_unused()
        self._load(text)
        self._mark("on", "default", "base")
        self._motions()

    def _rest(self, text: str, own: set[str]) -> None:
        """What stands around the arms: settings of all of them, and a metric."""
        self._part(text)
        for level in [each for each in self.levels if each.factor.name not in own]:
            self.put("steps" if level.factor.name == "steps" else f"set.{level.factor.name}", level.value, "topic")
        self.sided = False
        self._claim([])


def _is_scenery(level: Level) -> bool:
    """The usual choice, as in `does GRPO learn faster …`, or what the tasks are."""
    usual = level.value == level.factor.default and level.factor.off is None
    return level.factor.type == "data" or (level.factor.type == "choice" and (usual or level.factor.proper))


def on_level(factor: Factor) -> Scalar:
    """A level at which it does something: the default, another choice, or a tenth of its range."""
    if factor.default != off_level(factor) and factor.name not in SWITCHED_ON:
        return factor.default
    if factor.type in ("choice", "bool"):
        return next((each for each in factor.choices if each != factor.off), True)
    return as_level(factor, SWITCHED_ON.get(factor.name) or _round(factor, (factor.high or 1.0) / 10))


def moved_from_default(factor: Factor, way: int) -> Scalar | None:
    """A level clearly above or below the default: twice it for counts, four times on a wide scale, else half the way to the bound."""
    if factor.type not in ("int", "float") or isinstance(factor.default, str):
        return None
    default, bound = float(factor.default), factor.high if way > 0 else factor.low
    wide = factor.scale == "log" or (default > 0 and factor.high is not None and factor.high > 20 * default)
    level = default * (2.0 if factor.type == "int" else 4.0) ** way
    if not wide and factor.type == "float":
        level = default + way if bound is None else (default + bound) / 2
    elif bound is not None:
        level = min(level, bound) if way > 0 else max(level, bound)
    moved = _round(factor, level)
    return None if (moved - default) * way <= 0 or level_problem(factor, moved) else moved


def _round(factor: Factor, level: float) -> float | int:
    return max(1, round(level)) if factor.type == "int" else float(f"{level:.1e}")


def _spread(factor: Factor) -> list[Scalar]:
    """Levels on both sides of the default, or from it to the end of its range."""
    sides = [each for way in (-1, 1) if (each := moved_from_default(factor, way)) is not None]
    if factor.default or factor.high is None:
        return sides
    lowest = 1.0 if factor.type == "int" else factor.high / 100
    return list(dict.fromkeys(_round(factor, lowest * (factor.high / lowest) ** (n / 2)) for n in range(3)))
