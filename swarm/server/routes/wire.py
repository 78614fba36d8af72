"""Reads requests and writes answers: authorisation, models, problem documents, and streams that notice when a client disconnects.

Knows HTTP and pydantic, but nothing about runs or episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from foundation import strict_json
from foundation.addresses import is_loopback, is_private_name
from foundation.strict import FieldError, explain
from swarm.protocol.errors import BodyTooLarge, ErrorCode, Refusal, SwarmError
from swarm.protocol.problem import Problem, invalid_spec
from swarm.server.keys import ControlTokens, Role, bearer
from swarm.server.state.leases import API_KEY_PREFIX

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")

MAX_BODY_BYTES = 64 * 2**20
MAX_CONTROL_BYTES = 4 * 2**20
_LARGE_BYTES = 2**18
"""A body of this size takes milliseconds to parse; larger bodies are parsed in a thread."""
_DIGITS_TO_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_NINETEEN_DIGITS = b"0" * 19
"""What a 19-digit integer looks like once its digits are replaced by zeros. Shorter integers fit in 64 bits."""
_JSON = "application/json"
_PROBLEM = "application/problem+json"
_STRAIGHT = "swarm.straight_send"


class ClientGone(SwarmError):
    """The client disconnected before it got an answer."""


def require(tokens: ControlTokens, request: Request, needed: Role = Role.CLIENT) -> str:
    """Check that the caller has the needed role, and return the caller's name for the records.

    Raises: Refusal(unauthorized, forbidden).
    """
    if not tokens.required:
        _refuse_agents(request)
        _refuse_foreign_pages(request)
    role = tokens.role_of(request.headers.get("authorization"))
    if role is None:
        given = "the token is invalid" if "authorization" in request.headers else "no token was sent"
        raise Refusal(
            ErrorCode.UNAUTHORIZED,
            f"this server requires a token, but {given}: send its admin or client token as `Authorization: Bearer` "
            "(`swarm` and `researcher` read it from SWARM_TOKEN, SwarmClient takes it as `token`)",
        )
    if needed is Role.ADMIN and role is not Role.ADMIN:
        raise Refusal(ErrorCode.FORBIDDEN, "a client token is not enough for this; use the server's admin token")
    return f"{role}@{request.client.host}" if request.client else str(role)


def _refuse_agents(request: Request) -> None:
    """Refuse an episode's API key, which may only call the model, even on a server without tokens. Raises: Refusal(forbidden)."""
    keys = (bearer(request.headers.get("authorization")), request.headers.get("x-api-key", ""))
    if any(key.startswith(API_KEY_PREFIX) for key in keys):
        raise Refusal(
            ErrorCode.FORBIDDEN,
            "an episode's API key is only for calling the model, at /v1/...; to report, send the lease instead of the key",
        )


def _refuse_foreign_pages(request: Request) -> None:
    """Refuse requests from foreign web pages: a browser on this machine lets any page reach loopback addresses.

    Programs send no `Origin`. Browsers send none either when a page calls its own site, whose name may resolve to this machine,
    so the host's name is checked too.

    Raises: Refusal(forbidden).
    """
    host = _host_of(f"//{request.headers.get('host', '')}")
    own_name = _host_of(request.app.state.public_url or "")
    if host != own_name and not is_private_name(host):  # the owner of that name can make it resolve to any address
        detail = f"a server without tokens does not answer under the name {host}; start it with --public-url or an admin token"
        raise Refusal(ErrorCode.FORBIDDEN, detail)
    origin = request.headers.get("origin")
    if origin is not None and not _of_this_machine(origin):
        detail = f"a web page from {origin} may not control a server without tokens; start it with an admin token"
        raise Refusal(ErrorCode.FORBIDDEN, detail)


def _of_this_machine(origin: str) -> bool:
    return is_loopback(_host_of(origin))


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # not a URL
        return ""


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Read the request's body. Raises: BodyTooLarge, before the whole body is in memory; ClientGone."""
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit_bytes:
                raise BodyTooLarge(limit_bytes)
            parts.append(part)
    except ClientDisconnect as error:
        raise ClientGone("the client disconnected in the middle of its request") from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def decode(request: Request, model: type[Model]) -> Model:
    """Parse the body as `model`. Raises: Refusal(invalid_spec) that names each bad field and the nearest known name."""
    value = await read_json(await read_body(request, MAX_CONTROL_BYTES) or b"{}", control=True)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_spec(explain(error, model)) from error


