"""The two timers of a server: one closes things when they expire, the other checks every few seconds what the run waits for."""

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
    """Both timers. due: the lease time of the next expiry (infinite if nothing can expire), and the lease time now. on_end: called if a
    timer ends."""

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
        """Raises: the error that ended a timer; timers must never end by themselves."""
        for task in self._tasks:
            if task.done():
                task.result()

    def arm(self) -> None:
        """Look at the deadlines again: something may expire earlier than before."""
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
                await self._clock.sleep(PAUSE_AFTER_FAILED_WRITE_S)  # nothing has changed, so it will be due again

    async def _watch_quiet(self) -> None:
        while True:
            await self._clock.sleep(LOOK_EVERY_S)
            self._look_around()
