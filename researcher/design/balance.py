"""The best balance of what is gained and what it costs: the smallest level that no larger one exceeds, as orders of arms.

`5 ≪ 15 ≈ 25` speaks for 15: it gains over 5, and 25 gains nothing over it. Orders in which a gain follows a loss speak for no
level: the two were not set against each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from foundation.nearest import MOST_NAMES
from researcher.design.question import Question, Varied
from researcher.instruments.instrument import Instrument, Metric
from researcher.refusals import SpecRefused
from researcher.study.plan import Branch, Condition, Relation

MOST_LEVELS = 4
_COSTS = ("wall_s", "tokens_sampled")
"""Kinds of metrics that say what a level costs."""
_RELATIONS: tuple[Relation, ...] = ("≪", "≈", "≫")
_TURNED: dict[Relation, Relation] = {"≪": "≫", "≈": "≈", "≫": "≪"}


def check_balance(question: Question, instrument: Instrument) -> tuple[Question, str]:
    """The same question with its levels in order, and what is said of it.

    Raises: SpecRefused for levels that are no numbers, or too many to be told apart; and where nothing says the cost.
    """
    if question.spec.claim != "none":
        raise SpecRefused("claim", "a balance claims nothing: it asks which level is enough; leave the claim out")
    (varied,), metric = question.varied, question.metric
    factor, levels = varied.factor, sorted({level for level in varied.levels if not isinstance(level, str | bool)})
    if factor.type not in ("int", "float") or len(levels) < 2:
        raise SpecRefused(
            "design", f"a balance needs two or more levels of one number, and {factor.name} has none", [factor.name]
        )
    if len(levels) > MOST_LEVELS:
        raise SpecRefused(
            "design", f"a balance takes {MOST_LEVELS} levels of {factor.name} at most, not {len(levels)}", [factor.name]
        )
    named = [each for each in question.secondary if each.kind in _COSTS]
    costs = named or [each for each in instrument.metrics if each.kind in _COSTS]
    if not costs or metric.kind in _COSTS:
        raise SpecRefused(
            "design",
            "a balance sets a gain against a cost: `metric` is the gain, and the instrument needs a metric of time or tokens",
            [each.name for each in instrument.metrics if each.kind not in _COSTS][:MOST_NAMES],
        )
    note = (
        f"The best balance is the smallest {factor.name} that no larger one exceeds on {metric.name} by its margin: a larger "
        f"one is taken to cost more. {costs[0].name} is reported beside it."
    )
    reported = named or not (question.secondary or costs[0].on_request)
    return replace(
        question,
        varied=(Varied(factor=factor, levels=tuple(levels)),),
        secondary=question.secondary if reported else (*question.secondary, costs[0]),
    ), note


def balances(arms: Sequence[str], metric: Metric, stage: str, alpha: float) -> list[Branch]:
    """What each order of the arms, the smallest level first, says of the balance."""
    found = []
    for relations in itertools.product(_RELATIONS, repeat=len(arms) - 1):
        best = _best(relations)
        if best is None:
            continue
        ways = relations if metric.direction == "increase" else tuple(_TURNED[each] for each in relations)
        order = " ".join([arms[0], *(f"{way} {arm}" for way, arm in zip(ways, arms[1:], strict=True))])
        found.append(
            Branch(
                stage=stage,
                when=Condition(kind="order", arms=tuple(arms), relations=ways, metric=metric.name, alpha=alpha),
                then="stop",
                reason=f"{arms[best]} is the best balance: {order} on {metric.name}",
            )
        )
    return found


def _best(relations: Sequence[Relation]) -> int | None:
    """The place of the smallest level that no larger one exceeds; None where the order does not tell."""
    gained = [place for place, relation in enumerate(relations) if relation == "≪"]
    lost = [place for place, relation in enumerate(relations) if relation == "≫"]
    if gained and lost and lost[0] < gained[-1]:
        return None
    return gained[-1] + 1 if gained else 0
