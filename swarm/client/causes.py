"""Who lost an attempt, as far as its client can tell from the error that ended it. The server's ledger has the last word.

Errors of HTTP libraries are known by their shape alone, so that none of these libraries has to be there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx

from foundation.addresses import is_loopback
from swarm.client.errors import GraderFailed
from swarm.protocol.episodes import COUNTED, Cause
from swarm.protocol.errors import SwarmError

CHARGED = COUNTED - {Cause.CLIENT}
"""What uses up the tries of an episode. A client's death does after `MOST_DEATHS`; all else is offered again without limit."""
MOST_DEATHS = 3
"""How often a client may die over one task before the task is set aside."""
_OURS = frozenset({Cause.SERVER, Cause.NETWORK})
_MISUSE = (httpx.LocalProtocolError, httpx.UnsupportedProtocol)
_PORTS = {"http": 80, "https": 443}
_Place = tuple[str, int]
"""Host and port."""


@contextmanager
def grading() -> Iterator[None]:
    """Around the scoring in a rollout: what goes wrong inside is the grader's failure, and not the agent's.

    Raises: GraderFailed from whatever the block raises. Exceptions that only end programs pass as they are.
    """
    try:
        yield
    except GraderFailed:
        raise
    except Exception as error:
        raise GraderFailed(f"the grader failed: {type(error).__name__}: {error}") from error


def cause_of(error: BaseException, addresses: Collection[str]) -> Cause:
    """Who lost an attempt that ended with this error. addresses: urls of its servers and of the models that it was given.

    A request to one of them that could not be delivered was lost by the network, one that was answered 5xx by the server,
    wherever it stands in the chain of causes or in a group: agents wrap what their libraries raise. An agent that would not
    wait for its answer set a limit of its own (the server knows when it was at fault itself). All else is the rollout's.
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
    """The error, what it was raised from or while handling, and the members of groups; each once."""
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
    """Who lost a request that this error is about; None where it is about none of ours, or was answered below 500."""
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
    """Scheme, where it is known, and place to which the failed request went: `request.url` (httpx, openai, anthropic, requests), aiohttp's and urllib's ways."""
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
    """Of the answer; None where there was none."""
    response = getattr(error, "response", None)
    found = (getattr(response, "status_code", None), *(getattr(error, name, None) for name in _STATUSES))
    return next((status for status in found if isinstance(status, int)), None)


_STATUSES = ("status_code", "status", "code")
_AGENTS_LIMITS = ("ReadTimeout", "SocketTimeoutError", "ReadTimeoutError", "PoolTimeout")
"""Of httpx, httpcore and requests; of aiohttp; of urllib3. The connection stood, and the answer took longer than the agent would
wait; or all connections of its own pool were taken."""


def _address(url: str) -> tuple[str, _Place | None]:
    """Scheme and place."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return "", None
    return parts.scheme, _place(parts.hostname, port) if parts.hostname and port else None


def _place(host: str, port: int) -> _Place:
    """All names of this machine are one."""
    return ("localhost" if is_loopback(host) else host.lower(), port)
