"""How often a task may still be tried. Losses of its rollout are charged to it; those of server, network or a person are not.

The counts are made from the ledger, so that they outlive the client. Attempts that overlap in time count as one: what kills
all attempts at a task at one moment has happened to it once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm.client.causes import CHARGED, MOST_DEATHS
from swarm.protocol.episodes import Cause, EpisodeState, LedgerEntry

LONGEST_PAUSE_S = 10.0
_FIRST_PAUSE_S = 0.1


@dataclass(slots=True)
class Tries:
    """Of one episode that shall end. Begins with what its task has lost since an episode of it ended last."""

    charged: int = 0
    deaths: int = 0
    free: int = 0
    """Attempts in a row that the task is not to blame for."""

    def lost(self, cause: Cause) -> None:
        if cause in CHARGED:
            self.charged, self.free = self.charged + 1, 0
        elif cause is Cause.CLIENT:
            self.deaths, self.free = self.deaths + 1, 0
        else:
            self.free += 1

    def used_up(self, retries: int) -> bool:
        return self.charged > retries or self.deaths >= MOST_DEATHS

    @property
    def pause_s(self) -> float:
        """How long to wait before the next: nothing at first, then longer and longer while others lose it."""
        return 0.0 if self.free < 2 else min(_FIRST_PAUSE_S * 2.0 ** min(self.free - 2, 32), LONGEST_PAUSE_S)


@dataclass(slots=True)
class TaskRecord:
    """What the ledger of one run says of one task, for one client in one version of its code."""

    entries: list[LedgerEntry] = field(default_factory=list)

    def tries(self) -> Tries:
        """Used up by processes before this one. What they left open they have lost."""
        counted = [one for one in self.entries if one.state is not EpisodeState.DROPPED or one.cause is None]
        last_end = max((_ended_at(one) for one in counted if one.reward is not None), default=-math.inf)
        since = [one for one in self.entries if _ended_at(one) > last_end]
        charged = [one for one in since if one.cause in CHARGED]
        deaths = [one for one in since if one.cause is Cause.CLIENT or one.state is EpisodeState.RUNNING]
        return Tries(charged=moments(charged), deaths=moments(deaths))


def _ended_at(entry: LedgerEntry) -> float:
    if entry.state in (EpisodeState.RUNNING, EpisodeState.PREPARED):
        return math.inf
    return entry.claimed_at if entry.ended_at is None else entry.ended_at


def moments(entries: Iterable[LedgerEntry]) -> int:
    """The fewest moments at which all of these can have been lost, if each was lost while it was open."""
    moments, last = 0, -math.inf
    for entry in sorted(entries, key=_ended_at):
        if entry.claimed_at > last:
            moments, last = moments + 1, _ended_at(entry)
    return moments
