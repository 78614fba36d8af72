"""Arms and hypotheses of a question: levels of one factor, two factors in sequence, several crossed factors, or bundles of
settings.

Crossed factors have two levels each. Up to three run in a full factorial, four or more in a half fraction. In a half fraction the
last factor's sign is the product of the others' signs, so that main effects are not aliased with two-factor interactions. Each side
of a main effect or interaction is the mean over the arms with one sign. An interaction is half the difference between the effects
of one factor at the two levels of the other, as is usual in experimental design.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from researcher.design.question import Question, Varied
from researcher.instruments.instrument import Factor, Scalar
from researcher.instruments.levels import level_text, number_text
from researcher.study.plan import Arm, Hypothesis, Plan
from swarm.protocol.runspec import RunSpec

FULL_UP_TO = 3
_BETWEEN = 3
"""Number of arms in the fine grid between two neighbouring levels."""
_LONGEST_TEXT, _BEGINNING = 60, 40
"""Lengths in characters: the longest level that an arm's name shows in full, and the part shown of a longer one."""
_Signs = tuple[int, ...]
_Named = tuple[str, Scalar]
"""A level's name, `FACTOR=LEVEL`, and the level."""


# -- arms -----------------------------------------------------------------------------------------------------------


def arms_of(question: Question) -> tuple[Arm, ...]:
    """Return one arm per level, named after it (see `names_of`). Equal levels give arms with different names, for a null study."""
    if question.bundles:
        return tuple(
            Arm(name=name, levels={factor.name: level for factor, level in settings})
            for name, settings in question.bundles.items()
        )
    if question.crossed:
        sides = [_named(each) for each in question.varied]
        return tuple(
            _joined(question, *(two[sign > 0] for two, sign in zip(sides, run, strict=True)))
            for run in _design(question)
        )
    if question.spec.design == "sequence":
        return tuple({arm.name: arm for _, group in groups_of(question) for arm in group}.values())
    return tuple(_joined(question, each) for each in _named(question.varied[0]))


def arms_between(varied: Varied) -> tuple[Arm, ...]:
    """Return the grid for Optuna: arms with values between neighbouring levels, on the factor's scale. Empty for non-numeric
    factors.
    """
    factor, levels = varied.factor, [float(level) for level in varied.numbers]
    found: dict[str, Arm] = {}
    for (low, high), part in itertools.product(itertools.pairwise(levels), range(1, _BETWEEN + 1)):
        share = part / (_BETWEEN + 1)
        value = low * (high / low) ** share if factor.scale == "log" and low > 0 else low + (high - low) * share
        level: Scalar = round(value) if factor.type == "int" else float(number_text(float(f"{value:.3g}")))
        if level not in levels:
            (name,) = names_of(factor, (level,))
            found[name] = Arm(name=name, levels={factor.name: level})
    return tuple(found.values())


def groups_of(question: Question) -> list[tuple[Factor, tuple[Arm, ...]]]:
    """Return the comparisons of a sequence: the first factor's arms, then the second factor's arms at each level of the first.

    Baselines come first. In the first comparison, the second factor is at its baseline.
    """
    one, two = question.varied
    first, second = _named(one), _named(two)
    return [
        (one.factor, tuple(_joined(question, each, second[0]) for each in first)),
        *((two.factor, tuple(_joined(question, each, own) for own in second)) for each in first),
    ]


def runs(factors: int) -> list[_Signs]:
    """Return the runs of a factorial as signs: -1 for a factor's first level, 1 for its second."""
    if factors <= FULL_UP_TO:
        return list(itertools.product((-1, 1), repeat=factors))
    return [(*signs, math.prod(signs)) for signs in itertools.product((-1, 1), repeat=factors - 1)]


@lru_cache(maxsize=8)
def screen_runs(factors: int) -> list[_Signs]:
    """Return the runs of a screen as signs; the first run has every factor at its first level.

    Main effects are not aliased with each other, but some may be aliased with two-factor interactions (resolution III). That is
    enough for a screen, which explores; a comparison confirms.

    Chooses the design with the fewest runs: a fractional factorial of resolution IV, else of resolution III, else a Plackett-Burman
    design, which takes 12 runs for 8 to 11 factors where a fractional factorial takes 16.
    """
    from pydoe import fracfact_by_res, pbdesign  # takes more than a second to import, and only screens need it

    designs = [fracfact_by_res(factors, resolution) for resolution in (4, 3)]
    with suppress(ValueError):  # no Plackett-Burman design has 28 runs
        designs.append(pbdesign(factors))
    design = min(designs, key=len)
    design = design * -design[0]  # flipping a factor's sign keeps the columns orthogonal
    return [tuple(int(sign) for sign in run) for run in design]


def _design(question: Question) -> list[_Signs]:
    return (screen_runs if question.screens else runs)(len(question.varied))


