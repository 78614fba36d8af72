"""Decides who lost an attempt, from the error that ended it, and how often its task may still be tried.

The server's ledger has the last word on both. Errors of HTTP libraries are recognised by their attributes, so that none of
them has to be installed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from foundation.addresses import is_loopback
from swarm.client.errors import GraderFailed
from swarm.protocol.episodes import COUNTED, Cause, EpisodeState, LedgerEntry
from swarm.protocol.errors import SwarmError

CHARGED = COUNTED - {Cause.CLIENT}
"""Causes that use up a task's tries. `CLIENT` does so after `MOST_DEATHS`; losses by other causes are retried without limit."""
MOST_DEATHS = 3
"""How often a client may die while it plays one task before the task is skipped."""
_OURS = frozenset({Cause.SERVER, Cause.NETWORK})
_MISUSE = (httpx.LocalProtocolError, httpx.UnsupportedProtocol)
_PORTS = {"http": 80, "https": 443}
_Place = tuple[str, int]
"""Host and port."""


@contextmanager
def grading() -> Iterator[None]:
    """Put this around the scoring in a rollout: errors inside count as the grader's, not the agent's.

    Raises: GraderFailed for any Exception of the block.
    """
    try:
        yield
    except GraderFailed:
        raise
    except Exception as error:
        raise GraderFailed(f"the grader failed: {type(error).__name__}: {error}") from error


def cause_of(error: BaseException, addresses: Collection[str]) -> Cause:
    """Who lost an attempt that ended with this error. addresses: urls of its servers and of its models.

    If a request to one of them could not be delivered, the network lost the attempt; if it was answered 5xx, the server did.
    Such an error may be anywhere in the chain of causes or in a group, because agents wrap their libraries' errors. An agent
    that gave up waiting for an answer hit its own limit. Otherwise the rollout lost the attempt.
    """
    if isinstance(error, KeyboardInterrupt):
        return Cause.PERSON
    chain = list(_chain(error))
    stated = [one.cause for one in chain if isinstance(one, SwarmError)]
    ours = {place: scheme for scheme, place in map(_address, addresses)}
    failed = [*(_of_request(one, ours) for one in chain), *(cause for cause in stated if cause in _OURS)]
    cause = next((cause for cause in (*failed, *stated) if cause is not None), Cause.ROLLOUT)
    impatient = not stated and any(type(one).__name__ in _AGENTS_LIMITS for one in chain)
    return Cause.LIMIT if impatient and cause is Cause.NETWORK else cause


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes and contexts, and the members of exception groups; each once."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        left += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions


def _of_request(error: BaseException, ours: Mapping[_Place | None, str]) -> Cause | None:
    """Who lost the request that raised this error. None if the request is not one of ours, or got a status below 500."""
    if isinstance(error, _MISUSE) or (
        isinstance(error, httpx.RequestError) and not isinstance(error, httpx.TransportError)
    ):
        return None
    scheme, place = _asked(error)
    if place is None or place not in ours or scheme not in ("", ours[place]):
        return None
    status = _status(error)
    if status is None:
        return Cause.NETWORK
    return Cause.SERVER if status >= 500 else None


def _asked(error: BaseException) -> tuple[str, _Place | None]:
    """Scheme, if it is known, and place of the failed request. Reads `request.url` (httpx, openai, anthropic, requests) and the
    attributes of aiohttp's and urllib's errors."""
    try:
        request = getattr(error, "request", None) or getattr(error, "request_info", None)
    except RuntimeError:  # httpx: no request was ever made
        return "", None
    url = getattr(request, "url", None) or getattr(error, "url", None)
    if url is not None:
        return _address(str(url))
    host, port = getattr(error, "host", None), getattr(error, "port", None)
    return "", _place(host, port) if isinstance(host, str) and isinstance(port, int) else None


def _status(error: BaseException) -> int | None:
    """The HTTP status of the answer; None if there was none."""
    response = getattr(error, "response", None)
    found = (getattr(response, "status_code", None), *(getattr(error, name, None) for name in _STATUSES))
    return next((status for status in found if isinstance(status, int)), None)


_STATUSES = ("status_code", "status", "code")
_AGENTS_LIMITS = ("ReadTimeout", "SocketTimeoutError", "ReadTimeoutError", "PoolTimeout")
"""Errors of httpx, httpcore and requests, of aiohttp, and of urllib3 that mean: the agent was connected but its timeout expired, or all
connections of its own pool were in use."""


def _address(url: str) -> tuple[str, _Place | None]:
    """Scheme and place."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return "", None
    return parts.scheme, _place(parts.hostname, port) if parts.hostname and port else None


def _place(host: str, port: int) -> _Place:
    """The place of a host and port; all names of this machine count as the same host."""
    return ("localhost" if is_loopback(host) else host.lower(), port)


# -- how often a task may still be tried ---------------------------------------------------------------------------------

LONGEST_PAUSE_S = 10.0
_FIRST_PAUSE_S = 0.1


@dataclass(slots=True)
class Tries:
    """Counts the lost attempts at one task since one of its episodes last ended."""

    charged: int = 0
    deaths: int = 0
    free: int = 0
    """Number of consecutive attempts lost by causes that are not charged."""

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
        """How long to wait before the next attempt; it grows while causes that are not charged keep losing it."""
        return 0.0 if self.free < 2 else min(_FIRST_PAUSE_S * 2.0 ** min(self.free - 2, 32), LONGEST_PAUSE_S)


def tries_of(entries: Iterable[LedgerEntry]) -> Tries:
    """The tries of one task that a client's earlier processes have used up, according to its ledger entries.

    Attempts that overlap in time count as one, because a single event may have ended them all.
    """
    tried = list(entries)
    counted = [one for one in tried if one.state is not EpisodeState.DROPPED or one.cause is None]
    last_end = max((_ended_at(one) for one in counted if one.reward is not None), default=-math.inf)
    since = [one for one in tried if _ended_at(one) > last_end]
    charged = [one for one in since if one.cause in CHARGED]
    deaths = [one for one in since if one.cause is Cause.CLIENT]
    return Tries(charged=moments(charged), deaths=moments(deaths))


def _ended_at(entry: LedgerEntry) -> float:
    if entry.state is EpisodeState.PREPARED:
        return math.inf
    return entry.claimed_at if entry.ended_at is None else entry.ended_at


def moments(entries: Iterable[LedgerEntry]) -> int:
    """The smallest number of moments that explains all of these losses, if each was lost while it was open."""
    moments, last = 0, -math.inf
    for entry in sorted(entries, key=_ended_at):
        if entry.claimed_at > last:
            moments, last = moments + 1, _ended_at(entry)
    return moments
