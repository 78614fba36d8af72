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
from collections import Counter
from collections.abc import Collection, Sequence

from researcher.design.reading import Reading
from researcher.design.stages import ALPHA
from researcher.instruments.instrument import Factor, Scalar
from researcher.planner.levels import level_text
from researcher.planner.wording import number_text
from researcher.study.plan import Arm, Hypothesis

FULL_UP_TO = 3
_BETWEEN = 3
"""Arms of the fine grid in each gap between two neighbouring levels."""
_LONGEST_TEXT, _BEGINNING = 60, 40
"""Letters of a level in an arm's name, and those of one that is longer."""
_Signs = tuple[int, ...]
_Named = tuple[str, Scalar]
"""A level after its name."""


def arms_of(reading: Reading) -> tuple[Arm, ...]:
    """One arm per level, named after it (`names_of`); equal levels make arms with different names (a null study)."""
    if reading.crossed:
        sides = [_named(each.factor, each.levels) for each in reading.crossed]
        design = runs(len(sides))
        return tuple(_joined(reading, *(two[sign > 0] for two, sign in zip(sides, run, strict=True))) for run in design)
    if reading.following is not None:
        return tuple({arm.name: arm for _, group in groups_of(reading) for arm in group}.values())
    named = zip(names_of(reading.factor, reading.levels), reading.levels, strict=True)
    return tuple(Arm(name=name, levels={reading.factor.name: level}) for name, level in named)


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
                (name,) = names_of(factor, (level,))
                found[name] = Arm(name=name, levels={factor.name: level})
    return tuple(found.values())


def hypotheses_of(reading: Reading, arms: Sequence[Arm]) -> tuple[Hypothesis, ...]:
    """One for each pair of treatment and baseline; of crossed factors, main effects and interactions of two."""
    if reading.crossed:
        return _crossed_hypotheses(reading, arms)
    if reading.following is None:
        pairs = [(reading.factor, arms[treatment], arms[baseline]) for treatment, baseline in reading.pairs]
    else:
        pairs = [(factor, arm, group[0]) for factor, group in groups_of(reading) for arm in group[1:]]
    return tuple(hypothesis_of(reading, number, *pair) for number, pair in enumerate(pairs, start=1))


def groups_of(reading: Reading) -> list[tuple[Factor, tuple[Arm, ...]]]:
    """What a study in sequence compares: the first factor's arms, and at each of its levels the second's; baselines first."""
    second = reading.following
    if second is None:
        raise ValueError("the reading has one factor alone")
    first = _named(reading.factor, reading.levels)
    more = () if second.meanwhile in second.levels else (second.meanwhile,)
    known = _named(second.factor, (*second.levels, *more))
    meanwhile = next(each for each in known if each[1] == second.meanwhile)
    found = [(reading.factor, tuple(_joined(reading, each, meanwhile) for each in first))]
    for each in first:
        found.append((second.factor, tuple(_joined(reading, each, own) for own in known[: len(second.levels)])))
    return found


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


def hypothesis_of(reading: Reading, number: int, factor: Factor, treatment: Arm, baseline: Arm) -> Hypothesis:
    """That the treatment's metric lies above the baseline's, or below it, as the reading claims."""
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


def _named(factor: Factor, levels: Sequence[Scalar]) -> list[_Named]:
    return list(zip(names_of(factor, levels), levels, strict=True))


def _joined(reading: Reading, *parts: _Named) -> Arm:
    """An arm that sets several factors, in the reading's order."""
    levels = {factor.name: level for factor, (_, level) in zip(reading.factors, parts, strict=True)}
    return Arm(name=",".join(name for name, _ in parts), levels=levels)


def _crossed_hypotheses(reading: Reading, arms: Sequence[Arm]) -> tuple[Hypothesis, ...]:
    design = runs(len(reading.crossed))
    found: list[Hypothesis] = []
    for place, each in enumerate(reading.crossed):
        baseline, treatment = names_of(each.factor, each.levels)
        words = f"{treatment} has {_more(reading)} {reading.metric.name} than {baseline}, over all levels of the others"
        signs = [run[place] for run in design]
        found.append(_contrast(reading, arms, signs, len(found) + 1, each.factor.name, (baseline, treatment), words))
    for one, other in _told_apart(len(reading.crossed)):
        names = [reading.crossed[place].factor.name for place in (one, other)]
        words = (
            f"the effect of {names[0]} on {reading.metric.name} is {'larger' if reading.direction == 'increase' else 'smaller'} "
            f"at {names_of(reading.crossed[other].factor, reading.crossed[other].levels)[1]} (interaction)"
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
