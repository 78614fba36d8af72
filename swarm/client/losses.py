"""Decides who is to blame for a lost attempt, from the error that ended it, and how often its task may still be retried.

The server's ledger has the final say on both. Errors of HTTP libraries are recognized by their attributes, so none of these
libraries has to be installed.
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
"""Causes that use up a task's retries. `CLIENT` has its own limit, `MOST_DEATHS`; all other losses are retried without limit."""
MOST_DEATHS = 3
"""Number of times a client may die while playing one task before the task is skipped."""
_OURS = frozenset({Cause.SERVER, Cause.NETWORK})
_MISUSE = (httpx.LocalProtocolError, httpx.UnsupportedProtocol)
_PORTS = {"http": 80, "https": 443}
_Place = tuple[str, int]
"""Host and port."""


@contextmanager
def grading() -> Iterator[None]:
    """Wrap the scoring in a rollout, so that errors inside are blamed on the grader and not on the agent.

    Raises: GraderFailed if the block raises any Exception.
    """
    try:
        yield
    except GraderFailed:
        raise
    except Exception as error:
        raise GraderFailed(f"the grader failed: {type(error).__name__}: {error}") from error


def cause_of(error: BaseException, addresses: Collection[str]) -> Cause:
    """Return who is to blame for an attempt that ended with `error`. `addresses` are the URLs of the attempt's servers and models.

    If a request to one of them could not be delivered, blame the network; if the response was 5xx, blame the server. Agents wrap
    their libraries' errors, so look for such an error in the whole chain of causes and in exception groups. If the agent gave up
    waiting for a response, it hit its own time limit. Otherwise blame the rollout.
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
    """Yield the error, its causes and contexts, and the members of exception groups, each once."""
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
    """Return who is to blame for a failed request, from the error it raised.

    None if the request did not go to one of our addresses, or got a status below 500.
    """
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
    """Return the scheme (empty if unknown) and the place that the failed request was sent to.

    Reads `request.url` of errors from httpx, openai, anthropic and requests, and the attributes of errors from aiohttp and urllib.
    """
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
    """Return the HTTP status of the response that an error carries, or None."""
    response = getattr(error, "response", None)
    found = (getattr(response, "status_code", None), *(getattr(error, name, None) for name in _STATUSES))
    return next((status for status in found if isinstance(status, int)), None)


_STATUSES = ("status_code", "status", "code")
_AGENTS_LIMITS = ("ReadTimeout", "SocketTimeoutError", "ReadTimeoutError", "PoolTimeout")
"""Errors of httpx, httpcore, requests, aiohttp and urllib3 that mean that the agent was connected but its own timeout expired, or that
all connections of its own pool were in use."""


def _address(url: str) -> tuple[str, _Place | None]:
    """Return the scheme and the place of a URL."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return "", None
    return parts.scheme, _place(parts.hostname, port) if parts.hostname and port else None


def _place(host: str, port: int) -> _Place:
    """Return the place for a host and port. All names of this machine count as the same host."""
    return ("localhost" if is_loopback(host) else host.lower(), port)


# -- how often a task may still be retried -------------------------------------------------------------------------------

LONGEST_PAUSE_S = 10.0
_FIRST_PAUSE_S = 0.1


@dataclass(slots=True)
class Tries:
    """Counts of lost attempts at one task since one of its episodes last ended.

    `charged` attempts use up retries; `deaths` are attempts during which the client died.
    """

    charged: int = 0
    deaths: int = 0
    free: int = 0
    """Number of consecutive attempts lost to causes that use up no retries."""

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
        """How long to wait before the next attempt, in seconds. Grows with each consecutive loss that uses up no retries."""
        return 0.0 if self.free < 2 else min(_FIRST_PAUSE_S * 2.0 ** min(self.free - 2, 32), LONGEST_PAUSE_S)


def tries_of(entries: Iterable[LedgerEntry]) -> Tries:
    """Count the lost attempts at one task by a client's earlier processes, according to their ledger entries.

    Lost attempts that overlap in time count as one, because a single event may have ended them all.
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
    """Return the smallest number of points in time such that each of these lost episodes was open at one of them."""
    moments, last = 0, -math.inf
    for entry in sorted(entries, key=_ended_at):
        if entry.claimed_at > last:
            moments, last = moments + 1, _ended_at(entry)
    return moments
