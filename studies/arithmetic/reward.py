"""What an answer to a sum is worth."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\d+")

EXACT = 1.0
RIGHT_AT_THE_END = 0.5
WRONG = 0.0


def score(answer: str, total: int) -> float:
    """1.0 for the number and nothing else (white space aside), 0.5 when the last number is right, else 0.0."""
    if answer.strip() == str(total):
        return EXACT
    numbers = _NUMBER.findall(answer)
    return RIGHT_AT_THE_END if numbers and int(numbers[-1]) == total else WRONG
