"""Who holds which episode, and when a lease runs out. Lease time stands still while the server does not serve."""

from __future__ import annotations

import hashlib
import heapq
import hmac
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.protocol.episodes import Cause, LedgerEntry, RecordedCall
from swarm.server.state.calls import CallAttempt, count_tokens, is_tainted
from swarm.server.state.rows import EpisodeRow, TeamRow

API_KEY_PREFIX = "swk_"


def digest(text: str | bytes) -> str:
    """What is kept of a secret or a body: enough to recognise it, not to make it."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:32]


def held_it(row: EpisodeRow, lease: str) -> bool:
    """Whether the episode was claimed under this lease."""
    return hmac.compare_digest(row.lease_digest, digest(lease))


@dataclass(slots=True)
class LeaseClock:
    """Seconds that the server has been serving. Stands still until `go`, and between `stop` and `go`."""

    gone_by: float = 0.0
    running_since: float | None = None
    """Monotonic time."""

    def time(self, monotonic: float) -> float:
        return self.gone_by if self.running_since is None else self.gone_by + monotonic - self.running_since

    def go(self, monotonic: float) -> None:
        if self.running_since is None:
            self.running_since = monotonic

    def stop(self, monotonic: float) -> None:
        self.gone_by, self.running_since = self.time(monotonic), None


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
    guest: bool = False
    """Claimed by a `GuestClaim`."""
    session: str | None = None
    claim_key: str | None = None
    claim_digest: str = ""
    calls: list[RecordedCall] = field(default_factory=list)
    attempts: list[CallAttempt] = field(default_factory=list)
    """Requests of its agents that are over."""
    calls_opened: int = 0
    open_since: dict[int, float] = field(default_factory=dict)
    """Index of each open call → when it was opened."""
    expiry: tuple[Cause, str] | None = None
    """Why it ran out, while it waits for the records of calls that were open then."""
    close_at: float = math.inf
    """When it is closed without those that are still missing."""
    cached_entry: LedgerEntry | None = None

    @property
    def deadline(self) -> float:
        if self.open_since:
            return min(self.ends_at, min(self.open_since.values()) + self.max_call_s)
        return min(self.idle_at, self.ends_at)

    def look_at(self, now: float) -> float:
        """When to check whether it ran out. An open call stops the idle limit: then after one whole limit at most."""
        if self.expiry is not None:
            return self.close_at
        return min(self.deadline, now + self.idle_limit_s) if self.open_since else self.deadline

    def ran_out(self, now: float) -> bool:
        return self.expiry is not None or self.deadline <= now

    def touch(self, now: float) -> None:
        self.idle_at = now + self.idle_limit_s

    def count_calls(self) -> None:
        """Write into the row what its calls add up to, and whether one of them tainted it."""
        count_tokens(self.row, self.calls)
        self.row.tainted = is_tainted(self.attempts)

    def entry(self) -> LedgerEntry:
        """The ledger's entry, with the calls so far."""
        if self.cached_entry is None:
            self.count_calls()
            self.cached_entry = self.row.entry()
        return self.cached_entry


@dataclass(slots=True, kw_only=True)
class Prepared:
    """An episode that waits for its team's decision. Its lease is known by its digest alone, so it outlives the process."""

    row: EpisodeRow
    team: TeamRow
    in_doubt: bool = False
    """Its client was silent for too long, or the server was restarted: nobody may come to say what was decided."""
    silent_at: float = math.inf
    """Lease time at which the client has been silent for too long."""

    @property
    def asks(self) -> bool:
        """Whether it should ask its decider now. The decider itself has nobody to ask."""
        return self.in_doubt and not self.team.decides

    def touch(self, now: float) -> None:
        self.silent_at = now + self.team.patience_s


LEAST_SWEPT = 1024
"""So few deadlines are not worth looking through for those of what is closed."""


class Deadlines:
    """Names by the time at which to check each. Entries may be early or out of date: whoever takes one checks."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._sweep_at = LEAST_SWEPT

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, name: str) -> None:
        if at < math.inf:
            heapq.heappush(self._heap, (at, name))

    def sweep(self, wanted: Callable[[str], bool]) -> None:
        """Forget every other name, whenever there are twice as many as were wanted the last time."""
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if wanted(entry[1])]
            heapq.heapify(self._heap)
            self._sweep_at = max(LEAST_SWEPT, 2 * len(self._heap))

    def next(self) -> float:
        """Infinite when there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def take(self, now: float) -> list[str]:
        """Names whose time has come, earliest first."""
        due: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[1])
        return due
