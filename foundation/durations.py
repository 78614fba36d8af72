"""Durations as people write them: `8h`, `90m`, `1h30m`, `2d`."""

from __future__ import annotations

import re

_WRITTEN = re.compile(
    r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)(?:min|m))?(?:(\d+(?:\.\d+)?)s)?", re.ASCII
)
_UNITS_S = (86_400.0, 3600.0, 60.0, 1.0)


def duration_s(text: str) -> float | None:
    """Seconds of a duration with units, longest unit first; None if the text is not one. A number needs a unit."""
    found = _WRITTEN.fullmatch(text)
    if not text or found is None:
        return None
    return sum(float(part) * unit for part, unit in zip(found.groups(), _UNITS_S, strict=True) if part)
