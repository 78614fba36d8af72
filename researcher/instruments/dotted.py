"""Settings by dotted names: `optimizer.learning_rate` of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def leaf_at(settings: object, path: Iterable[str]) -> Any:
    """The value at a path, or None."""
    for part in path:
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


def leaves(settings: Mapping[str, object], beneath: str = "") -> Iterator[tuple[str, object]]:
    """Settings that hold no further ones, by dotted name."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{beneath}{key}.")
        else:
            yield f"{beneath}{key}", value


def nested(path: str, value: object) -> dict[str, object]:
    """`nested("a.b", 1)` is `{"a": {"b": 1}}`."""
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}
