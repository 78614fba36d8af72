"""A trend: how a metric changes with one number, from its lowest level to its highest, along a fitted line.

On a log scale the line is over the logarithm of the levels, so that each doubling counts the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from researcher.design.question import Question, Varied
from researcher.instruments.levels import level_text, number_text
from researcher.refusals import SpecRefused
from researcher.study.plan import Arm, Hypothesis

FEWEST_LEVELS = 3


def check_trend(question: Question) -> Question:
    """The same question with its levels in order.

    Raises: SpecRefused for levels that are no numbers or too few, and for 0 on a log scale.
    """
    (varied,) = question.varied
    factor, levels = varied.factor, sorted({level for level in varied.levels if not isinstance(level, str | bool)})
    if factor.type not in ("int", "float") or len(levels) < FEWEST_LEVELS:
        raise SpecRefused(
            "design",
            f"a trend needs {FEWEST_LEVELS} or more levels of one number, and {factor.name} has {len(levels)}; compare takes any",
            [factor.name],
        )
    if factor.scale == "log" and levels[0] <= 0:
        raise SpecRefused(
            f"compare.{factor.name}.levels",
            f"{level_text(levels[0])} has no place on the log scale of {factor.name}: leave it out, or use compare",
            [factor.name],
        )
    return replace(question, varied=(Varied(factor=factor, levels=tuple(levels)),))


def trend_of(question: Question, arms: Sequence[Arm], ends: Hypothesis) -> Hypothesis:
    """The claim on the change over all arms, which stand in order. ends: the same claim on the first and the last of them."""
    (factor,), metric = question.factors, question.metric
    low, high = (level_text(arm.levels[factor.name]) for arm in (arms[0], arms[-1]))
    over = f"from {low} to {high}{', on a log scale' if factor.scale == 'log' else ''}"
    way = "rises" if question.direction == "increase" else "falls"
    said = f"{metric.name} {way} with {factor.name}, {over}"
    if question.spec.claim == "equal":
        said = f"{metric.name} changes with {factor.name} by less than {number_text(metric.margin)}, {over}"
    elif question.direction_assumed:
        said += " (no direction is claimed; this one is the better)"
    between = tuple(arm.name for arm in arms[1:-1])
    return ends.model_copy(update={"statement": said, "between_arms": between})
