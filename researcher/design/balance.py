"""The best balance of what is gained and what it costs: the smallest level that no larger one exceeds, as orders of arms.

`5 ≪ 15 ≈ 25` speaks for 15: it gains over 5, and 25 gains nothing over it. Orders in which a gain follows a loss speak for no
level: the two were not set against each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from researcher.design.reading import Reading
from researcher.instruments.instrument import Instrument, Metric
from researcher.planner.mentions import Mention
from researcher.planner.wording import Token, words
from researcher.refusals import PlanningRefused
from researcher.study.plan import Branch, Condition, Relation

MOST_LEVELS = 4
_ASKING = words("balance tradeoff compromise trading")
_COSTS = ("wall_s",)
"""Kinds of metrics that say what a level costs."""
_RELATIONS: tuple[Relation, ...] = ("≪", "≈", "≫")
_TURNED: dict[Relation, Relation] = {"≪": "≫", "≈": "≈", "≫": "≪"}


def is_asked(found: Sequence[Token]) -> bool:
    """`the best balance of …`, `trade-off between …`, `a compromise`, `the sweet spot between …`."""
    said = [token.key for token in found if token.kind == "word"]
    pairs = set(itertools.pairwise(said))
    return bool(_ASKING & set(said)) or ("trade", "off") in pairs or {("sweet", "spot"), ("spot", "between")} <= pairs


def _cost(instrument: Instrument, named: Sequence[Mention]) -> Metric:
    """What is balanced against the gain: of the metrics that say what a level costs the one that is named, else the first.

    Raises: PlanningRefused where the instrument has none.
    """
    costs = [metric for metric in instrument.metrics if metric.kind in _COSTS]
    if not costs:
        raise PlanningRefused(
            f"a balance sets a gain against a cost, and {instrument.name} has no metric of time; ask which level is best",
            [metric.name for metric in instrument.metrics],
        )
    return next((metric for mention in named for metric in costs if mention.what == metric), costs[0])


def gains(named: Sequence[Mention]) -> list[Mention]:
    """What is named, without the costs."""
    return [each for each in named if not (isinstance(each.what, Metric) and each.what.kind in _COSTS)]


def balanced(reading: Reading, instrument: Instrument, named: Sequence[Mention] = ()) -> Reading:
    """The same question with its levels in order, each set against the next smaller one.

    Raises: PlanningRefused for levels that are no numbers, or too many to be told apart; and where nothing says the cost.
    """
    factor, metric = reading.factor, reading.metric
    numbers = sorted({float(level) for level in reading.levels if not isinstance(level, str | bool)})
    if factor.type not in ("int", "float") or len(numbers) < 2:
        raise PlanningRefused(
            f"a balance is asked of two or more levels of one number, and {factor.name} has none", [factor.name]
        )
    if len(numbers) > MOST_LEVELS:
        raise PlanningRefused(
            f"a balance is asked of {MOST_LEVELS} levels of {factor.name} at the most, not {len(numbers)}",
            [factor.name],
        )
    note = (
        f"The best balance is the smallest {factor.name} that no larger one exceeds on {metric.name} by its margin: a larger "
        f"one is taken to cost more. {_cost(instrument, named).name} is reported beside it."
    )
    return reading.model_copy(
        update={
            "levels": tuple(round(number) if factor.type == "int" else number for number in numbers),
            "pairs": tuple((place + 1, place) for place in range(len(numbers) - 1)),
            "balance": True,
            "direction": metric.direction,
            "direction_assumed": True,
            "assumptions": (*reading.assumptions, note),
        }
    )


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
