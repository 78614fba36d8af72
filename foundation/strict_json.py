"""JSON in which every name stands once: what says two things about one name says neither. Other readers take the last."""

from __future__ import annotations

import json
from typing import Any

_SHORT = 80
"""Letters of a name that is shown again."""


class RepeatedName(ValueError):
    """name: the one that stands twice."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name[:_SHORT]!r} stands twice in one object")
        self.name = name[:_SHORT]


def loads(text: str | bytes) -> Any:
    """Raises: RepeatedName; ValueError or RecursionError where it is no JSON."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedName(next(name for index, name in enumerate(names) if name in names[:index]))
    return found
