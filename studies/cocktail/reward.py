"""What an answer is worth, for all three families."""

from __future__ import annotations

import re

_WORD = re.compile(r"-?\w+")

RIGHT, WRONG, EMPTY = 1.0, 0.1, 0.0


def score(answer: str, expected: str) -> float:
    """1.0 when the last word or number of the answer is the expected one, whatever its case; 0.1 for another, 0.0 for none."""
    words = _WORD.findall(answer.lower())
    if not words:
        return EMPTY
    return RIGHT if words[-1] == expected.lower() else WRONG
