"""What an answer to a countdown is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .expression import Expression, last_expression, numbers_in

RIGHT = 1.0
WRITTEN = 0.1
"""For any number at all."""
FORMED = 0.2
"""For an expression, whatever numbers it is made of."""
USED = 0.2
"""On top, as far as the expression is made of the given numbers."""
NEAR = 0.2
"""On top, where each number stands in it exactly once: by how near its value comes."""


def score(answer: str, numbers: Sequence[int], target: int) -> float:
    """1.0 for an expression of exactly these numbers that equals the target; else 0.0 (no number) up to 0.6.

    A model that cannot solve any yet still sees which of its answers come nearer; none of these steps is worth a solution.
    """
    expression = last_expression(answer)
    if expression is None:
        return WRITTEN if numbers_in(answer) else 0.0
    share = _share_used(expression, numbers)
    if share < 1.0:
        return FORMED + USED * share
    if expression.value == target:
        return RIGHT
    off = abs(float(expression.value) - target) / max(1, target)
    return FORMED + USED + NEAR * max(0.0, 1.0 - off)


def _share_used(expression: Expression, numbers: Sequence[int]) -> float:
    """1.0 only where exactly the given numbers stand in it."""
    common = (Counter(expression.numbers) & Counter(numbers)).total()
    return common / max(len(expression.numbers), len(numbers))
