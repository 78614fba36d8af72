"""Numbers that are equal but for rounding. Knows nothing of what they are numbers of."""

from __future__ import annotations

import math

_CLOSE = 1e-9
"""Relative difference that another machine's arithmetic may make."""


def same_number(one: float, other: float) -> bool:
    """Equal but for rounding."""
    try:
        return math.isclose(one, other, rel_tol=_CLOSE, abs_tol=1e-12)
    except OverflowError:  # a whole number that no float is as large as
        return one == other


def reaches(difference: float, margin: float) -> bool:
    """Whether it is the margin or more: 0.6 - 0.5 reaches 0.1, though as floats it is less."""
    return difference >= margin or same_number(difference, margin)
