"""Suggestions for misspelt names. A separate module, so that the command line does not have to import pydantic."""

from __future__ import annotations

from collections.abc import Iterable

MOST_NAMES = 5
"""Maximum number of names that an error lists."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, or None if nothing is close."""
    import difflib

    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def a_few(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names closest to `name`, closest first, at most MOST_NAMES."""
    import difflib

    return sorted(known, key=lambda each: -difflib.SequenceMatcher(None, name, each).ratio())[:MOST_NAMES]
