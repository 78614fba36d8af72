"""Plans without an LLM: turns a topic, worded as practitioners word it, into a draft of a `StudySpec`.

The matcher must use every word of the topic, or know that the word has no content. Otherwise it stops, and a person gets the draft
and the words that were not understood. It also stops at an ambiguous topic, a second metric or a number that belongs to no factor.
It declines topics that name nothing to vary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from researcher.instruments.instrument import Factor, Scalar
from researcher.instruments.levels import moved_level, off_level, on_level
from researcher.planner.matcher_words import CLAIMS, SIDES, Level, Levels, TwoReadings, choose_instrument, said, table
from researcher.planner.outcome import Declined, NeedsEdit, Outcome, Proposed, TopicRequest
from researcher.planner.proposals import judged
from researcher.study.draft import Draft, Source, edited

FEWEST_RACED = 4
"""Minimum number of treatments against one baseline at which a race is cheaper than comparing them all."""


class Matcher:
    """The built-in planner, which needs no API key."""

    name = "builtin"

    async def propose(self, request: TopicRequest) -> Outcome:
        wanted = request.given.get("instrument")
        known = [each for each in request.instruments if wanted in (None, each.instrument.name, str(each.path))]
        if not known or not request.topic.strip():
            return Declined(reason="There is no topic." if known else f"There is no instrument {wanted or 'to ask'}.")
        words = said(request.topic)
        chosen, named = choose_instrument(words.text, known)
        study = _Study(instrument=chosen[0].instrument, topic=request.topic, words=words)
        study.put("instrument", chosen[0].instrument.name, "topic" if named else "default")
        if len(chosen) > 1:
            names = " and ".join(each.instrument.name for each in chosen)
            study.stop(f"The topic fits {names}; choose one with --instrument.")
        study.read()
        return study.outcome(request)


@dataclass(slots=True, kw_only=True)
class _Study(Levels):
    topic: str
    fields: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    sided: bool = False
    """Whether the topic says which levels are treatments."""
    declined: str = ""

    def put(self, path: str, value: Any, source: Source) -> None:
        *above, last = path.split(".")
        at = self.fields
        for name in above:
            at = at.setdefault(name, {})
        at[last] = value
        self.sources[path] = source

    def read(self) -> None:
        self.put("question", " ".join(self.topic.split()), "topic")
        self.problems += self.words.problems
        for path, value in self.words.bounds.items():
            self.put(path, value, "topic")
        try:
            if not self._listed_arms():
                self._load(self.words.text)
                self._design()
        except TwoReadings as stop:
            self.stop(str(stop))
            self.used |= {i for i, item in enumerate(self.items) if not item.isa("unknown")}
            for name in dict.fromkeys(level.factor.name for level in self.levels if "compare" not in self.fields):
                baseline, *levels = self._of(name)
                if levels:  # there is a draft to edit
                    self._put_compare(baseline, levels)
        self._name_unused()

    def outcome(self, request: TopicRequest) -> Outcome:
        whole = request.given.keys() & {"compare", "arms"}
        if self.declined and not whole:
            names = [item.what for item in self.items if item.isa("factor", "level", "metric")]
            nearest = dict.fromkeys([*names, *table()["shared"]["screen"]])
            return Declined(reason=self.declined, nearest=tuple(nearest)[:5])
        if whole:
            self.fields.pop("design", None)
        draft = Draft(fields=self.fields, sources=self.sources, author=Matcher.name)
        draft = edited(draft, request.given)
        verdict = judged(draft.fields, request)
        if verdict.spec is None:
            self.problems += [f"{each}." for each in verdict.problems]
        problems = self.problems or verdict.problems
        return NeedsEdit(draft=draft, problems=tuple(problems)) if problems else Proposed(draft=draft)

    def _name_unused(self) -> None:
        for item in [item for i, item in enumerate(self.items) if i not in self.used]:
            self.stop(f"{item.text!r} is not understood here.")

    def _design(self) -> None:
        self._motions()
        settled = dict.fromkeys(level.factor.name for level in self.levels)
        varied = [name for name in settled if len(self._of(name)) > 1]
        bare = list(dict.fromkeys(item.what for item in self.items if item.isa("factor") and item.what not in settled))
        why = self.words.text.strip().startswith("why")
        self._mark("then", "interact", "open", "far", "to")
        has, models, asked = self.items.places, self.words.models, self._asked()
        names = varied + bare or asked
        if len(models) == 1:
            self.put("model", models[0], "topic")
        if len(models) > 1:
            if varied or bare:
                raise TwoReadings(f"The topic compares both models and {(varied + bare)[0]}; compare one of them.")
            self.sided = bool(has(*SIDES))
            self.put("model", models[::-1] if self.sided else models, "topic")
            self._vary([], "compare")
        elif not (bare or has("open") or not all(map(self._is_scenery, self.levels))) or (why and not varied):
            unknown = ", ".join(dict.fromkeys(item.text for item in self.items if item.isa("unknown")))
            self.declined = (
                f"The topic names nothing that can be varied here. Not understood: {unknown or 'what to compare'}."
            )
        elif has("then"):
            order = sorted(varied, key=lambda name: self._of(name)[0].at)
            first = (
                [self._of(order[0])[-1].at, self.items.places("then")[0], self._of(order[-1])[0].at] if order else []
            )
            if len(order) != 2 or first != sorted(first) or has("interact"):
                raise TwoReadings("A sequence compares two factors, one after the other; name the levels of each.")
            self._vary(order, "sequence")
        elif len(varied) > 1 and not bare and not has("interact"):
            self._bundles(varied)
        elif (
            (varied and bare and not has("interact"))
            or (bare and asked)
            or (names == asked and len(asked) != 1 and not (has("open") and not asked))
        ):
            raise TwoReadings(
                f"Say which of these to compare: {', '.join(names + asked) or 'only settings are named'}."
            )
        elif len(names) == 1:
            if not varied and has(*SIDES):
                raise TwoReadings(f"The topic compares {names[0]} with something that is not one of its levels.")
            self._vary(names, "compare")
        elif any(len(self._of(name)) > 2 for name in names) or not has("interact", "open", "which", "best"):
            raise TwoReadings(f"Name two levels each of {' and '.join(names)}, and say how to compare them.")
        else:
            screened = [each for each in table()["shared"]["screen"] if each in self.factors and each not in settled]
            self._vary(names or screened, "factorial" if has("interact") else "screen")

    def _asked(self) -> list[str]:
        """Return the factors that the topic asks about with a single level. Skips levels that follow a preposition, describe the
        task or are the usual choice.
        """
        found = list[str]()
        for level in [each for each in self.levels if not self._is_scenery(each)]:
            name, near = level.factor.name, [self.items.at(level.at + d) for d in (-1, 0, 1)]
            own = [item for item in near if item is near[1] or (item.isa("factor") and item.what == name)]
            of_task = near[2] in own and self.items.at(level.at + 2).isa("instrument")
            alone = len(self._of(name)) == 1 and name not in found
            found += [name] * (alone and not of_task and all(item.led in ("", "under", "as") for item in own))
        return found

    def _vary(self, names: Sequence[str], design: str) -> None:
        """Compare levels of these factors, and give every arm the same level of all other factors."""
        for name in names:
            treatments, baseline = self._contrast(name)
            self._put_compare(baseline, treatments[-1:] if design in ("factorial", "screen") else treatments)
        if design != "compare":
            self.put("design", design, "topic")
        self._mark(*SIDES)
        self.sided = self.sided and len(names) < 2
        compared = [level.at for level in self.levels if level.factor.name in names]
        opposed = any(compared[:1] < [i] for i in self.items.places(*SIDES))
        for level in [each for each in self.levels if each.factor.name not in names]:
            name = level.factor.name
            usual = level.value == level.factor.default or (name.startswith("lora_") and "parameters" in names)
            inside = opposed and not usual and compared and compared[0] <= level.at <= compared[-1]
            if inside or level.source == "planner":
                self.stop(f"{name}={level.value} may belong to one side only.")
            self._put_setting(level)
        self._claim()

    def _contrast(self, name: str) -> tuple[list[Level], Level]:
        """Return the treatments and the baseline of a factor. Levels that the topic does not give are chosen here."""
        levels, factor = self._of(name), self.factors[name]
        way = self.moved.get(name) if factor.type in ("int", "float") else None
        values = [level.value for level in self.levels if level.factor.name == name and level.source == "topic"]
        if len(values) > len(set(values)):
            raise TwoReadings(f"The topic names a level of {name} twice.")
        if not levels:
            return self._moved(factor)
        baselines = self._baselines(levels, way) if len(levels) > 1 else [self._default(levels[0])]
        treatments = [level for level in levels if level not in baselines]
        if len(baselines) > 1:
            raise TwoReadings(f"The topic compares {name} with several baselines.")
        if way and any((float(each.value) - float(baselines[0].value)) * way < 0 for each in treatments):
            raise TwoReadings(f"The topic moves {name} in one direction, but its levels go in the other.")
        return treatments, baselines[0]

    def _put_compare(self, baseline: Level, treatments: Sequence[Level]) -> None:
        source: Source = "planner" if any(level.source == "planner" for level in (baseline, *treatments)) else "topic"
        compared = {"baseline": baseline.value, "levels": [level.value for level in treatments]}
        self.put(f"compare.{baseline.factor.name}", compared, source)
        if len(treatments) >= FEWEST_RACED:
            self.put("design", "race", "planner")

    def _baselines(self, levels: list[Level], way: int | None) -> list[Level]:
        between = [[item.kind for item in self.items[one.at + 1 : other.at]] for one, other in pairwise(levels)]
        cuts = [n for n, kinds in enumerate(between, 1) if any(kind in SIDES for kind in kinds)]
        marked = any(kind in SIDES and kind != "vs" for kinds in between for kind in kinds)
        dashed = any(item.text == "-" for item in self.items[levels[0].at : levels[-1].at])
        if len(levels) == 2 and not way and not cuts and (dashed or "to" in between[0]):
            raise TwoReadings(f"{levels[0].factor.name} is given as a range: name the levels to compare.")
        self.sided = True
        ahead = any(item.isa("than", "vs") for item in self.items[: levels[0].at])
        if not cuts and (ahead or (way and "to" in between[0])):
            return levels[:1]
        if way and not marked:
            return [(min if way > 0 else max)(levels, key=lambda level: float(level.value))]
        if len(cuts) == 1 and (marked or cuts[0] == len(levels) - 1):
            # in `A vs B: is it faster?` either may be meant
            self.sided = marked or not any(item.text in ",:.;(" for item in self.items[levels[-1].at + 1 :])
            return levels[cuts[0] :]
        if len(cuts) > 1 and marked:
            raise TwoReadings(f"The topic compares the levels of {levels[0].factor.name} in more than one way.")
        self.sided = False
        return [next((level for level in levels if level.value == level.factor.default), levels[0])]

    def _default(self, level: Level) -> Level:
        """Return the level to compare a single level with: the default or, if the level is the default, the level that switches the
        factor off or on.
        """
        factor = level.factor
        other = on_level(factor) if level.value == off_level(factor) else factor.off
        other = factor.default if level.value != factor.default else other
        if other is None or other == level.value:
            raise TwoReadings(f"{factor.name}={level.value} is the default: name the level to compare it with.")
        self.sided = True
        return Level(factor, other, source="topic" if other == factor.default else "planner")

    def _moved(self, factor: Factor) -> tuple[list[Level], Level]:
        """Compare the default with a level in the direction that the topic names, or with one in each direction."""
        default, way = factor.default, self.moved.get(factor.name)
        both = self.items.places("far", "open", "which", "best", "interact")
        values: list[Scalar | None] = []
        if (
            default != off_level(factor)
            and (factor.off is not None or factor.type == "bool")
            and way is None
            and not both
        ):
            default, values = factor.off or False, [default]  # `does clipping help`, where it is on: against none
        elif factor.type in ("choice", "bool"):
            values = [each for each in factor.choices or (False, True) if each != default]
        else:
            values = [moved_level(factor, each) for each in ((-1, 1) if both or way is None else (way,))]
        levels = [Level(factor, value, source="planner") for value in values if value is not None]
        self.sided = factor.type == "choice" or len(levels) == 1
        return levels, Level(factor, default)

    def _bundles(self, varied: list[str]) -> None:
        """Read bundles such as `GRPO at lr 1e-5 against RLOO at lr 2e-5`."""
        cuts = self.items.places(*SIDES) or [0]
        sides = [[level for level in self.levels if (level.at < cuts[0]) is early] for early in (False, True)]
        base, other = ({level.factor.name: level.value for level in side} for side in sides)
        if len(cuts) > 1 or base.keys() != other.keys() or len(base) + len(other) < len(self.levels):
            both = " and ".join(varied)
            raise TwoReadings(
                f"The topic varies {both}: ask about one of them, ask whether they interact, or name the arms."
            )
        self.used.add(cuts[0])
        self.put("arms.baseline", base, "topic")
        self.put("arms.treatment", other, "topic")
        self.sided = True
        self._claim()

    def _put_setting(self, level: Level) -> None:
        name = level.factor.name
        self.put("steps" if name == "steps" else f"set.{name}", level.value, level.source)

    def _claim(self) -> None:
        """Read the metric, and the direction in which the treatments are claimed to move it."""
        found, instrument = self.items, self.instrument
        chooses = found.places("which", "open", "interact", "then") or (not self.sided and found.places("best"))
        implied, signs, raw = list[str](), list[int](), list[int]()
        for i, item in enumerate(found):
            beside = "metric" in (found.at(i - 1).kind, found.at(i + 1).kind)
            if item.kind in CLAIMS:
                signs.append(CLAIMS[item.kind])
                word = "faster" if item.isa("faster", "slower") else item.text
                implied += [each.name for each in instrument.metrics if word in each.aliases][:1]
            elif item.isa("more", "less") and i not in self.used and beside:
                raw.append(1 if item.isa("more") else -1)
            elif item.isa("metric"):
                raw += [int(item.value)] * (item.value != 0)
            elif not item.isa("equal"):
                continue
            self.used.add(i)
        explicit = list(dict.fromkeys(item.what for item in found if item.isa("metric")))
        if explicit == ["wall_s"] or not found.places("faster", "slower"):
            implied = [] if explicit else implied
        decided = list(dict.fromkeys([*explicit, *implied]))
        if len(decided) > 1:
            self.stop(
                f"The topic names several metrics ({', '.join(decided)}), but only one can decide: leave the others out."
            )
        if decided:
            self.put("metric", decided[0], "topic" if explicit else "planner")
        name = [*decided, instrument.defaults.metric][0]
        rises = next(metric.direction for metric in instrument.metrics if metric.name == name) == "increase"
        moves = {*(sign if rises else -sign for sign in signs), *raw}
        if len(moves) > 1 or (moves and found.places("equal")):
            self.stop("The topic makes two claims.")
        if self.moved and not (moves or decided or chooses or found.places("equal", "far")):
            self.stop("The topic does not say which metric should change.")
        verbs = any(item.isa("better", "worse") and item.text not in ("better", "worse") for item in found)
        if found.places("equal"):
            self.put("claim", "equal", "topic")
        elif moves and not chooses and self.sided:
            self.put("claim", "increase" if moves.pop() > 0 else "decrease", "topic")
        elif moves and not chooses and (verbs or not any(item.text == "or" for item in found)):
            self.stop("The topic claims an effect but does not say which level it compares with which.")

    def _listed_arms(self) -> bool:
        """Read listed arms: `(a) GRPO, (b) with clip-higher 0.28, (c) with clip-higher and token-level loss`."""
        first, *parts = re.split(r"(?<!\w)\(?(?<![\d.])\b([a-h1-8])\)", self.words.text)
        labels, texts = parts[::2], parts[1::2]
        if len(labels) < 2 or "".join(labels) not in ("abcdefgh"[: len(labels)], "12345678"[: len(labels)]):
            return False
        texts[-1], behind = [*re.split(r"\.(?!\d)", texts[-1], maxsplit=1), ""][:2]
        arms, stated = dict[str, dict[str, Scalar]](), dict[str, Scalar]()
        for label, text in zip([*labels, "all"], [*texts, f"{first} . {behind}"], strict=True):
            self._name_unused()
            self._load(text)
            self._motions()
            stated |= (arm := {level.factor.name: level.value for level in self.levels})
            for name in [item.what for item in self.items if item.isa("factor") and item.what not in arm]:
                arm[name] = stated.get(name, self.factors[name].default)
                if name not in stated:
                    self.stop(f"{text.strip()!r} names {name} without a level.")
            arms[label] = arm
        for name, value in arms.pop("all").items():
            if not any(name in arm for arm in arms.values()):
                self._put_setting(Level(self.factors[name], value))
        for label, arm in arms.items():
            self.put(f"arms.{label}", arm, "topic")
        self._claim()
        return True
