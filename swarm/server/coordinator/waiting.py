"""Claims that wait for a slot, in the order they came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from swarm.protocol.episodes import EpisodeClaim
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.server.coordinator.admission import NotYet
from swarm.server.coordinator.episodes import GrantedLease, claim_digest


@dataclass(slots=True, kw_only=True)
class Waiter:
    """One claim. `answer` gets the lease, or the refusal; `reason` is what to say when the wait is over."""

    claim: EpisodeClaim
    answer: asyncio.Future[GrantedLease]
    reason: NotYet
    granted: GrantedLease | None = None
    """What was decided; `answer` has it once it is on disk."""
    claimants: int = 1
    """Requests that wait for this answer: the claim and its repetitions."""


class Waiting:
    """A queue without jumping: who came first is tried first. An equal claim with the same key waits for the same answer."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []
        self._by_key: dict[str, Waiter] = {}

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
        waiter = Waiter(claim=claim, answer=asyncio.get_running_loop().create_future(), reason=reason)
        waiter.answer.add_done_callback(_seen)
        self._waiters.append(waiter)
        if key is not None:
            self._by_key[key] = waiter
        return waiter

    def give_up(self, waiter: Waiter) -> None:
        """One claimant waits no longer."""
        waiter.claimants -= 1
        if not waiter.claimants:
            self._leave(waiter)

    def _leave(self, waiter: Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            if waiter.claim.idempotency_key is not None:
                self._by_key.pop(waiter.claim.idempotency_key, None)

    def admit(self, attempt: Callable[[EpisodeClaim], GrantedLease | NotYet]) -> list[tuple[Waiter, GrantedLease]]:
        """Try every waiting claim. Returns those that were granted, not yet answered; those refused are answered.

        Claims that only their client tells apart are answered alike: once one has to wait on, so have the others.
        """
        granted: list[tuple[Waiter, GrantedLease]] = []
        waits: dict[tuple[str, ...], NotYet] = {}
        for waiter in list(self._waiters):
            alike = _alike(waiter.claim)
            if alike in waits:
                waiter.reason = waits[alike]
                continue
            try:
                answer = attempt(waiter.claim)
            except Refusal as refusal:
                self._leave(waiter)
                waiter.answer.set_exception(refusal)
                continue
            if isinstance(answer, NotYet):
                waiter.reason = waits[alike] = answer
            else:
                self._leave(waiter)
                waiter.granted = answer
                granted.append((waiter, answer))
        return granted

    def dismiss(self, refusal: Refusal) -> None:
        """Nobody is admitted any more."""
        for waiter in list(self._waiters):
            self._leave(waiter)
            waiter.answer.set_exception(refusal)


def _alike(claim: EpisodeClaim) -> tuple[str, ...]:
    return claim.run_id, claim.kind, claim.task_id, claim.mix or "", claim.client_version


def _seen(answer: asyncio.Future[GrantedLease]) -> None:
    if not answer.cancelled():
        answer.exception()
