"""Decides in which order a client claims episodes for its tasks. Never talks to a server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from foundation.clock import Clock
from foundation.event_loop import within

HELD_UP_S = 0.2
"""If a claim takes longer than this, in seconds, it is assumed to be waiting for its family's turn in the mix."""
READ_AHEAD = 64
"""Maximum number of tasks that may wait for their family's turn. Once it is reached, no more tasks are read from the stream."""

Begin = Callable[[], Awaitable[asyncio.Event | None]]
"""Makes one more claim as soon as there is room. Returns an event that is set once the server answers, or None to stop claiming."""


class ClaimOrder:
    """Keeps claims for tasks of one family in order. Tasks may overtake those of another family only while those are held up.

    Create one per task group.
    """

    def __init__(self, group: asyncio.TaskGroup, clock: Clock) -> None:
        self._group = group
        self._clock = clock
        self._last: dict[str | None, asyncio.Event] = {}
        """For each family, an event that is set when its newest task has made all its claims."""
        self._waiting = asyncio.Semaphore(READ_AHEAD)

    async def enter(self, family: str | None, begin: Begin, claims: int, *, may_be_passed: bool) -> None:
        """Make `claims` claims for a task in the background. Return as soon as the next task, of any family, may enter.

        `begin` makes one claim. If `may_be_passed` is false, no other task may overtake this one.
        """
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
