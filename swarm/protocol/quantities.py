"""Numbers as specs hold them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MOST = 2**53
"""No whole number of a spec is larger: beyond it JSON's readers differ, and no store keeps it."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MOST)]
