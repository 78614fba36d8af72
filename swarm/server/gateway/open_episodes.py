"""Keeps a value for each episode while it is open, so that memory grows only with the number of open episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

LEAST_SWEPT = 64
"""Minimum number of episodes for which a sweep is worth its cost."""


class OpenEpisodes(Generic[T]):
    """A value for each open episode, created on first use.

    Forgets closed episodes each time the number has doubled since the last sweep, so that sweeping costs O(1) per episode.
    """

    def __init__(self, is_open: Callable[[str], bool], make: Callable[[], T]) -> None:
        self._is_open = is_open
        self._make = make
        self._values: dict[str, T] = {}
        self._sweep_at = LEAST_SWEPT

    def __len__(self) -> int:
        return len(self._values)

    def of(self, episode_id: str) -> T:
        """Return the episode's value, created if needed."""
        value = self._values.get(episode_id)
        if value is None:
            if len(self._values) >= self._sweep_at:
                self._sweep()
            value = self._values[episode_id] = self._make()
        return value

    def _sweep(self) -> None:
        self._values = {name: value for name, value in self._values.items() if self._is_open(name)}
        self._sweep_at = max(LEAST_SWEPT, 2 * len(self._values))
