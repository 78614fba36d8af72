"""The numbers of a client's claims: those of one task count on through all its crews, as they stand in the ledger.

By them a client that was restarted finds what it left open. Knows no server.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from weakref import WeakValueDictionary


def numbered(client_id: str, run_id: str, kind: str, mix: str | None, task_id: str) -> str:
    """What numbers its claims by itself. With a claim's number after it, the claim's idempotency key (`claim_key`)."""
    family = "" if mix is None else f"{mix}:"
    return f"{client_id}/{run_id}/{kind}/{family}{task_id}"


def claim_key(task: str, ordinal: int) -> str:
    """task: as `numbered` names it."""
    return f"{task}/{ordinal}"


class Ordinals:
    """Of one client. A `task` is whatever numbers its claims by itself: a task of one family, kind and run."""

    def __init__(self) -> None:
        self._next: Counter[str] = Counter()
        self.played: set[tuple[str, int]] = set()
        """Claims whose episodes are played now, or are on their way: no process before left them open."""
        self._given_back: set[tuple[str, int]] = set()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn(self, task: str) -> asyncio.Lock:
        """To be held from `next` to `made`: claims of one task are made one after the other."""
        return self._turns.setdefault(task, asyncio.Lock())

    def found(self, task: str, claims: int) -> None:
        """So many are in the ledger."""
        self._next[task] = max(self._next[task], claims)

    def next(self, task: str) -> int:
        """The number of the claim that is made now."""
        return self._next[task]

    def made(self, task: str, ordinal: int) -> None:
        """Its episode is there."""
        self.found(task, ordinal + 1)

    def give_back(self, task: str, ordinal: int) -> bool:
        """Whether it is the asker who has to give an episode back: of several crews that found it open, the first."""
        new = (task, ordinal) not in self._given_back
        self._given_back.add((task, ordinal))
        return new
