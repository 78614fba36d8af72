"""The order in which a client claims, and the number of each claim.

Claims of one task are numbered through all `run_tasks` of a client, as they stand in the ledger. The number is part of the
claim's idempotency key: by it a client that was restarted finds what it left open. Knows no server.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

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


def claim_series(client_id: str, run_id: str, kind: str, mix: str | None, task_id: str) -> str:
    """The name of the series in which the claims of one task are numbered."""
    family = "" if mix is None else f"{mix}:"
    return f"{client_id}/{run_id}/{kind}/{family}{task_id}"


def claim_key(series: str, number: int) -> str:
    """The idempotency key of one claim of a series."""
    return f"{series}/{number}"


class ClaimNumbers:
    """The claims of one client, by series."""

    def __init__(self) -> None:
        self._next: Counter[str] = Counter()
        self.played: set[tuple[str, int]] = set()
        """Claims whose episodes are played now, or are on their way: no process before left them open."""
        self._given_back: set[tuple[str, int]] = set()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn(self, series: str) -> asyncio.Lock:
        """Held from `next` until the claim is `found`: claims of one series are made one after the other."""
        return self._turns.setdefault(series, asyncio.Lock())

    def found(self, series: str, claims: int) -> None:
        """The ledger has at least so many claims of the series."""
        self._next[series] = max(self._next[series], claims)

    def next(self, series: str) -> int:
        """The number of the claim that is made now."""
        return self._next[series]

    def give_back(self, series: str, number: int) -> bool:
        """Whether the caller is the first of several `run_tasks` that found this claim open, and so has to give it back."""
        new = (series, number) not in self._given_back
        self._given_back.add((series, number))
        return new
