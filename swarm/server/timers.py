"""A server's two timers: one acts on whatever expires, the other checks every few seconds what the run waits for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from foundation.clock import Clock
from foundation.event_loop import within
from swarm.protocol.errors import ErrorCode, Refusal

LOOK_EVERY_S = 5.0
PAUSE_AFTER_FAILED_WRITE_S = 1.0


class Timers:
    """Runs the server's two timers until it is closed.

    Args:
        clock: the server's clock.
        due: returns the lease time of the next expiry (infinite if nothing can expire), and the current lease time.
        expire: acts on whatever has expired.
        look_around: checks what the run waits for.
        on_end: called if a timer ends.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        due: Callable[[], tuple[float, float]],
        expire: Callable[[], Awaitable[None]],
        look_around: Callable[[], object],
        on_end: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._due = due
        self._expire = expire
        self._look_around = look_around
        self._on_end = on_end
        self._rearm = asyncio.Event()
        self._armed_for = math.inf
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._watch_limits(), name="limits"),
            asyncio.create_task(self._watch_quiet(), name="quiet"),
        ]
        for task in self._tasks:
            task.add_done_callback(lambda _: self._on_end())

    def check(self) -> None:
        """Raise the error that ended a timer, if any; timers run until `close`."""
        for task in self._tasks:
            if task.done():
                task.result()

    def arm(self) -> None:
        """Check the deadlines again, because something may now expire earlier."""
        if self._due()[0] < self._armed_for:
            self._rearm.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch_limits(self) -> None:
        while True:
            self._rearm.clear()
            self._armed_for, now = self._due()
            wait_s = None if self._armed_for == math.inf else self._armed_for - now
            await within(self._clock, wait_s, self._rearm.wait())
            try:
                await self._expire()
            except Refusal as refusal:
                if refusal.code is not ErrorCode.STORAGE_FULL:
                    raise
                await self._clock.sleep(PAUSE_AFTER_FAILED_WRITE_S)  # nothing has changed, so it is still due

    async def _watch_quiet(self) -> None:
        while True:
            await self._clock.sleep(LOOK_EVERY_S)
            self._look_around()
