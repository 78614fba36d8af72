"""Arms and hypotheses of a reading: one factor over its levels, two in sequence, or several crossed.

Crossed factors have two levels each. Up to three run in a full factorial; four and more in a half fraction, the last factor's
level following from the others' (its sign is the product of theirs), so that main effects stay clear of interactions of two.
A side of a main effect or interaction is the mean over the arms with one sign; an interaction is half the difference between
the effect of one factor at the two levels of the other, as experimenters count it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence

from researcher.models import Arm, Factor, Hypothesis, Scalar
from researcher.planner.levels import level_text
from researcher.planner.reading import Crossed, Reading
from researcher.planner.stages import ALPHA
from researcher.planner.wording import number_text

FULL_UP_TO = 3
_BETWEEN = 3
"""Arms of the fine grid in each gap between two neighbouring levels."""
_LONGEST_TEXT, _BEGINNING = 60, 40
"""Letters of a level in an arm's name, and those of one that is longer."""
_Signs = tuple[int, ...]


def arms_of(reading: Reading) -> tuple[Arm, ...]:
    """One arm per level, named after it; equal levels make arms with different names (a null study)."""
    if reading.crossed:
        return tuple(_crossed_arm(reading.crossed, signs) for signs in runs(len(reading.crossed)))
    if reading.following is not None:
        return tuple({arm.name: arm for _, group in groups_of(reading) for arm in group}.values())
    arms: list[Arm] = []
    for level in reading.levels:
        name = arm_name(reading.factor, level)
        if name in [arm.name for arm in arms]:
            name += "-again"
        arms.append(Arm(name=name, levels={reading.factor.name: level}))
    return tuple(arms)


def arms_between(reading: Reading) -> tuple[Arm, ...]:
    """The grid on which Optuna may try: between neighbouring levels, on the factor's own scale. Empty for what is no number."""
    factor = reading.factor
    levels = sorted({float(level) for level in reading.levels if not isinstance(level, bool | str)})
    if factor.type not in ("int", "float") or len(levels) < 2 or reading.crossed:
        return ()
    found: dict[str, Arm] = {}
    for low, high in itertools.pairwise(levels):
        for part in range(1, _BETWEEN + 1):
            share = part / (_BETWEEN + 1)
            logs = factor.scale == "log" and low > 0
            value = low * (high / low) ** share if logs else low + (high - low) * share
            level: Scalar = round(value) if factor.type == "int" else float(number_text(float(f"{value:.3g}")))
            if level not in levels:
                found[arm_name(factor, level)] = Arm(name=arm_name(factor, level), levels={factor.name: level})
    return tuple(found.values())


def hypotheses_of(reading: Reading, arms: Sequence[Arm]) -> tuple[Hypothesis, ...]:
    """One for each pair of treatment and baseline; of crossed factors, main effects and interactions of two."""
    if reading.crossed:
        return _crossed_hypotheses(reading, arms)
    if reading.following is None:
        pairs = [(reading.factor, arms[treatment], arms[baseline]) for treatment, baseline in reading.pairs]
    else:
        pairs = [(factor, arm, group[0]) for factor, group in groups_of(reading) for arm in group[1:]]
    return tuple(_hypothesis(reading, number, *pair) for number, pair in enumerate(pairs, start=1))


def groups_of(reading: Reading) -> list[tuple[Factor, tuple[Arm, ...]]]:
    """What a study in sequence compares: the first factor's arms, and at each of its levels the second's; baselines first."""
    second = reading.following
    if second is None:
        raise ValueError("the reading has one factor alone")
    found = [(reading.factor, tuple(_arm_of_two(reading, level, second.meanwhile) for level in reading.levels))]
    for level in reading.levels:
        found.append((second.factor, tuple(_arm_of_two(reading, level, own) for own in second.levels)))
    return found


def runs(factors: int) -> list[_Signs]:
    """The design's runs, as signs: -1 for a factor's first level, 1 for its second."""
    if factors <= FULL_UP_TO:
        return list(itertools.product((-1, 1), repeat=factors))
    return [(*signs, math.prod(signs)) for signs in itertools.product((-1, 1), repeat=factors - 1)]


