"""Leases: who holds which open episode, and when it runs out. Lease time stands still while the server does not serve."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from foundation.clock import Clock
from swarm.protocol.episodes import LedgerEntry, RecordedCall
from swarm.server.state.calls import CallAttempt, Ending, is_tainted
from swarm.server.state.rows import EpisodeRow

API_KEY_PREFIX = "swk_"


def digest(text: str | bytes) -> str:
    """What is kept of a secret or a body: enough to know it again, not to make it."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:32]


class LeaseClock:
    """Seconds that the server has been serving. Stands still until `go`, and between `stop` and `go`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._gone_by = 0.0
        self._running_since: float | None = None

    @property
    def runs(self) -> bool:
        return self._running_since is not None

    def time(self) -> float:
        if self._running_since is None:
            return self._gone_by
        return self._gone_by + self._clock.monotonic() - self._running_since

    def go(self) -> None:
        if self._running_since is None:
            self._running_since = self._clock.monotonic()

    def stop(self) -> None:
        self._gone_by = self.time()
        self._running_since = None


@dataclass(slots=True, kw_only=True)
class LiveEpisode:
    """An open episode: its row, and what only memory knows of it. Times are lease time."""

    row: EpisodeRow
    lease: str
    api_key: str = ""
    idle_limit_s: float
    idle_at: float
    """When the idle limit runs out, unless a call is open."""
    ends_at: float = math.inf
    """When max_episode_s runs out."""
    max_call_s: float = math.inf
    claim_key: str | None = None
    claim_digest: str = ""
    calls: list[RecordedCall] = field(default_factory=list)
    attempts: list[CallAttempt] = field(default_factory=list)
    """Requests of its agents that are over."""
    calls_opened: int = 0
    open_since: dict[int, float] = field(default_factory=dict)
    """Index of each open call → when it was opened."""
    cached_entry: LedgerEntry | None = None
    ending: Ending = field(default_factory=Ending)

    @property
    def deadline(self) -> float:
        if self.open_since:
            return min(self.ends_at, min(self.open_since.values()) + self.max_call_s)
        return min(self.idle_at, self.ends_at)

    def look_at(self, now: float) -> float:
        """When to look whether it ran out. While a call is open the idle limit stands still: after a whole one at most."""
        return min(self.deadline, now + self.idle_limit_s) if self.open_since else self.deadline

    def attempted(self, attempt: CallAttempt) -> None:
        """A request is over: it may have tainted the episode, or made a failure good."""
        self.attempts.append(attempt)
        self.cached_entry = None

    def touch(self, now: float) -> None:
        self.idle_at = now + self.idle_limit_s

    def entry(self) -> LedgerEntry:
        """The ledger's entry, with the calls so far."""
        row = self.row
        if self.cached_entry is None or self.cached_entry.calls != len(self.calls):
            row.calls = len(self.calls)
            row.prompt_tokens = sum(len(call.prompt_ids) for call in self.calls)
            row.sampled_tokens = sum(len(call.sampled_ids) for call in self.calls)
            row.tainted = is_tainted(self.attempts)
            self.cached_entry = row.entry()
        return self.cached_entry


class Deadlines:
    """Names by the time at which each must be looked at. Entries may be early or out of date: whoever takes one checks."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, name: str) -> None:
        if at < math.inf:
            heapq.heappush(self._heap, (at, name))

    def keep(self, wanted: Callable[[str], bool]) -> None:
        """Forget every other name."""
        self._heap = [entry for entry in self._heap if wanted(entry[1])]
        heapq.heapify(self._heap)

    def next(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> list[str]:
        """Names whose time has come, earliest first."""
        due: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[1])
        return due
