"""What an answer to a sum is worth."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\d+")

RIGHT = 1.0
WRONG = 0.0


def score(answer: str, total: int) -> float:
    """1.0 when the last number in the answer is exactly the sum ("3 + 5 = 8" counts as "8" does), else 0.0."""
    numbers = _NUMBER.findall(answer)
    return RIGHT if numbers and int(numbers[-1]) == total else WRONG