def _joined(question: Question, *parts: _Named) -> Arm:
    """Return an arm that sets several factors, in the spec's order."""
    levels = {factor.name: level for factor, (_, level) in zip(question.factors, parts, strict=True)}
    return Arm(name=",".join(name for name, _ in parts), levels=levels)


# -- names ----------------------------------------------------------------------------------------------------------


def names_of(factor: Factor, levels: Sequence[Scalar]) -> tuple[str, ...]:
    """Return a distinct name, `FACTOR=LEVEL`, for each level.

    Different levels whose names would be equal get their file's folder, or else a hash, in the name. Equal levels get `-again`.
    """
    apart = {level: _name(factor, level) for level in levels}
    for by_folder in (True, False):
        shared = Counter(apart.values())
        for level, name in apart.items():
            if shared[name] > 1:
                longer = (
                    _name(factor, level, folders=1) if by_folder else f"{_name(factor, level)}-{_hash(repr(level))}"
                )
                apart[level] = longer
    found: list[str] = []
    for level in levels:
        own = apart[level]
        further = (f"{own}-again-{number}" for number in itertools.count(2))
        again = (each for each in itertools.chain([f"{own}-again"], further) if each not in {*found, *apart.values()})
        found.append(next(again) if own in found else own)
    return tuple(found)


def _named(varied: Varied) -> list[_Named]:
    return list(zip(names_of(varied.factor, varied.levels), varied.levels, strict=True))


def _name(factor: Factor, level: Scalar, *, folders: int = 0) -> str:
    """Return `FACTOR=LEVEL`. A long level is shortened to its beginning and a hash; the arm keeps the full text."""
    text = level_text(level)
    if factor.type == "data":  # only the file's name: the arm's level has the full path and digest
        text = "/".join(text.partition("#")[0].split("/")[-1 - folders :])
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_BEGINNING].rstrip()}-{_hash(text)}"
    return f"{factor.name}={text}".replace(" ", "-").replace("/", "-")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


# -- hypotheses -----------------------------------------------------------------------------------------------------


def hypotheses_of(question: Question, arms: Sequence[Arm], between: Sequence[Arm] = ()) -> tuple[Hypothesis, ...]:
    """Return one hypothesis for each treatment against the baseline.

    Exceptions: crossed factors have main effects and two-factor interactions, screened factors only main effects. A balance
    compares each level with the next smaller one. A trend tests the change over all levels. `between` are the arms of a fine stage,
    which are treatments too.
    """
    usual = {
        "metric": question.metric.name,
        "direction": question.direction,
        "direction_assumed": question.direction_assumed,
        "margin": question.metric.margin,
        "alpha": question.alpha,
    }
    if question.crossed:
        contrasts = [*_crossed(question, arms)]
    elif question.spec.design == "trend":
        contrasts = [_trend(question, arms)]
    else:
        contrasts = [_contrast(question, *pair) for pair in _pairs(question, arms, between)]
    return tuple(Hypothesis(**usual | {"id": f"H{number}"} | each) for number, each in enumerate(contrasts, start=1))


def _pairs(question: Question, arms: Sequence[Arm], between: Sequence[Arm]) -> list[tuple[str, Arm, Arm]]:
    """Return the compared pairs as (factor in which they differ, baseline, treatment)."""
    if question.spec.design == "sequence":
        return [(factor.name, group[0], arm) for factor, group in groups_of(question) for arm in group[1:]]
    if question.bundles:
        return [(_differing(arm, arms[0]), arms[0], arm) for arm in arms[1:]]
    name = question.factors[0].name
    if question.spec.design == "balance":
        return [(name, smaller, larger) for smaller, larger in itertools.pairwise(arms)]
    return [(name, arms[0], arm) for arm in (*arms[1:], *between)]


def _differing(arm: Arm, baseline: Arm) -> str:
    """Return the names of the factors in which a bundle differs from the baseline, joined by ` + `."""
    names = dict.fromkeys([*arm.levels, *baseline.levels])
    return " + ".join(name for name in names if arm.levels.get(name) != baseline.levels.get(name)) or "nothing"


def _contrast(question: Question, factor: str, baseline: Arm, treatment: Arm) -> dict[str, Any]:
    """Return the hypothesis that compares two arms: the metric is higher, lower or equal as claimed; in a screen, it changes."""
    metric = question.metric
    said = f"{treatment.name} has {_more(question)} {metric.name} than {baseline.name}{_assumed(question)}"
    if question.spec.claim == "equal":
        said = f"{treatment.name} and {baseline.name} have the same {metric.name}, within {number_text(metric.margin)}"
    if question.screens:
        said = f"{treatment.name} changes {metric.name} against {baseline.name} (explored)"
    return {"statement": said, "factor": factor, "baseline": baseline.name, "treatment": treatment.name}


