"""Arms and hypotheses of a question: one factor over its levels, two in sequence, several crossed, or bundles of settings.

Crossed factors have two levels each. Up to three run in a full factorial; four and more in a half fraction, the last factor's
level following from the others' (its sign is the product of theirs), so that main effects stay clear of interactions of two.
A side of a main effect or interaction is the mean over the arms with one sign; an interaction is half the difference between
the effect of one factor at the two levels of the other, as experimenters count it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence

from researcher.design.question import Question, Varied
from researcher.design.screening import screen_runs
from researcher.design.stages import ALPHA
from researcher.design.trend import trend_of
from researcher.instruments.instrument import Factor, Scalar
from researcher.instruments.levels import level_text, number_text
from researcher.study.plan import Arm, Hypothesis

CROSSED = ("factorial", "screen")
"""Designs whose arms set every factor to one of two levels."""
FULL_UP_TO = 3
_BETWEEN = 3
"""Arms of the fine grid in each gap between two neighbouring levels."""
_LONGEST_TEXT, _BEGINNING = 60, 40
"""Letters of a level in an arm's name, and those of one that is longer."""
_Signs = tuple[int, ...]
_Named = tuple[str, Scalar]
"""A level after its name."""


def arms_of(question: Question) -> tuple[Arm, ...]:
    """One arm per level, named after it (`names_of`); equal levels make arms with different names (a null study)."""
    if question.bundles:
        return tuple(
            Arm(name=name, levels={factor.name: level for factor, level in settings})
            for name, settings in question.bundles.items()
        )
    if question.spec.design in CROSSED:
        sides = [_named(each.factor, each.levels) for each in question.varied]
        return tuple(
            _joined(question, *(two[sign > 0] for two, sign in zip(sides, run, strict=True)))
            for run in _design(question)
        )
    if question.spec.design == "sequence":
        return tuple({arm.name: arm for _, group in groups_of(question) for arm in group}.values())
    (varied,) = question.varied
    named = zip(names_of(varied.factor, varied.levels), varied.levels, strict=True)
    return tuple(Arm(name=name, levels={varied.factor.name: level}) for name, level in named)


def arms_between(varied: Varied) -> tuple[Arm, ...]:
    """The grid on which Optuna may try: between neighbouring levels, on the factor's own scale. Empty for what is no number."""
    factor = varied.factor
    levels = sorted({float(level) for level in varied.levels if not isinstance(level, bool | str)})
    if factor.type not in ("int", "float") or len(levels) < 2:
        return ()
    found: dict[str, Arm] = {}
    for low, high in itertools.pairwise(levels):
        for part in range(1, _BETWEEN + 1):
            share = part / (_BETWEEN + 1)
            logs = factor.scale == "log" and low > 0
            value = low * (high / low) ** share if logs else low + (high - low) * share
            level: Scalar = round(value) if factor.type == "int" else float(number_text(float(f"{value:.3g}")))
            if level not in levels:
                (name,) = names_of(factor, (level,))
                found[name] = Arm(name=name, levels={factor.name: level})
    return tuple(found.values())


def hypotheses_of(question: Question, arms: Sequence[Arm]) -> tuple[Hypothesis, ...]:
    """One for each treatment against the baseline; of crossed factors, main effects and interactions of two, of screened ones main
    effects alone; of a balance, each level against the next smaller one; of a trend, the change over its levels."""
    if question.spec.design in CROSSED:
        return _crossed_hypotheses(question, arms)
    if question.spec.design == "trend":
        return (trend_of(question, arms, hypothesis_of(question, 1, question.factors[0].name, arms[-1], arms[0])),)
    if question.spec.design == "sequence":
        pairs = [(factor.name, arm, group[0]) for factor, group in groups_of(question) for arm in group[1:]]
    elif question.bundles:
        pairs = [(_differing(arm, arms[0]), arm, arms[0]) for arm in arms[1:]]
    elif question.spec.design == "balance":
        pairs = [(question.factors[0].name, larger, smaller) for smaller, larger in itertools.pairwise(arms)]
    else:
        pairs = [(question.factors[0].name, arm, arms[0]) for arm in arms[1:]]
    return tuple(hypothesis_of(question, number, *pair) for number, pair in enumerate(pairs, start=1))


def _differing(arm: Arm, baseline: Arm) -> str:
    """The factors in which a bundle differs from the baseline's, joined by ` + `."""
    names = [*arm.levels, *(name for name in baseline.levels if name not in arm.levels)]
    return " + ".join(name for name in names if arm.levels.get(name) != baseline.levels.get(name)) or "nothing"


def groups_of(question: Question) -> list[tuple[Factor, tuple[Arm, ...]]]:
    """What a study in sequence compares: the first factor's arms, and at each of its levels the second's; baselines first.

    While the first is compared, the second stands at its baseline.
    """
    one, two = question.varied
    first, second = _named(one.factor, one.levels), _named(two.factor, two.levels)
    found = [(one.factor, tuple(_joined(question, each, second[0]) for each in first))]
    for each in first:
        found.append((two.factor, tuple(_joined(question, each, own) for own in second)))
    return found


def _design(question: Question) -> list[_Signs]:
    factors = len(question.varied)
    return screen_runs(factors) if question.spec.design == "screen" else runs(factors)


def runs(factors: int) -> list[_Signs]:
    """The design's runs, as signs: -1 for a factor's first level, 1 for its second."""
    if factors <= FULL_UP_TO:
        return list(itertools.product((-1, 1), repeat=factors))
    return [(*signs, math.prod(signs)) for signs in itertools.product((-1, 1), repeat=factors - 1)]