def arm_name(factor: Factor, level: Scalar) -> str:
    """`FACTOR=LEVEL`; a long text is told by its beginning and its hash, and stands whole with the arm."""
    text = level_text(level)
    if factor.type == "data":  # the file's own name: its whole path and digest are the level, and stand with the arm
        text = text.partition("#")[0].rpartition("/")[2]
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_BEGINNING].rstrip()}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return f"{factor.name}={text}".replace(" ", "-").replace("/", "-")


def _hypothesis(reading: Reading, number: int, factor: Factor, treatment: Arm, baseline: Arm) -> Hypothesis:
    assumed = " (the direction is assumed: the topic claims none)" if reading.direction_assumed else ""
    return Hypothesis(
        id=f"H{number}",
        statement=f"{treatment.name} has {_more(reading)} {reading.metric.name} than {baseline.name}{assumed}",
        factor=factor.name,
        baseline=baseline.name,
        treatment=treatment.name,
        metric=reading.metric.name,
        direction=reading.direction,
        direction_assumed=reading.direction_assumed,
        margin=reading.metric.margin,
        alpha=ALPHA,
    )


def _arm_of_two(reading: Reading, first: Scalar, second: Scalar) -> Arm:
    levels = dict(zip((factor.name for factor in reading.factors), (first, second), strict=True))
    name = ",".join(arm_name(factor, levels[factor.name]) for factor in reading.factors)
    return Arm(name=name, levels=levels)


def _crossed_arm(crossed: Sequence[Crossed], signs: _Signs) -> Arm:
    levels = {each.factor.name: each.levels[sign > 0] for each, sign in zip(crossed, signs, strict=True)}
    name = ",".join(arm_name(each.factor, levels[each.factor.name]) for each in crossed)
    return Arm(name=name, levels=levels)


def _crossed_hypotheses(reading: Reading, arms: Sequence[Arm]) -> tuple[Hypothesis, ...]:
    design = runs(len(reading.crossed))
    found: list[Hypothesis] = []
    for place, each in enumerate(reading.crossed):
        baseline, treatment = (arm_name(each.factor, level) for level in each.levels)
        words = f"{treatment} has {_more(reading)} {reading.metric.name} than {baseline}, over all levels of the others"
        signs = [run[place] for run in design]
        found.append(_contrast(reading, arms, signs, len(found) + 1, each.factor.name, (baseline, treatment), words))
    for one, other in _told_apart(len(reading.crossed)):
        names = [reading.crossed[place].factor.name for place in (one, other)]
        words = (
            f"the effect of {names[0]} on {reading.metric.name} is {'larger' if reading.direction == 'increase' else 'smaller'} "
            f"at {arm_name(reading.crossed[other].factor, reading.crossed[other].levels[1])} (interaction)"
        )
        signs = [run[one] * run[other] for run in design]
        label = " x ".join(names)
        found.append(
            _contrast(reading, arms, signs, len(found) + 1, label, (f"{label}: unlike", f"{label}: like"), words)
        )
    return tuple(found)


def _told_apart(factors: int) -> list[tuple[int, int]]:
    """Pairs of factors whose interaction is no other's: in a half fraction of four, pairs are told apart from none."""
    return list(itertools.combinations(range(factors), 2)) if factors <= FULL_UP_TO or factors > 4 else []


def _contrast(
    reading: Reading,
    arms: Sequence[Arm],
    signs: Sequence[int],
    number: int,
    factor: str,
    labels: tuple[str, str],
    words: str,
) -> Hypothesis:
    assumed = " (the direction is assumed: the topic claims none)"
    return Hypothesis(
        id=f"H{number}",
        statement=words + assumed,
        factor=factor,
        baseline=labels[0],
        treatment=labels[1],
        metric=reading.metric.name,
        direction=reading.direction,
        direction_assumed=True,
        margin=reading.metric.margin,
        alpha=ALPHA,
        baseline_arms=tuple(arm.name for arm, sign in zip(arms, signs, strict=True) if sign < 0),
        treatment_arms=tuple(arm.name for arm, sign in zip(arms, signs, strict=True) if sign > 0),
    )


def _more(reading: Reading) -> str:
    return "a higher" if reading.direction == "increase" else "a lower"