async def decode_object(
    request: Request, *, control: bool = False, check: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Parse the body as a JSON object, and apply `check` to it. Set `control` for requests under `/swarm`, whose bodies have a lower
    size limit.

    Raises: Refusal(invalid_spec), BodyTooLarge.
    """
    raw = await read_body(request, MAX_CONTROL_BYTES if control else MAX_BODY_BYTES)
    value = await read_json(raw, control=control, check=check)
    if not isinstance(value, dict):
        fault = FieldError(field="(whole)", problem="should be a JSON object")
        raise invalid_spec([fault], "the body must be a JSON object")
    return value


async def read_json(raw: bytes, *, control: bool = False, check: Callable[[dict[str, Any]], None] | None = None) -> Any:
    """Parse JSON and check it if it is an object, in a thread if it is large. Raises: Refusal(invalid_spec)."""
    large = len(raw) > _LARGE_BYTES

    def read() -> Any:
        value = strict_json.loads(raw) if control else strict_json.loads_plain(raw) if large else _quickly(raw)
        if check is not None and isinstance(value, dict):
            check(value)
        return value

    try:
        return await asyncio.to_thread(read) if large else read()
    except strict_json.RepeatedName as error:
        fault = FieldError(field=error.name, problem="appears twice in one object")
        raise invalid_spec([fault], str(error)) from error
    except ValueError as error:
        fault = FieldError(field="(whole)", problem=f"is not JSON: {error}")
        raise invalid_spec([fault], f"the body is not JSON: {error}") from error


def _quickly(raw: bytes) -> Any:
    """Parse like `strict_json.loads_plain`, but faster, except where the faster parser might read an overlong integer as a float."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return strict_json.loads_plain(raw)  # lone surrogates are allowed
    wide = _NINETEEN_DIGITS in raw.translate(_DIGITS_TO_ZEROS)
    return strict_json.loads_plain(raw) if wide else value


def decode_query(request: Request, model: type[Model]) -> Model:
    """Parse the query string as `model`. A known name without a value counts as absent.

    Raises: Refusal(invalid_spec), also for a name that appears twice.
    """
    stated = Counter(name for name, _ in request.query_params.multi_items())
    repeated = [name for name, times in stated.items() if times > 1]
    if repeated:
        raise invalid_spec([FieldError(field=name, problem="appears twice in the query") for name in repeated])
    given = {name: value for name, value in request.query_params.items() if value or name not in model.model_fields}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise invalid_spec(explain(error, model)) from error


def answer(
    shown: BaseModel | Sequence[BaseModel], *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Encode a model, or a list of models, as a JSON response."""
    if isinstance(shown, BaseModel):
        return Response(shown.model_dump_json().encode(), status, headers, _JSON)
    body = b"[" + b",".join(each.model_dump_json().encode() for each in shown) + b"]"
    return Response(body, status, headers, _JSON)


def answer_json(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, _JSON)


def problem(refusal: Refusal, *, status: int | None = None, headers: dict[str, str] | None = None) -> Response:
    """Encode a refusal as a problem document, with a `Retry-After` header if the refusal has `retry_after_s`."""
    document = Problem.of(refusal)
    if status is not None:
        document = document.model_copy(update={"status": status})
    sent = dict(headers or {})
    retry_after_s = refusal.fields.get("retry_after_s")
    if isinstance(retry_after_s, int | float):
        sent["Retry-After"] = str(max(1, round(retry_after_s)))
    if refusal.code == ErrorCode.UNAUTHORIZED:
        sent["WWW-Authenticate"] = "Bearer"
    return Response(document.model_dump_json().encode(), document.status, sent, _PROBLEM)


async def until_gone(request: Request, work: Awaitable[Result], closing: asyncio.Event | None = None) -> Result:
    """Return the result of `work`, or cancel it when the client disconnects or the server closes.

    Read the request's body before calling this. Raises: ClientGone; Refusal(not_rolling) when the server closes.
    """
    task = asyncio.ensure_future(work)
    await _race(task, _disconnected(request.receive), closing)
    if not task.cancelled():
        return task.result()
    if closing is not None and closing.is_set():
        raise Refusal(ErrorCode.NOT_ROLLING, "the server is shutting down; try again when it is back", retry_after_s=5)
    raise ClientGone("the client disconnected")


async def _race(work: asyncio.Future[Any], gone: Coroutine[Any, Any, None], closing: asyncio.Event | None) -> None:
    """Wait until the work is done, the client is gone or the server closes; then cancel the other tasks."""
    waiters: set[asyncio.Future[Any]] = {work, asyncio.ensure_future(gone)}
    if closing is not None:
        waiters.add(asyncio.ensure_future(closing.wait()))
    try:
        await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)


class StraightSend:
    """Middleware that lets a stream's frames bypass the inner middleware, which only needs the start of an answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_STRAIGHT] = send
        await self._app(scope, receive, send)


class EventStream(Response):
    """A response of encoded server-sent events. Closes `frames` when the client disconnects or `closing` is set.

    `first` is a frame that was already taken from `frames`.
    """

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncGenerator[bytes, None], *, first: bytes | None = None, closing: asyncio.Event | None = None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._first = first
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(send, scope.get(_STRAIGHT, send)))
        await _race(pump, _disconnected(receive), self._closing)
        if pump.cancelled():
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            pump.result()

    async def _pump(self, send: Send, straight: Send) -> None:
        async with contextlib.aclosing(self._frames) as frames:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if self._first is not None:
                await straight({"type": "http.response.body", "body": self._first, "more_body": True})
            async for frame in frames:
                await straight({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class WatchedAnswer(Response):
    """A JSON response that calls `delivered` if the client is still connected when the body has been sent."""

    def __init__(self, value: Any, delivered: Callable[[], None]) -> None:
        super().__init__(orjson.dumps(value), media_type=_JSON)
        self._delivered = delivered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        # Once the response is complete, the server also reports a disconnect for clients that are still connected.
        if not await Request(scope, receive).is_disconnected():
            self._delivered()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
