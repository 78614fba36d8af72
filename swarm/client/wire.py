"""The client's only access to the network: sends a request, and returns the response body or raises a typed error.

Knows HTTP, JSON, retries and problem documents, but nothing about runs or episodes. Branches only on error codes.
"""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from foundation.addresses import is_loopback
from foundation.clock import Clock
from swarm.client.errors import (
    InvalidSpec,
    NotASwarmServer,
    ServerUnreachable,
    StorageFull,
    TryLater,
    refusal,
)
from swarm.protocol.errors import ErrorCode
from swarm.protocol.problem import Problem
from swarm.protocol.runspec import AS_STORED

Model = TypeVar("Model", bound=BaseModel)

_PROBLEM_FIELDS = frozenset(Problem.model_fields)
_LOG = logging.getLogger(__name__)
_SILENT_S = 2.0
"""Time without a response, in seconds, after which a warning is logged."""
_GATEWAY_STATUSES = frozenset({502, 503, 504})
"""Statuses that a proxy returns when the server behind it is down. A response with a problem document comes from the server itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to retry a request in each situation, in seconds. Zero means no retry.

    Args:
        connect_s: while nothing answers.
        later_s: while the server says to try later.
        full_s: while the server's disk is full.
        first_delay_s: pause before the first retry. It doubles with each retry.
        longest_delay_s: maximum pause between retries.
    """

    connect_s: float = 60.0
    later_s: float = 900.0
    full_s: float = 0.0
    first_delay_s: float = 0.05
    longest_delay_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("connect_s", "later_s", "full_s", "first_delay_s", "longest_delay_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


class Wire:
    """Sends requests to one server over a shared connection pool."""

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        patience: Patience,
        clock: Clock,
        jitter: random.Random,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = checked_url(url)
        self.patience = patience
        self.heard = False
        """Whether the server has ever answered."""
        self._clock = clock
        self._jitter = jitter
        self._told = False
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if checked_token(token) else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=128, keepalive_expiry=30.0),
            timeout=httpx.Timeout(30.0, connect=5.0, pool=None),
            trust_env=not is_loopback(httpx.URL(self.url).host),
            transport=transport,
        )

    def with_patience(self, patience: Patience) -> Wire:
        """Return a copy with another patience that shares the connections. Closing either one closes the connections."""
        other = copy.copy(self)
        other.patience = patience
        return other

    async def close(self) -> None:
        await self._http.aclose()

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        params: dict[str, str | int | float] | None = None,
        headers: dict[str, str] | None = None,
        wait_s: float = 0.0,
        repeatable: bool = True,
        patience: Patience | None = None,
    ) -> bytes:
        """Send a request and return the body of a 2xx response.

        Args:
            method: the HTTP method.
            path: the path on the server.
            body: the JSON body, encoded.
            params: query parameters.
            headers: headers to send in addition to the usual ones.
            wait_s: how long the server may hold the request before it responds.
            repeatable: whether sending the request twice is harmless. If not, do not retry when it may have arrived.
            patience: how long to retry; None means the default of this object.
        Raises: the Refusal for the response's error code, ServerUnreachable, NotASwarmServer.
        """
        patience = patience or self.patience
        silent_since: float | None = None
        later_since: float | None = None
        full_since: float | None = None
        delay_s = patience.first_delay_s
        while True:
            longest_s = math.inf
            asked_at = self._clock.monotonic()
            try:
                answer = await self._once(method, path, body, params or {}, headers or {}, wait_s)
                self._told = False
                return answer
            except TryLater as later:
                silent_since = full_since = None
                later_since = asked_at if later_since is None else later_since
                if self._clock.monotonic() - later_since >= patience.later_s:
                    raise
                if 0 < wait_s <= self._clock.monotonic() - asked_at:
                    continue  # the server has already waited
                pause_s = max(delay_s, later.retry_after_s)
            except StorageFull:
                silent_since = None
                full_since = asked_at if full_since is None else full_since
                if asked_at - full_since >= patience.full_s:
                    raise
                pause_s = delay_s
            except ServerUnreachable as error:
                silent_since = asked_at if silent_since is None else silent_since
                silent_s = asked_at - silent_since
                may_repeat = repeatable or not isinstance(error, _Unanswered)
                if silent_s >= patience.connect_s or not may_repeat:
                    raise self._unreachable(error) from error
                # Try for the last time when patience runs out.
                pause_s, longest_s = delay_s, patience.connect_s - silent_s
                if not self._told and silent_s >= _SILENT_S:
                    self._told = True
                    _LOG.warning(
                        "no swarm server answers at %s (%s); retrying for up to %.0f s",
                        self.url,
                        error,
                        patience.connect_s,
                    )
            await self._clock.sleep(min(pause_s * self._jitter.uniform(0.75, 1.25), longest_s))
            delay_s = min(2 * delay_s, patience.longest_delay_s)

    async def _once(
        self,
        method: str,
        path: str,
        body: bytes | None,
        params: dict[str, str | int | float],
        headers: dict[str, str],
        wait_s: float,
    ) -> bytes:
        if body is not None:
            headers = {"Content-Type": "application/json", **headers}
        timeout = httpx.Timeout(30.0 + wait_s, connect=5.0, pool=None)
        try:
            answer = await self._http.request(
                method, path, content=body, params=params, headers=headers, timeout=timeout
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise InvalidSpec(ErrorCode.INVALID_SPEC, f"{path!r} is not a valid request path: {error}") from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerUnreachable(str(error) or type(error).__name__) from error
        except httpx.TransportError as error:
            raise _Unanswered(str(error) or type(error).__name__) from error
        if answer.is_success:
            self.heard = True
            return answer.content
        raise _error_of(answer, heard=self.heard)

    def _unreachable(self, error: Exception) -> ServerUnreachable:
        return ServerUnreachable(
            f"no swarm server answers at {self.url} ({error}); start one with `swarm serve`, or check the url",
            self.url,
        )


class _Unanswered(ServerUnreachable):
    """The request may have arrived, but its response did not."""


def checked_url(url: str) -> str:
    """Return `url` without a trailing slash. Raises: NotASwarmServer if it is not the URL of a server."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise NotASwarmServer(f"{url!r} is not a url ({error}); a url looks like http://127.0.0.1:8642") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 0) > 65_535:
        raise NotASwarmServer(f"{url!r} is not the url of a server; a url looks like http://127.0.0.1:8642")
    return url.rstrip("/")


def checked_token(token: str | None) -> str | None:
    """Return the token. Raises: ValueError, which does not quote the token, if it cannot be sent in a header."""
    if token and not (token.isascii() and token.isprintable()):
        raise ValueError("a token must be one line of printable ASCII characters")
    return token


def _error_of(answer: httpx.Response, *, heard: bool) -> Exception:
    """Return the typed error for a response.

    `heard` means that a swarm server has answered at this address before, so a server error without a code must come from a proxy.
    """
    try:
        problem = Problem.model_validate_json(answer.content)
    except ValidationError:
        if answer.status_code in _GATEWAY_STATUSES or (heard and answer.is_server_error):
            return _Unanswered(f"HTTP {answer.status_code}")
        where = f"{answer.request.method} {answer.request.url.path}"
        return NotASwarmServer(
            f"{where} answered HTTP {answer.status_code} without an error code; is this a swarm server?"
        )
    fields: dict[str, Any] = {
        key: value for key, value in (problem.model_extra or {}).items() if key not in _PROBLEM_FIELDS
    }
    return refusal(problem.code, problem.detail, fields)


# -- messages as JSON -----------------------------------------------------------------------------------------------------


def written(message: BaseModel) -> bytes:
    """Return the message as JSON. Raises: InvalidSpec for values that JSON cannot represent."""
    try:
        return message.model_dump_json().encode()
    except PydanticSerializationError as error:
        raise _unsendable(error) from error


def require_finite_metadata(metadata: Mapping[str, Any]) -> None:
    """Raise InvalidSpec for a number that is not finite, which would be stored as null, or a value that JSON cannot represent."""
    try:
        plain = to_jsonable_python(metadata)
    except PydanticSerializationError as error:
        raise _unsendable(error) from error
    _require_finite(plain, "metadata")


def _unsendable(error: PydanticSerializationError) -> InvalidSpec:
    return InvalidSpec(ErrorCode.INVALID_SPEC, f"the message cannot be sent as JSON: {error}; use plain JSON values")


def _require_finite(value: object, where: str) -> None:
    """Raise InvalidSpec for a number that is not finite, which would be stored as null."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidSpec(
            ErrorCode.INVALID_SPEC, f"{where} is {value}, which JSON cannot represent; leave it out or send null"
        )
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        _require_finite(part, f"{where}[{key!r}]")


def with_text_keys(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of the metadata. Raises: InvalidSpec if a top-level key is not a string."""
    for key in metadata or ():
        if not isinstance(key, str):
            raise InvalidSpec(ErrorCode.INVALID_SPEC, f"metadata has the key {key!r}; keys must be strings")
    return dict(metadata or {})


def read(model: type[Model], raw: bytes) -> Model:
    """Parse a response body as `model`. Raises: NotASwarmServer if it is something else, for example a web page."""
    try:
        return model.model_validate_json(raw, context=AS_STORED)
    except ValidationError as error:
        raise NotASwarmServer(f"the response is not a {model.__name__}; is this a swarm server?") from error


def sendable(text: str) -> str:
    """Return `text` with lone surrogates, which JSON cannot represent, replaced by escape sequences."""
    return text.encode("utf-8", "backslashreplace").decode()
