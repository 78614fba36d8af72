"""The order in which a client claims. Knows no server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from foundation.clock import Clock
from foundation.event_loop import within

HELD_UP_S = 0.2
"""A claim that takes longer waits for its family's turn in the mix."""
READ_AHEAD = 64
"""How many tasks may wait for that at once; then the stream of tasks waits too."""

Begin = Callable[[], Awaitable[asyncio.Event | None]]
"""Make one more claim as soon as there is room. Its event is set when it is answered; None: there will be no more."""


class ClaimOrder:
    """Tasks of one family claim in their order, and pass those of another only where these are held up. For one task group."""

    def __init__(self, group: asyncio.TaskGroup, clock: Clock) -> None:
        self._group = group
        self._clock = clock
        self._last: dict[str | None, asyncio.Event] = {}
        """Set when the newest task of a family has all its claims."""
        self._waiting = asyncio.Semaphore(READ_AHEAD)

    async def enter(self, family: str | None, begin: Begin, claims: int, *, may_be_passed: bool) -> None:
        """Make so many claims for a task. Returns when the next task may come, whatever its family."""
        await self._waiting.acquire()
        before, done, held_up = self._last.get(family), asyncio.Event(), asyncio.Event()
        self._last[family] = done
        self._group.create_task(self._claim(begin, claims, before, done, held_up))
        if not may_be_passed:
            await done.wait()
        elif before is None or before.is_set():
            await held_up.wait()

    async def _claim(
        self, begin: Begin, claims: int, before: asyncio.Event | None, done: asyncio.Event, held_up: asyncio.Event
    ) -> None:
        try:
            if before is not None:
                await before.wait()
            for _ in range(claims):
                claimed = await begin()
                if claimed is None:
                    return
                if not held_up.is_set() and not await within(self._clock, HELD_UP_S, claimed.wait()):
                    held_up.set()
                await claimed.wait()
        finally:
            held_up.set()
            done.set()
            self._waiting.release()
