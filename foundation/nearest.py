"""What a misspelt name was probably meant to be. Apart from the models that use it: a command line parses without them."""

from __future__ import annotations

from collections.abc import Iterable

MOST_NAMES = 5
"""How many names an error lists."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None when nothing is close."""
    import difflib

    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def a_few(name: str, known: Iterable[str]) -> list[str]:
    """The known names closest to `name`, the closest first, as many as an error lists."""
    import difflib

    return sorted(known, key=lambda each: -difflib.SequenceMatcher(None, name, each).ratio())[:MOST_NAMES]
