"""Open episodes with their leases and deadlines. Lease time stands still while the server is not serving."""

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
    """Return the digest that we store for a secret or a body: enough to recognise it, but not to reproduce it."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:32]


def held_it(row: EpisodeRow, lease: str) -> bool:
    """True if the episode was claimed under this lease."""
    return hmac.compare_digest(row.lease_digest, digest(lease))


@dataclass(slots=True)
class LeaseClock:
    """Clock that runs only while the server serves. It stands still before the first `go`, and between `stop` and `go`."""

    gone_by: float = 0.0
    running_since: float | None = None
    """Monotonic time of the last `go`; None while the clock stands still."""

    def time(self, monotonic: float) -> float:
        return self.gone_by if self.running_since is None else self.gone_by + monotonic - self.running_since

    def go(self, monotonic: float) -> None:
        if self.running_since is None:
            self.running_since = monotonic

    def stop(self, monotonic: float) -> None:
        self.gone_by, self.running_since = self.time(monotonic), None


@dataclass(slots=True, kw_only=True)
class LiveEpisode:
    """An open episode: its row, and fields that are kept only in memory. Times are lease time."""

    row: EpisodeRow
    lease: str
    api_key: str = ""
    idle_limit_s: float
    idle_at: float
    """When the idle limit runs out, unless a call is open."""
    ends_at: float = math.inf
    """When the episode exceeds its max_episode_s."""
    max_call_s: float = math.inf
    guest: bool = False
    """Whether the episode was claimed with a `GuestClaim`."""
    session: str | None = None
    claim_key: str | None = None
    claim_digest: str = ""
    calls: list[RecordedCall] = field(default_factory=list)
    attempts: list[CallAttempt] = field(default_factory=list)
    """The finished requests of the episode's agents."""
    refusal: str = ""
    """Why the episode's last request was refused; empty if it was not."""
    calls_opened: int = 0
    open_since: dict[int, float] = field(default_factory=dict)
    """Maps the index of each open call to the time at which it was opened."""
    expiry: tuple[Cause, str] | None = None
    """Why the episode expired. Set while it waits for the records of the calls that were open at that time."""
    close_at: float = math.inf
    """When an expired episode is closed even if records of its calls are still missing."""
    check_at: float = math.inf
    """Time of its next entry in `Deadlines`; set by `Deadlines.watch`."""
    cached_entry: LedgerEntry | None = None

    @property
    def deadline(self) -> float:
        if self.open_since:
            return min(self.ends_at, min(self.open_since.values()) + self.max_call_s)
        return min(self.idle_at, self.ends_at)

    def look_at(self, now: float) -> float:
        """Return when to check whether it has expired. An open call pauses the idle limit; then check after at most one full limit."""
        if self.expiry is not None:
            return self.close_at
        return min(self.deadline, now + self.idle_limit_s) if self.open_since else self.deadline

    def ran_out(self, now: float) -> bool:
        return self.expiry is not None or self.deadline <= now

    def touch(self, now: float) -> None:
        self.idle_at = now + self.idle_limit_s

    def explained(self, detail: str) -> str:
        """Return the detail to store in its row, with the reason if its last request was refused."""
        return f"{detail}; its last request was refused: {self.refusal}" if self.refusal else detail

    def count_calls(self) -> None:
        """Write into the row the totals of its calls, and whether a failed call tainted it."""
        count_tokens(self.row, self.calls)
        self.row.tainted = is_tainted(self.attempts)

    def entry(self) -> LedgerEntry:
        """Return the ledger entry, including the calls so far."""
        if self.cached_entry is None:
            self.count_calls()
            self.cached_entry = self.row.entry()
        return self.cached_entry


@dataclass(slots=True, kw_only=True)
class Prepared:
    """An episode that waits for its team's decision. It survives a restart, because it needs only the lease's digest."""

    row: EpisodeRow
    team: TeamRow
    in_doubt: bool = False
    """Whether the decision may never be reported, because the client was silent for too long or the server restarted."""
    silent_at: float = math.inf
    """Lease time at which the client has been silent for too long."""

    @property
    def asks(self) -> bool:
        """Whether this server should ask the decider now. If this server is the decider, it asks nobody."""
        return self.in_doubt and not self.team.decides

    def touch(self, now: float) -> None:
        self.silent_at = now + self.team.patience_s


LEAST_SWEPT = 1024
"""Minimum number of deadlines for which a sweep is worth its cost."""


class Deadlines:
    """Names, ordered by the time at which to check each one. Entries may be early or outdated, so the caller must check them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._sweep_at = LEAST_SWEPT

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, name: str) -> None:
        if at < math.inf:
            heapq.heappush(self._heap, (at, name))

    def watch(self, live: LiveEpisode, now: float) -> None:
        """Make sure that this episode is checked in time. Call this whenever its lease may have changed. Adds an entry only if the next
        one is too late."""
        at = live.look_at(now)
        if at < live.check_at:
            live.check_at = at
            self.add(at, live.row.episode_id)

    def sweep(self, wanted: Callable[[str], bool]) -> None:
        """Remove names that are no longer `wanted`, once the number of entries has doubled since the last sweep."""
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if wanted(entry[1])]
            heapq.heapify(self._heap)
            self._sweep_at = max(LEAST_SWEPT, 2 * len(self._heap))

    def next(self) -> float:
        """Return the earliest time; infinite if there are no deadlines."""
        return self._heap[0][0] if self._heap else math.inf

    def take(self, now: float) -> list[str]:
        """Remove and return the names that are due, earliest first."""
        due: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[1])
        return due
