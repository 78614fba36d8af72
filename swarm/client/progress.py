"""Shows the progress of `run_tasks` in one line of plain text on a terminal."""

from __future__ import annotations

import sys
from collections import deque
from typing import TextIO

from foundation.clock import Clock

REDRAW_S = 0.2
RECENT = 64
BAR_CELLS = 20


class ProgressLine:
    """Counts outcomes and redraws itself in place. `total` is the number of episodes, if known; with `stream=None` it draws nothing."""

    def __init__(self, label: str, *, total: int | None, clock: Clock, stream: TextIO | None) -> None:
        self._label = label
        self._total = total
        self._clock = clock
        self._stream = stream
        self._done = 0
        self._new = 0
        self._crashed = 0
        self._rewards: deque[float] = deque(maxlen=RECENT)
        self._started = clock.monotonic()
        self._drawn = -REDRAW_S

    def resumed(self, episodes: int) -> None:
        self._done += episodes

    def ended(self, reward: float | None) -> None:
        self._done += 1
        self._new += 1
        if reward is not None:
            self._rewards.append(reward)
        self._draw()

    def crashed(self) -> None:
        self._crashed += 1
        self._draw()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.write(f"\r{self.text()}\x1b[K\n")
            self._stream.flush()

    def text(self) -> str:
        """The current line."""
        parts = [self._label]
        if self._total:
            cells = min(BAR_CELLS, BAR_CELLS * self._done // self._total)
            parts.append(f"[{'#' * cells}{'.' * (BAR_CELLS - cells)}] {self._done}/{self._total}")
        else:
            parts.append(f"{self._done} episodes")
        if self._rewards:
            parts.append(f"reward {sum(self._rewards) / len(self._rewards):.3f}")
        seconds = self._clock.monotonic() - self._started
        if seconds > 0:
            parts.append(f"{self._new / seconds:.1f}/s")
        if self._crashed:
            parts.append(f"{self._crashed} crashed")
        return "  ".join(parts)

    def _draw(self) -> None:
        now = self._clock.monotonic()
        if self._stream is None or now - self._drawn < REDRAW_S:
            return
        self._drawn = now
        self._stream.write(f"\r{self.text()}\x1b[K")
        self._stream.flush()


def terminal(wanted: bool | None) -> TextIO | None:
    """Return the stream to draw on, or None. This is standard error if `wanted`; if `wanted` is None, only if it is a terminal."""
    return sys.stderr if wanted or (wanted is None and sys.stderr.isatty()) else None
