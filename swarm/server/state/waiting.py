"""Claims that wait for a slot, in the order they came."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from foundation.event_loop import take_exception
from swarm.protocol.episodes import EpisodeClaim
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.server.state.admission import NotYet
from swarm.server.state.episodes import GrantedLease, claim_digest


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """One claim. `answer` gets the lease, or the refusal."""

    claim: EpisodeClaim
    answer: asyncio.Future[GrantedLease]
    line: Line
    number: int
    """In the order of arrival."""
    granted: GrantedLease | None = None
    """What was decided; `answer` has it once it is on disk."""
    claimants: int = 1
    """Requests that wait for this answer: the claim and its repetitions."""

    @property
    def reason(self) -> NotYet:
        """What to say when the wait is over."""
        return self.line.reason


@dataclass(slots=True, eq=False)
class Line:
    """Claims that only their client tells apart, in the order they came: once one has to wait on, so have those behind it."""

    reason: NotYet
    waiters: dict[Waiter, None] = field(default_factory=dict)

    @property
    def first(self) -> Waiter:
        return next(iter(self.waiters))


class Waiting:
    """A queue without jumping: who came first is tried first. An equal claim with the same key waits for the same answer."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, ...], Line] = {}
        self._by_key: dict[str, Waiter] = {}
        self._numbers = count()

    def join(self, claim: EpisodeClaim, reason: NotYet) -> Waiter:
        """Codes: idempotency_conflict when another claim waits under the same key."""
        key = claim.idempotency_key
        known = self._by_key.get(key) if key is not None else None
        if known is not None:
            if claim_digest(known.claim) != claim_digest(claim):
                detail = f"key {key!r} was used for another claim; use a fresh key for each"
                raise Refusal(ErrorCode.IDEMPOTENCY_CONFLICT, detail)
            known.claimants += 1
            return known
        line = self._lines.setdefault(_alike(claim), Line(reason))
        line.reason = reason
        answer = asyncio.get_running_loop().create_future()
        waiter = Waiter(claim=claim, answer=answer, line=line, number=next(self._numbers))
        waiter.answer.add_done_callback(take_exception)
        line.waiters[waiter] = None
        if key is not None:
            self._by_key[key] = waiter
        return waiter

    def give_up(self, waiter: Waiter) -> None:
        """One claimant waits no longer."""
        waiter.claimants -= 1
        if not waiter.claimants:
            self._leave(waiter)

    def _leave(self, waiter: Waiter) -> None:
        if waiter not in waiter.line.waiters:
            return
        del waiter.line.waiters[waiter]
        if not waiter.line.waiters:
            del self._lines[_alike(waiter.claim)]
        if waiter.claim.idempotency_key is not None:
            self._by_key.pop(waiter.claim.idempotency_key, None)

    def admit(self, attempt: Callable[[EpisodeClaim], GrantedLease | NotYet]) -> list[tuple[Waiter, GrantedLease]]:
        """Try the waiting claims. Returns those that were granted, not yet answered; those refused are answered."""
        granted: list[tuple[Waiter, GrantedLease]] = []
        heads = [(line.first.number, line) for line in self._lines.values()]
        heapq.heapify(heads)
        while heads:
            _, line = heapq.heappop(heads)
            waiter = line.first
            try:
                answer = attempt(waiter.claim)
            except Refusal as refusal:
                self._leave(waiter)
                waiter.answer.set_exception(refusal)
            else:
                if isinstance(answer, NotYet):
                    line.reason = answer
                    continue
                self._leave(waiter)
                waiter.granted = answer
                granted.append((waiter, answer))
            if line.waiters:
                heapq.heappush(heads, (line.first.number, line))
        return granted

    def dismiss(self, refusal: Refusal) -> None:
        """Nobody is admitted any more."""
        for waiter in [waiter for line in self._lines.values() for waiter in line.waiters]:
            self._leave(waiter)
            waiter.answer.set_exception(refusal)


def _alike(claim: EpisodeClaim) -> tuple[str, ...]:
    return claim.run_id, claim.kind, claim.task_id, claim.mix or "", claim.client_version
