"""One time for many processes, as a town has it: real time, and what a test adds to it. It is kept in a file, so that it
outlives each process that looks at it.
"""

from __future__ import annotations

import asyncio
import struct
import time
from pathlib import Path

from foundation.paths import write_atomically

_LOOK_S = 0.02


class TownClock:
    """A `Clock`. Hours pass when somebody calls `pass_time`, in this process or another."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @classmethod
    def set_up(cls, file: Path, start: float) -> TownClock:
        """A new one, that shows `start` (Unix time) now."""
        clock = cls(file)
        clock._keep(start - time.time(), 0.0)
        return clock

    def now(self) -> float:
        return time.time() + self._kept()[0]

    def monotonic(self) -> float:
        return time.monotonic() + self._kept()[1]

    async def sleep(self, seconds: float) -> None:
        deadline = self.monotonic() + seconds
        while (left_s := deadline - self.monotonic()) > 0:  # noqa: ASYNC110 - a file wakes nobody
            await asyncio.sleep(min(_LOOK_S, left_s))
        await asyncio.sleep(0)

    def pass_time(self, seconds: float) -> None:
        """Let so much time pass, for everybody."""
        wall_s, ran_s = self._kept()
        self._keep(wall_s + seconds, ran_s + seconds)

    def until(self, at: float) -> None:
        """Let time pass until this Unix time. Raises: ValueError when it is over."""
        if at < self.now():
            raise ValueError(f"it is {self.now():.0f} already, {at:.0f} is over")
        self.pass_time(at - self.now())

    def _kept(self) -> tuple[float, float]:
        wall_s, ran_s = struct.unpack("dd", self._file.read_bytes())
        return wall_s, ran_s

    def _keep(self, wall_s: float, ran_s: float) -> None:
        write_atomically(self._file, struct.pack("dd", wall_s, ran_s))
