"""The order in which a client makes its claims. Knows no server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from foundation.clock import Clock
from foundation.event_loop import within

HELD_UP_S = 0.2
"""A claim that takes longer is assumed to wait for its family's turn in the mix."""
READ_AHEAD = 64
"""Most tasks that may wait for their family's turn; beyond them the stream of tasks waits too."""

Begin = Callable[[], Awaitable[asyncio.Event | None]]
"""Make one more claim as soon as there is room. Returns an event that is set once the claim is answered; None: no more claims."""


class ClaimOrder:
    """Makes the tasks of one family claim in order, and lets them pass another family's tasks only while those are held up. Use one
    per task group."""

    def __init__(self, group: asyncio.TaskGroup, clock: Clock) -> None:
        self._group = group
        self._clock = clock
        self._last: dict[str | None, asyncio.Event] = {}
        """Set when the newest task of a family has all its claims."""
        self._waiting = asyncio.Semaphore(READ_AHEAD)

    async def enter(self, family: str | None, begin: Begin, claims: int, *, may_be_passed: bool) -> None:
        """Make `claims` claims for a task. Returns when the next task may follow, whatever its family."""
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
