"""How long a request to a child may take: three times what it should take on this machine, and never less than 30 s.

What it should take is learnt from how long requests of its kind took before; a generous prior stands in for the first one.
Imports neither torch nor vllm.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from foundation.clock import Clock
from foundation.futures import within

LEAST_LIMIT_S = 30.0
FACTOR = 3.0
_KEPT = 8
"""Newest durations remembered per kind; the slowest of them counts."""
GRACE_S = 1.0
"""An answer that has arrived when the limit is over still counts: this process itself may have been suspended."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a request asks for.

    kind: durations of equal kinds are compared. amount: above 0, in any unit; durations grow with it. prior_s: how long it should take
    where no request of its kind was answered yet. least_s: what it may take however fast the others were.
    """

    kind: str
    prior_s: float
    amount: float = 1.0
    least_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A child that was found hung. since: Unix time of its last sign of life."""

    reason: str
    since: float


class Unanswered(Exception):
    """A request was not answered within its limit."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"no answer for {limit_s:.0f} s, which is the limit")
        self.limit_s = limit_s


class Expected:
    """What requests of each kind should take. A hang doubles the limit of its kind until one is answered again."""

    def __init__(self) -> None:
        self._rates: dict[str, deque[float]] = {}
        """By kind: seconds per unit of work."""
        self._hangs: Counter[str] = Counter()
        """By kind: in a row."""

    def expected_s(self, work: Work) -> float:
        rates = self._rates.get(work.kind)
        return max(work.least_s, max(rates) * work.amount if rates else work.prior_s)

    def limit_s(self, work: Work) -> float:
        """How long to wait for an answer."""
        return max(LEAST_LIMIT_S, FACTOR * self.expected_s(work)) * float(2 ** self._hangs[work.kind])

    def took(self, work: Work, seconds: float) -> None:
        """Note how long a finished request took."""
        self._rates.setdefault(work.kind, deque(maxlen=_KEPT)).append(seconds / work.amount)
        del self._hangs[work.kind]

    def hung(self, work: Work) -> None:
        """Note a request that was not answered within its limit."""
        self._hangs[work.kind] += 1

    async def answer(
        self, clock: Clock, work: Work, asked: asyncio.Future[Result], *, done: Callable[[Result], bool]
    ) -> Result:
        """The answer, within the limit of this work. done: whether it says that the work was done; how long a refusal took says nothing.

        Raises: Unanswered, with `asked` cancelled; what `asked` raises.
        """
        limit_s, began = self.limit_s(work), clock.monotonic()
        try:
            answer = await answered(clock, limit_s, asked)
        except Unanswered:
            self.hung(work)
            raise
        if done(answer):
            self.took(work, clock.monotonic() - began)
        return answer


async def answered(clock: Clock, limit_s: float, asked: asyncio.Future[Result]) -> Result:
    """The answer, within `limit_s`. Raises: Unanswered, with `asked` cancelled; what `asked` raises."""
    try:
        for seconds in (limit_s, GRACE_S):
            if await within(clock, seconds, asyncio.shield(asked)):
                return asked.result()
    finally:
        if not asked.done():
            asked.cancel()
    raise Unanswered(limit_s)
