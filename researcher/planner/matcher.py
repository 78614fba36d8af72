"""Plans without an LLM: a topic in the field's words becomes a draft of a `StudySpec`.

Every word of the topic is used, or has no content, or stops the matcher: then a person gets the draft and the words that were not
understood. Two readings, a second metric or a number without a place stop it too. It declines what names nothing to vary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from foundation.strict import explain
from researcher.design.planning import plan_of
from researcher.instruments.catalogue import InstrumentFolder, level_problem
from researcher.instruments.instrument import Factor, Scalar
from researcher.instruments.levels import as_level, off_level
from researcher.planner.matcher_words import SCREENED, SWITCHED_ON, Item, Items, Said, choose_instrument, items, said
from researcher.planner.outcome import Declined, NeedsEdit, Outcome, Proposed, TopicRequest
from researcher.refusals import PlanningRefused
from researcher.study.draft import Draft, Source
from researcher.study.spec import StudySpec

FEWEST_RACED = 4
"""Treatments against one baseline from which a race is cheaper than all comparisons."""
_SIDES = ("vs", "than", "beat", "lose", "equal")
_CLAIMS = {
    "best": 1,
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
_LEADS = ("list", "to", "from", "better", "worse", "faster", "slower", *_SIDES)
_APART = ("on", "for", "in", "with", "when", "using", "under", "by")


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
        self.items = items(text, self.folder.instrument)
        self.levels, self.used, self.moved = [], set(), {}
        title = re.findall(r"\w+", self.folder.instrument.title.lower())
        for i, item in enumerate(self.items):
            before, behind = self.items.at(i - 1), self.items.at(i + 1)
            if item.text in title and behind.isa("instrument"):
                self.used.add(i)  # `small sums` are no smaller ones
            beside = (behind.isa("factor") and not behind.led) or (before.isa("factor") and not item.led)
            if item.isa("instrument") and item.text != item.what and beside and self.folder.instrument.roles:
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

    def _name_unused(self) -> None:
        for i, item in enumerate(self.items):
            if i not in self.used:
                self.stop(f"{item.text!r} is not understood here.")

    def _draft_levels(self) -> None:
        """Something to edit, of a topic that stopped: what has several levels is compared."""
        self.used |= {i for i, item in enumerate(self.items) if not item.isa("unknown")}
        names = dict.fromkeys(level.factor.name for level in self.levels)
        for name in [] if "compare" in self.fields or "arms" in self.fields else names:
            levels = self._of(name)
            if len(levels) > 1:
                self._put_compare(levels[0], levels[1:])
            else:
                self._put_setting(levels[0])

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
                        k for k in (j, i - 1, i + 1) if found.at(k).isa("factor") and found[k].what == found[j].what
                    }
        for listed in (True, False):
            for i in [*numbers, *numbers[::-1]]:
                anew = (
                    listed and found.at(i - 1).isa("mark") and not found.at(i - 2).isa("number") and self._bare(filled)
                )
                ways = [each for way in (-1, 1) if (each := self._along(i, way, at, filled)) and self._takes(each, i)]
                if i not in at and ways and not anew:
                    if ways[0] != ways[-1]:
                        raise _Stop(f"{found[i].text!r} may be a level of {ways[0].name} or of {ways[-1].name}.")
                    at[i] = ways[0]
            owners = {factor.name for factor in at.values()}
            lacking = self._bare(filled) or owners
            for i in [i for i in numbers if len(lacking) == 1 and i not in at]:
                factor = self.factors[next(iter(lacking))]
                at |= {i: factor} if not listed or self._takes(factor, i) else {}
        for i, factor in at.items():
            name, listed = found.at(i + 1), found.at(i + 2).text in (":", "(", ",") and at.get(i + 3) == factor
            if name.isa("factor") and name.text.endswith("s") and listed and not found.at(i + 4).isa("factor"):
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
            if (
                not item.isa(*_PASSED, "mark")
                or (item.isa("mark") and ends)
                or (way > 0 and item.led not in ("", "of"))
            ):
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
            if found[i].isa("default") and (
                target.isa("number") or numbered or (factor and target.value == factor.default)
            ):
                self.used.add(i)  # `the default of 8`, `vanilla GRPO`
                continue
            value = None if factor is None else factor.default if found[i].isa("default") else off_level(factor)
            if factor is None or value is None:
                continue
            if numbered and found[i].isa("off"):
                raise _Stop(f"{found[i].text!r} before a level of {factor.name} can be read in two ways.")
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
        return item.isa("level") and _is_scenery(Level(self.factors[item.what], item.value))

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
                raise _Stop(f"The topic has {name} go up and down.")
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

    # -- which design ----------------------------------------------------------------------------------------------

    def _design(self) -> None:
        self._motions()
        names = list(dict.fromkeys(level.factor.name for level in self.levels))
        varied = [name for name in names if len(self._of(name)) > 1]
        mentioned = dict.fromkeys(item.what for item in self.items if item.isa("factor"))
        bare = [name for name in mentioned if name not in names]
        named = [level for level in self.levels if not _is_scenery(level)]
        why = self.words.text.strip().startswith("why")
        self._mark("then", "balance", "interact", "weigh", "open", "far", "too")
        has, models, asked = self.items.has, self.words.models, self._asked()
        if len(models) == 1:
            self.put("model", models[0], "topic")
        if len(models) > 1:
            if varied or bare:
                raise _Stop(f"The topic compares models, and {(varied + bare)[0]} too.")
            self.sided = has(*_SIDES)
            self.put("model", models[::-1] if self.sided else models, "topic")
            self._mark(*_SIDES, "from", "to")
            self._finish([], [])
        elif not (named or bare or has("open", "weigh")) or (why and not varied):
            unknown = ", ".join(dict.fromkeys(item.text for item in self.items if item.isa("unknown")))
            self.declined = "The topic names nothing that can be varied and compared here."
            self.declined += f" Not understood: {unknown}." if unknown else ""
        elif not (varied or bare or asked or has("open", "weigh")):
            raise _Stop("The topic gives settings, and does not say what is compared.")
        elif has("then"):
            self._sequence(varied)
        elif len(varied) == 1 and not bare:
            self._compare(self._of(varied[0]))
        elif len(varied) > 1 and not bare and not has("interact"):
            self._bundles(varied)
        elif (varied and not has("interact")) or (bare and asked):
            raise _Stop(
                f"The topic names {bare[0]} without a level beside {(varied + asked)[0]}: say which is compared."
            )
        elif len(varied + bare) > 1 or not (bare or asked):
            self._explore(varied + bare)
        elif bare:
            self._move(self.factors[bare[0]])
        elif len(asked) == 1:
            self._against_default(self._of(asked[0])[0])
        else:
            raise _Stop(f"The topic names one level each of {' and '.join(asked)}: say which is compared.")

    def _asked(self) -> list[str]:
        """Factors with one level that is no setting: not behind a preposition, not of the task, no usual choice."""
        single = [level for level in self.levels if len(self._of(level.factor.name)) == 1 and not _is_scenery(level)]
        return list(dict.fromkeys(level.factor.name for level in single if not self._is_setting(level)))

    def _is_setting(self, level: Level) -> bool:
        near = [self.items.at(level.at + d) for d in (-1, 0, 1)]
        own = [item for item in near if item is near[1] or (item.isa("factor") and item.what == level.factor.name)]
        of_task = near[2] in own and self.items.at(level.at + 2).isa("instrument")
        return of_task or any(item.led not in ("", "under", "as") for item in own)

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
        for n, (one, other) in enumerate(pairwise(levels), 1):
            between = ["to" if item.text == "->" else item.kind for item in found[one.at + 1 : other.at]]
            begun = way is not None or any(item.isa("from") for item in found[max(0, one.at - 2) : one.at])
            turned = "to" in between and (begun or any(item.text == "->" for item in found))
            sides = [*(kind for kind in between if kind in _SIDES), *["than"] * ("from" in between), *["to"] * turned]
            cuts += [(n, side) for side in sides[:1]]
        self._mark(*_SIDES, "from", "to", "between")
        ahead = any(found[i].isa("than", "vs") for i in range(levels[0].at))
        marked = any(kind != "vs" for _, kind in cuts)
        rest = found[levels[-1].at + 1 :]
        late = any(item.kind in _CLAIMS or (item.isa("factor") and item.what == name) for item in rest[1:])
        apart = late and any(item.text in ",:.?;" for item in rest) and not rest[0].isa("factor")
        self.sided = bool(ahead or way is not None or (cuts and (marked or not apart)))
        if ahead and not cuts:
            return self._agreeing(levels[1:], levels[:1], way)
        if len(cuts) == 1 and cuts[0][1] == "to":
            return self._agreeing(levels[cuts[0][0] :], levels[: cuts[0][0]], way)
        if way is not None and not marked:
            lowest = (min if way > 0 else max)(levels, key=lambda level: float(level.value))
            return [level for level in levels if level is not lowest], lowest
        if len(cuts) == 1 and (marked or cuts[0][0] == len(levels) - 1):
            return self._agreeing(levels[: cuts[0][0]], levels[cuts[0][0] :], way)
        if len(cuts) > 1 and marked:
            raise _Stop(f"The topic sets levels of {name} against each other in more than one way.")
        self.sided = False
        usual = self._usual(levels)
        return [level for level in levels if level is not usual], usual

    def _usual(self, levels: Sequence[Level]) -> Level:
        return next((level for level in levels if level.value == level.factor.default), levels[0])

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
        self._mark("from", "to")
        if self.items.has(*_SIDES):
            raise _Stop(f"The topic sets {factor.name}={level.value} against something that is no level of it.")
        other = on_level(factor) if level.value == off else factor.off
        other = factor.default if level.value != factor.default else other
        if other is None or other == level.value:
            raise _Stop(f"{factor.name}={level.value} is the default: name the level to compare it with.")
        baseline = Level(factor, other, source="topic" if other == factor.default else "planner")
        self._put_compare(self._agreeing([level], [baseline], self.moved.get(factor.name))[1], [level])
        self._finish([factor.name], [level])

    def _move(self, factor: Factor) -> None:
        """A factor without levels: the default against levels on the side that the topic says, or on both."""
        found, default, way, off = self.items, factor.default, self.moved.get(factor.name), off_level(factor)
        if found.has(*_SIDES):
            raise _Stop(f"The topic compares {factor.name} with something, and names no level of it.")
        values: list[Scalar] = []
        if factor.type in ("choice", "bool"):
            values = [not default] if factor.type == "bool" else [each for each in factor.choices if each != default]
        elif found.has("far", "open", "which", "best") or (way is None and default != off and factor.off is None):
            values = _spread(factor)
        elif way is None and default != off:
            default, values = factor.off or 0, [factor.default]
        elif way is None or (way > 0 and factor.name in SWITCHED_ON):
            values = [on_level(factor)]
        else:
            values = [each for each in [moved_from_default(factor, way)] if each is not None]
        if not values:
            raise _Stop(f"{factor.name} cannot go further: its default is at the end of its range.")
        levels = [Level(factor, value, source="planner") for value in values]
        self._put_compare(Level(factor, default), levels)
        self.sided = factor.type == "choice"
        self._finish([factor.name], levels if self.sided or len(levels) == 1 else [])

    def _explore(self, names: list[str]) -> None:
        """Two levels of each: whether they interact, or which of them matters."""
        asked = self.items.has("interact", "weigh", "open")
        if not asked and (self.items.has(*_SIDES) or not self.items.has("which", "best")):
            raise _Stop(f"The topic names {' and '.join(names)}, and not how they are compared.")
        settled = {level.factor.name for level in self.levels}
        for name in names or [name for name in SCREENED if name in self.factors and name not in settled]:
            factor, levels = self.factors[name], self._of(name)
            if len(levels) > 2:
                raise _Stop(f"{name} has {len(levels)} levels; where several factors are varied, each has two.")
            is_off = factor.default == off_level(factor)
            other = None if is_off else moved_from_default(factor, self.moved.get(name, 1))
            moved = Level(factor, on_level(factor) if other is None else other, source="planner")
            usual = self._usual(levels or [Level(factor, factor.default)])
            self._put_compare(usual, [each for each in levels if each is not usual] or [moved])
        self._mark(*_SIDES)
        self.put("design", "factorial" if self.items.has("interact") else "screen", "topic" if asked else "planner")
        self._finish(list(self.fields["compare"]), [])

    def _sequence(self, varied: list[str]) -> None:
        cut, order = self.items.places("then")[0], [self._of(name) for name in varied]
        order.sort(key=lambda levels: levels[0].at)
        parted = len(order) == 2 and order[0][-1].at < cut < order[1][0].at
        if not parted or self.items.has("interact"):
            raise _Stop("A sequence compares two factors one after the other, each with its own levels.")
        for levels in order:
            treatments, baseline = self._sides(levels)
            self._put_compare(baseline, treatments)
        self.put("design", "sequence", "topic")
        self.sided = False
        self._finish(varied, [])

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
            self._put_setting(Level(self.factors[name], first[name]))
        for label, arm in arms.items():
            self.put(f"arms.{label}", {name: value for name, value in arm.items() if name not in same}, "topic")

    def _put_setting(self, level: Level) -> None:
        name = level.factor.name
        self.put("steps" if name == "steps" else f"set.{name}", level.value, level.source)

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
            self._put_setting(level)
        self._claim(levels)

    def _claim(self, levels: Sequence[Level]) -> None:
        """The metric, and which way the treatments are said to move it."""
        found, instrument = self.items, self.folder.instrument
        chooses = found.has("which", "balance") or (not self.sided and found.has("best"))
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
        verbs = any(item.isa("better", "worse") and item.text not in ("better", "worse") for item in found)
        listed = [item.text for item in found[levels[0].at : levels[-1].at]] if len(levels) > 1 else []
        if found.has("equal"):
            self.put("claim", "equal", "topic")
        elif moves and not chooses and (self.sided or len(levels) == 1):
            self.put("claim", "increase" if moves.pop() > 0 else "decrease", "topic")
        elif moves and not chooses and listed and ("or" not in listed or verbs):
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
        self._mark("on", "default")
        self._motions()

    def _rest(self, text: str, own: set[str]) -> None:
        """What stands around the arms: settings of all of them, and a metric."""
        self._part(text)
        for level in [each for each in self.levels if each.factor.name not in own]:
            self._put_setting(level)
        self.sided = False
        self._claim([])


def _is_scenery(level: Level) -> bool:
    """The usual choice, as in `does GRPO learn faster …`, or what the tasks are."""
    usual = level.value == level.factor.default and level.factor.off is None
    return level.factor.type == "data" or (level.factor.type == "choice" and (usual or level.factor.proper))


def on_level(factor: Factor) -> Scalar:
    """A level at which it does something: the default, another choice, or a usual one."""
    if factor.default != off_level(factor) and factor.name not in SWITCHED_ON:
        return factor.default
    if factor.type in ("choice", "bool"):
        return next((each for each in factor.choices if each != factor.off), True)
    return as_level(factor, SWITCHED_ON.get(factor.name, 1 if factor.type == "int" else 0.1))


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


def _spread(factor: Factor) -> list[Scalar]:
    """Levels on both sides of the default, or a few above none."""
    if factor.default:
        return [each for way in (-1, 1) if (each := moved_from_default(factor, way)) is not None]
    levels = [as_level(factor, float(on_level(factor)) * 4**n) for n in range(3)]
    return [level for level in levels if level_problem(factor, level) is None]
