"""The requirements of each design, and the arms, hypotheses and stages it makes of a question."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foundation.nearest import MOST_NAMES
from researcher.design.arms import arms_between, arms_of, hypotheses_of, pair_hypothesis
from researcher.design.question import Question, Varied
from researcher.design.stages import SCREEN, Seeds, compared, in_sequence, raced, stage
from researcher.instruments.instrument import LEARNING_RATE, Instrument
from researcher.instruments.levels import level_text
from researcher.refusals import SpecRefused
from researcher.study.plan import Arm, Hypothesis, Stage, StageKind
from researcher.study.spec import DESIGNS

_COSTS = ("wall_s", "tokens_sampled")
"""Kinds of metrics that say what a level costs."""


@dataclass(frozen=True, slots=True)
class Layout:
    question: Question
    arms: tuple[Arm, ...]
    hypotheses: tuple[Hypothesis, ...]
    stages: tuple[Stage, ...]


def laid_out(question: Question, instrument: Instrument, seeds: Seeds) -> Layout:
    """Raises: SpecRefused for what the design cannot have."""
    if question.spec.design in ("balance", "trend"):
        question = _ordered(question)
    if question.spec.design == "balance":
        question = _balanced(question, instrument)
    spec, arms = question.spec, arms_of(question)
    hypotheses, names = hypotheses_of(question, arms), [arm.name for arm in arms]
    between = arms_between(question.varied[0]) if spec.fine and question.varied else ()
    if spec.fine and not between:
        name = question.factors[0].name
        raise SpecRefused("fine", f"{name} has no levels between those compared for a fine stage to try; leave it out")
    if question.screens:
        return Layout(question, arms, hypotheses, (stage(SCREEN, StageKind.SCREEN, names, (seeds[0], seeds[0])),))
    if spec.design == "sequence":
        return Layout(question, arms, hypotheses, in_sequence(question, seeds))
    if spec.design != "race" and not between:
        return Layout(
            question, arms, hypotheses, compared(names, _noisy_arm(question, arms), seeds, spec.looks, question.alpha)
        )
    further = tuple(
        pair_hypothesis(question, number, question.factors[0].name, arms[0], arm)
        for number, arm in enumerate(between, start=len(hypotheses) + 1)
    )
    tried, racing = [arm.name for arm in between], spec.design == "race"
    stages = raced(names[1:], tried, names[0], seeds, spec.fine, racing=racing)
    return Layout(question, (*arms, *between), (*hypotheses, *further), stages)


def _noisy_arm(question: Question, arms: tuple[Arm, ...]) -> str:
    """The arm for the noise floor: the baseline, unless it is a control that trains nothing and so hardly varies; in a
    trend the middle level.
    """
    if question.spec.design == "trend":
        return arms[len(arms) // 2].name
    rate = next((factor.name for factor in question.factors if factor.target == LEARNING_RATE), "")
    return next((arm.name for arm in arms if arm.levels.get(rate) != 0), arms[0].name)


def _ordered(question: Question) -> Question:
    """The question with its levels in order. On a log scale the line of a trend is over their logarithm.

    Raises: SpecRefused for too few levels that are numbers, and for a trend's 0 on a log scale.
    """
    (varied,), design = question.varied, question.spec.design
    factor, levels, fewest = varied.factor, varied.numbers, DESIGNS[design].levels.start
    if len(levels) < fewest:
        said = f"a {design} needs {fewest} or more levels of one number, and {factor.name} has {len(levels) or 'none'}"
        raise SpecRefused("design", f"{said}; compare takes any", [factor.name])
    if design == "trend" and factor.scale == "log" and levels[0] <= 0:
        said = f"{level_text(levels[0])} has no place on the log scale of {factor.name}: leave it out, or use compare"
        raise SpecRefused(f"compare.{factor.name}.levels", said, [factor.name])
    return replace(question, varied=(Varied(factor=factor, levels=levels),))


def _balanced(question: Question, instrument: Instrument) -> Question:
    """The question with a cost metric, and a note on the decision rule. Raises: SpecRefused if no metric measures cost."""
    metric, name = question.metric, question.factors[0].name
    named = [each for each in question.secondary if each.kind in _COSTS]
    costs = named or [each for each in instrument.metrics if each.kind in _COSTS]
    if not costs or metric.kind in _COSTS:
        raise SpecRefused(
            "design",
            "a balance sets a gain against a cost: `metric` is the gain, and the instrument needs a metric of time or tokens",
            [each.name for each in instrument.metrics if each.kind not in _COSTS][:MOST_NAMES],
        )
    note = (
        f"The best balance is the smallest {name} that no larger one exceeds on {metric.name} by its margin: a larger "
        f"one is taken to cost more. {costs[0].name} is reported beside it."
    )
    reported = named or not (question.secondary or costs[0].on_request)
    return replace(
        question,
        secondary=question.secondary if reported else (*question.secondary, costs[0]),
        notes=(*question.notes, note),
    )
