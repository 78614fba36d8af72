"""Durations as people write them: `8h`, `90m`, `1h30m`, `2d`."""

from __future__ import annotations

import re

_WRITTEN = re.compile(
    r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)(?:min|m))?(?:(\d+(?:\.\d+)?)s)?", re.ASCII
)
_UNITS_S = (86_400.0, 3600.0, 60.0, 1.0)


def duration_s(text: str) -> float | None:
    """Parse a duration into seconds; None if the text is not a duration. Every number needs a unit, longest unit first."""
    found = _WRITTEN.fullmatch(text)
    if not text or found is None:
        return None
    return sum(float(part) * unit for part, unit in zip(found.groups(), _UNITS_S, strict=True) if part)
