"""Queue of claims that wait for a slot, in order of arrival. Equal claims with the same key share a ticket."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from swarm.protocol.episodes import EpisodeClaim
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.server.state.leases import digest

Granted = TypeVar("Granted")


@dataclass(frozen=True, slots=True, kw_only=True)
class NotYet:
    """The answer to a claim that cannot be granted now but may be later. `refusal` is the error for claimants that stop waiting."""

    code: ErrorCode
    detail: str
    retry_after_s: float = 1.0

    def refusal(self) -> Refusal:
        return Refusal(self.code, self.detail, retry_after_s=self.retry_after_s)


@dataclass(slots=True, eq=False)
class _Line:
    """Waiting claims that differ only in who claims. If the first must wait, so must the others."""

    reason: NotYet
    tickets: dict[int, EpisodeClaim] = field(default_factory=dict)

    @property
    def first(self) -> int:
        return next(iter(self.tickets))


class ClaimQueue:
    """The waiting claims, tried in order of arrival."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, ...], _Line] = {}
        self._line_of: dict[int, tuple[str, ...]] = {}
        self._by_key: dict[str, int] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._line_of)

    def join(self, claim: EpisodeClaim, reason: NotYet) -> int:
        """Add a claim and return its ticket. Codes: idempotency_conflict if a different claim waits under the same key."""
        key = claim.idempotency_key
        known = self._by_key.get(key) if key is not None else None
        if known is not None:
            if claim_digest(self._lines[self._line_of[known]].tickets[known]) != claim_digest(claim):
                detail = f"key {key!r} was already used for a different claim; use a new key for each claim"
                raise Refusal(ErrorCode.IDEMPOTENCY_CONFLICT, detail)
            return known
        place = (claim.run_id, claim.kind, claim.task_id, claim.mix or "", claim.client_version)
        line = self._lines.setdefault(place, _Line(reason))
        line.reason = reason
        ticket = next(self._numbers)
        line.tickets[ticket] = claim
        self._line_of[ticket] = place
        if key is not None:
            self._by_key[key] = ticket
        return ticket

    def reason(self, ticket: int) -> NotYet | None:
        """Return why this claim still waits; None if it no longer waits."""
        place = self._line_of.get(ticket)
        return None if place is None else self._lines[place].reason

    def leave(self, ticket: int) -> None:
        """Remove a claim from the queue, if it is still there."""
        place = self._line_of.pop(ticket, None)
        if place is None:
            return
        claim = self._lines[place].tickets.pop(ticket)
        if not self._lines[place].tickets:
            del self._lines[place]
        if claim.idempotency_key is not None:
            self._by_key.pop(claim.idempotency_key, None)

    def admit(self, attempt: Callable[[EpisodeClaim], Granted | NotYet]) -> list[tuple[int, Granted | Refusal]]:
        """Try the waiting claims, and return the answers to those that were granted or refused; they leave the queue."""
        answers: list[tuple[int, Granted | Refusal]] = []
        heads = [(line.first, line) for line in self._lines.values()]
        heapq.heapify(heads)
        while heads:
            ticket, line = heapq.heappop(heads)
            try:
                answer: Granted | NotYet | Refusal = attempt(line.tickets[ticket])
            except Refusal as refusal:
                answer = refusal
            if isinstance(answer, NotYet):
                line.reason = answer
                continue
            self.leave(ticket)
            answers.append((ticket, answer))
            if line.tickets:
                heapq.heappush(heads, (line.first, line))
        return answers


def claim_digest(claim: EpisodeClaim) -> str:
    return digest(claim.model_dump_json(exclude={"wait_s", "idempotency_key"}))
