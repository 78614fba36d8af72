"""Shares of a mix. A server's `batch.mix` has ratios that count relative to each other; a share is part of the whole."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

_RATIO = re.compile(r"(?:run|roles\.[a-z][a-z0-9_]*)\.batch\.mix\.(?P<family>.+)\.ratio")
_DIGITS = 12
"""To which ratios are rounded, so that 0.3 does not become 0.30000000000000004."""


def family_of(target: str) -> str | None:
    """Whose ratio a factor's target sets; None where it sets none."""
    found = _RATIO.fullmatch(target)
    return found["family"] if found else None


def share_in(mix: Mapping[str, Any], family: str) -> float:
    """Of a family, by the ratios of a mix. Raises: KeyError where it has none."""
    return float(mix[family]["ratio"] / math.fsum(each["ratio"] for each in mix.values()))


def with_shares(mix: Mapping[str, Any], shares: Mapping[str, float]) -> dict[str, Any]:
    """The mix in which these families have these shares and the others share the rest as before; all ratios sum to 1.

    Raises: ValueError where the shares leave nothing for the others, or leave something and there are none.
    """
    others = {name: float(each["ratio"]) for name, each in mix.items() if name not in shares}
    rest = 1.0 - math.fsum(shares.values())
    named = ", ".join(f"{name} {share:g}" for name, share in shares.items())
    if others and rest <= 0:
        raise ValueError(f"shares of {named} leave nothing for {', '.join(others)}")
    if not others and not math.isclose(rest, 0.0, abs_tol=1e-9):
        raise ValueError(f"shares of {named} do not sum to 1, and no other family takes the rest")
    ratios = {name: ratio * rest / math.fsum(others.values()) for name, ratio in others.items()} | dict(shares)
    return {name: {**mix.get(name, {}), "ratio": round(ratio, _DIGITS)} for name, ratio in ratios.items()}
