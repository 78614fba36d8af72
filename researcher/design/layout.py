"""How a question is laid out in stages: a comparison of all arms, looks, a race, a fine stage, one factor after the other, a screen.

What was asked for and a design of this kind cannot have is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from researcher.design import succession
from researcher.design.arms import arms_between, hypothesis_of
from researcher.design.question import Question
from researcher.design.stages import compared, raced, screened
from researcher.instruments.instrument import LEARNING_RATE
from researcher.refusals import SpecRefused
from researcher.study.plan import Arm, Hypothesis, Stage

MOST_IN_SEQUENCE = 4
LaidOut = tuple[tuple[Arm, ...], tuple[Hypothesis, ...], tuple[Stage, ...]]


def laid_out(
    question: Question, arms: tuple[Arm, ...], hypotheses: tuple[Hypothesis, ...], seeds: tuple[int, int]
) -> LaidOut:
    """Arms, hypotheses and stages; a fine stage adds the levels that it may try. seeds: per arm, at least and at most."""
    spec = question.spec
    between = arms_between(question.varied[0]) if spec.fine and question.varied else ()
    _refuse_extras(question, fits_fine=bool(between))
    if spec.design == "screen":
        return arms, hypotheses, screened([arm.name for arm in arms], seeds[0])
    if spec.design == "sequence":
        _refuse_wide(question)
        return arms, hypotheses, succession.stages_of(question, seeds)
    if spec.design != "race" and not between:
        return arms, hypotheses, compared([arm.name for arm in arms], _noisy_arm(question, arms), seeds, spec.looks)
    baseline, *treatments = arms
    further = tuple(
        hypothesis_of(question, number, question.factors[0].name, arm, baseline)
        for number, arm in enumerate(between, start=len(hypotheses) + 1)
    )
    racing = spec.design == "race"
    named, tried = [arm.name for arm in treatments], [arm.name for arm in between]
    stages = raced(named, tried, baseline.name, seeds, spec.fine, racing=racing)
    return (*arms, *between), (*hypotheses, *further), stages


def _refuse_wide(question: Question) -> None:
    """Raises: SpecRefused for more levels in sequence than all can be compared."""
    for varied in question.varied:
        if len(varied.levels) > MOST_IN_SEQUENCE:
            name = varied.factor.name
            raise SpecRefused(
                f"compare.{name}.levels",
                f"a sequence compares {MOST_IN_SEQUENCE} levels of a factor at most, and there are {len(varied.levels)}; race {name} "
                "first, and compare the other in a study of its own",
                [name],
            )


def _refuse_extras(question: Question, *, fits_fine: bool) -> None:
    """Raises: SpecRefused for looks, or a fine stage, where a design of this kind has none."""
    spec = question.spec
    if spec.design == "race" and len(spec.arms or question.varied[0].levels) < 3:
        raise SpecRefused("design", "a race needs two treatments or more; compare takes one")
    if spec.looks > 1 and (spec.design in ("sequence", "race", "screen") or spec.fine):
        which = f"a {spec.design}" if spec.design in ("sequence", "race", "screen") else "a study with a fine stage"
        raise SpecRefused("looks", f"{which} has no looks; leave them out")
    if not spec.fine:
        return
    if spec.design not in ("compare", "race") or question.bundles:
        what = "arms that set several factors have" if question.bundles else f"a {spec.design} study has"
        raise SpecRefused("fine", f"{what} no fine stage; leave it out")
    if not fits_fine:
        name = question.factors[0].name
        raise SpecRefused("fine", f"{name} has no levels between those compared for a fine stage to try; leave it out")


def _noisy_arm(question: Question, arms: Sequence[Arm]) -> str:
    """The arm whose noise is measured beforehand: the baseline, but for a control that trains nothing and so hardly varies; of a
    trend the middle level, as both ends may be far from all others."""
    if question.spec.design == "trend":
        return arms[len(arms) // 2].name
    rate = next((factor.name for factor in question.factors if factor.target == LEARNING_RATE), "")
    return next((arm.name for arm in arms if arm.levels.get(rate) != 0), arms[0].name)