def names_of(factor: Factor, levels: Sequence[Scalar]) -> tuple[str, ...]:
    """`FACTOR=LEVEL` for each level, no two alike.

    Levels that differ and would share a name have their file's folder in it, or else their hash. Equal ones are run `-again`.
    """
    apart = _told_by(factor, tuple(dict.fromkeys(levels)))
    found: list[str] = []
    for level in levels:
        own = apart[level]
        found.append(_again(own, {*found, *apart.values()}) if own in found else own)
    return tuple(found)


def _again(name: str, taken: Collection[str]) -> str:
    further = (f"{name}-again-{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([f"{name}-again"], further) if each not in taken)


def _told_by(factor: Factor, levels: Sequence[Scalar]) -> dict[Scalar, str]:
    """The shortest names that tell these levels apart."""
    found = {level: _name(factor, level) for level in levels}
    for longer in (_with_folder, _with_hash):
        shared = Counter(found.values())
        found = {level: longer(factor, level) if shared[name] > 1 else name for level, name in found.items()}
    return found


def _name(factor: Factor, level: Scalar, *, folders: int = 0) -> str:
    """A long text is told by its beginning and its hash, and stands whole with the arm."""
    text = level_text(level)
    if factor.type == "data":  # the file's own name: its whole path and digest are the level, and stand with the arm
        text = "/".join(text.partition("#")[0].split("/")[-1 - folders :])
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_BEGINNING].rstrip()}-{_hash(text)}"
    return f"{factor.name}={text}".replace(" ", "-").replace("/", "-")


def _with_folder(factor: Factor, level: Scalar) -> str:
    return _name(factor, level, folders=1)


def _with_hash(factor: Factor, level: Scalar) -> str:
    return f"{_name(factor, level)}-{_hash(repr(level))}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def hypothesis_of(question: Question, number: int, factor: str, treatment: Arm, baseline: Arm) -> Hypothesis:
    """That the treatment's metric lies above the baseline's, or below it, as the spec claims."""
    metric = question.metric
    said = f"{treatment.name} has {_more(question)} {metric.name} than {baseline.name}{_assumed(question)}"
    if question.spec.claim == "equal":
        said = f"{treatment.name} and {baseline.name} have the same {metric.name}, within {number_text(metric.margin)}"
    return Hypothesis(
        id=f"H{number}",
        statement=said,
        factor=factor,
        baseline=baseline.name,
        treatment=treatment.name,
        metric=metric.name,
        direction=question.direction,
        direction_assumed=question.direction_assumed,
        margin=metric.margin,
        alpha=ALPHA,
    )


def _assumed(question: Question) -> str:
    return " (no direction is claimed; this one is the better)" if question.direction_assumed else ""


def _named(factor: Factor, levels: Sequence[Scalar]) -> list[_Named]:
    return list(zip(names_of(factor, levels), levels, strict=True))


def _joined(question: Question, *parts: _Named) -> Arm:
    """An arm that sets several factors, in the spec's order."""
    levels = {factor.name: level for factor, (_, level) in zip(question.factors, parts, strict=True)}
    return Arm(name=",".join(name for name, _ in parts), levels=levels)


def _crossed_hypotheses(question: Question, arms: Sequence[Arm]) -> tuple[Hypothesis, ...]:
    """Main effects are claimed as the spec says; nobody claims an interaction, nor anything of a screen."""
    design, screens = _design(question), question.spec.design == "screen"
    found: list[Hypothesis] = []
    for place, each in enumerate(question.varied):
        baseline, treatment = names_of(each.factor, each.levels)
        words = (
            f"{treatment} has {_more(question)} {question.metric.name} than {baseline}, over all levels of the others"
            f"{_assumed(question)}"
        )
        if screens:
            words = (
                f"{treatment} changes {question.metric.name} against {baseline}, over the runs of the screen (explored)"
            )
        signs = [run[place] for run in design]
        labels = (baseline, treatment)
        found.append(
            _contrast(
                question,
                arms,
                signs,
                len(found) + 1,
                each.factor.name,
                labels,
                words,
                screens or question.direction_assumed,
            )
        )
    for one, other in [] if screens else _separate_pairs(len(question.varied)):
        names = [question.varied[place].factor.name for place in (one, other)]
        at = names_of(question.varied[other].factor, question.varied[other].levels)[1]
        words = (
            f"the effect of {names[0]} on {question.metric.name} is {'larger' if question.direction == 'increase' else 'smaller'} "
            f"at {at} (interaction; no direction is claimed)"
        )
        signs = [run[one] * run[other] for run in design]
        label = " x ".join(names)
        labels = (f"{label}: unlike", f"{label}: like")
        found.append(_contrast(question, arms, signs, len(found) + 1, label, labels, words, True))
    return tuple(found)


def _separate_pairs(factors: int) -> list[tuple[int, int]]:
    """Pairs of factors whose interaction is no other's: in a half fraction of four, none is."""
    return list(itertools.combinations(range(factors), 2)) if factors <= FULL_UP_TO or factors > 4 else []


def _contrast(
    question: Question,
    arms: Sequence[Arm],
    signs: Sequence[int],
    number: int,
    factor: str,
    labels: tuple[str, str],
    words: str,
    assumed: bool,
) -> Hypothesis:
    """The mean over the arms with sign 1 against the mean over the others."""
    return Hypothesis(
        id=f"H{number}",
        statement=words,
        factor=factor,
        baseline=labels[0],
        treatment=labels[1],
        metric=question.metric.name,
        direction=question.direction,
        direction_assumed=assumed,
        margin=question.metric.margin,
        alpha=ALPHA,
        baseline_arms=tuple(arm.name for arm, sign in zip(arms, signs, strict=True) if sign < 0),
        treatment_arms=tuple(arm.name for arm, sign in zip(arms, signs, strict=True) if sign > 0),
    )


def _more(question: Question) -> str:
    return "a higher" if question.direction == "increase" else "a lower"
