"""Numeric types for specs."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

MOST = 2**53
"""The largest integer allowed in a spec. Beyond it, JSON parsers disagree."""


def _no_boolean(value: object) -> object:
    """Reject booleans, because pydantic would read true as 1."""
    if isinstance(value, bool):
        raise ValueError(f"should be a number, got {value}")
    return value


NotBoolean = BeforeValidator(_no_boolean)
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), NotBoolean]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), NotBoolean]
Count = Annotated[int, Field(ge=1, le=MOST), NotBoolean]