def _trend(question: Question, arms: Sequence[Arm]) -> dict[str, Any]:
    """Return the hypothesis that the metric changes from the lowest level to the highest. `arms` are in order of their levels."""
    (factor,), metric = question.factors, question.metric
    low, high = (level_text(arm.levels[factor.name]) for arm in (arms[0], arms[-1]))
    over = f"from {low} to {high}{', on a log scale' if factor.scale == 'log' else ''}"
    way = "rises" if question.direction == "increase" else "falls"
    said = f"{metric.name} {way} with {factor.name}, {over}{_assumed(question)}"
    if question.spec.claim == "equal":
        said = f"{metric.name} changes with {factor.name} by less than {number_text(metric.margin)}, {over}"
    between = tuple(arm.name for arm in arms[1:-1])
    return _contrast(question, factor.name, arms[0], arms[-1]) | {"statement": said, "between_arms": between}


def _crossed(question: Question, arms: Sequence[Arm]) -> Iterator[dict[str, Any]]:
    """Yield the hypotheses of crossed arms. Main effects have the spec's claim; interactions and screens have none."""
    design, metric = _design(question), question.metric.name
    for place, each in enumerate(question.varied):
        baseline, treatment = names_of(each.factor, each.levels)
        said = f"{treatment} has {_more(question)} {metric} than {baseline}, over all levels of the others{_assumed(question)}"
        if question.screens:
            said = f"{treatment} changes {metric} against {baseline}, over the runs of the screen (explored)"
        sides = _sides(arms, [run[place] for run in design])
        yield {"statement": said, "factor": each.factor.name, "baseline": baseline, "treatment": treatment, **sides}
    # In a half fraction of four factors, the two-factor interactions are aliased in pairs.
    if question.screens or len(question.varied) == FULL_UP_TO + 1:
        return
    larger = "larger" if question.direction == "increase" else "smaller"
    for (one, first), (other, second) in itertools.combinations(enumerate(question.varied), 2):
        label, at = f"{first.factor.name} x {second.factor.name}", names_of(second.factor, second.levels)[1]
        said = (
            f"the effect of {first.factor.name} on {metric} is {larger} at {at} (interaction; no direction is claimed)"
        )
        sides = _sides(arms, [run[one] * run[other] for run in design])
        named = {"factor": label, "baseline": f"{label}: unlike", "treatment": f"{label}: like"}
        yield {"statement": said, "direction_assumed": True, **named, **sides}


def _sides(arms: Sequence[Arm], signs: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Split the arms into two sides by sign; each side is a mean over its arms. Sign 1 is the treatment side."""
    signed = [(arm.name, sign) for arm, sign in zip(arms, signs, strict=True)]
    return {
        "baseline_arms": tuple(name for name, sign in signed if sign < 0),
        "treatment_arms": tuple(name for name, sign in signed if sign > 0),
    }


def _assumed(question: Question) -> str:
    return " (no direction is claimed; this one is the better)" if question.direction_assumed else ""


def _more(question: Question) -> str:
    return "a higher" if question.direction == "increase" else "a lower"


# -- arms with equal settings --------------------------------------------------------------------------------------------


def with_own_seeds(plan: Plan) -> Plan:
    """Give each arm with the same settings as an earlier one its own seed offset. Call this again when stages change.

    Two arms with equal settings and an equal seed are the same trial twice, and the copy would count as evidence. So the second arm's
    seeds begin after the last seed that the plan may need. Arms are compared by what runs (RunSpecs, model, steps, task parameters),
    not by name: `4e-5` equals `0.00004`, a default that is set equals one that is omitted, and a bundle may change nothing.

    Raises: pydantic's ValidationError for an arm that no server would accept.
    """
    span = max(stage.first_seed + stage.max_seeds for stage in plan.stages) - min(
        stage.first_seed for stage in plan.stages
    )
    alike: dict[str, list[str]] = {}
    arms, assumptions = list[Arm](), list(plan.assumptions)
    for arm in plan.arms:
        names = alike.setdefault(_what_runs(plan, arm), [])
        if names:
            note = (
                f"{arm.name} runs the same as {names[0]}, on its own seeds, so that no trial copies another. The two differ only "
                "by chance: this measures the noise, and no difference should be found."
            )
            assumptions += [note] * (note not in assumptions)
        arms.append(arm.model_copy(update={"seed_offset": len(names) * span}))
        names.append(arm.name)
    return plan.model_copy(update={"arms": tuple(arms), "assumptions": tuple(assumptions)})


def _what_runs(plan: Plan, arm: Arm) -> str:
    """Return everything but the seeds that an arm's trials receive, as JSON. Factors that it does not vary are at their defaults."""
    levels = plan.levels_of(arm)
    specs = [
        RunSpec.model_validate(plan.run_fields(levels, role)).model_dump(mode="json") for role in (None, *plan.roles)
    ]
    tasks = {factor.target: factor.default for factor in plan.factors}
    tasks |= {f"task.{name}": value for name, value in plan.task.items()} | levels
    tasks = {target: level for target, level in tasks.items() if target.startswith("task.")}
    return json.dumps([specs, plan.model_of(arm.name).name, plan.steps_of(arm.name), tasks], sort_keys=True)
