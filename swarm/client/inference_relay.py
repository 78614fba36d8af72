"""An episode's private model address on this machine. It forwards the inference API and nothing else.

An agent that gets this address instead of the server's can call the model with its episode's key. It cannot reach any control
route, even if the server would allow it, and can reach nothing once the relay is closed.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote

import h11
import httpx

from foundation.addresses import is_loopback

_HEAD_BYTES = 64 * 2**10
_BODY_BYTES = 64 * 2**20
_READ_BYTES = 2**16
_HOP = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "content-length",
        "expect",
        "host",
        "authorization",
        "x-api-key",
        "forwarded",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
    ]
)
"""Headers that are not forwarded: those about the connection, and those that identify or authorize the caller."""
_TIMEOUT = httpx.Timeout(None, connect=5.0)
_SAMPLING = frozenset({"temperature", "top_p", "top_k", "seed"})
"""Request fields that have the same name in every API dialect."""
_SAMPLED = ("/chat/completions", "/completions", "/responses", "/messages")


class _Refused(Exception):
    """A request that the relay refuses to forward."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class InferenceRelay:
    """The relay of one episode. Use as an async context manager; `base_url` is its address while it is open.

    `sampling` holds fields that override the agent's in every call, such as an evaluation's temperature. The attribute `failures`
    lists errors between the relay and the server, oldest first.
    Raises: ValueError for a field of `sampling` that the API dialects do not share.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        sampling: Mapping[str, Any] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if unknown := sorted(set(sampling or ()) - _SAMPLING):
            raise ValueError(f"sampling can set {', '.join(sorted(_SAMPLING))}, not {', '.join(unknown)}")
        self._sampling = dict(sampling or {})
        self._upstream = base_url.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self._http = httpx.AsyncClient(
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            trust_env=not is_loopback(httpx.URL(base_url).host),
            transport=transport,
        )
        self._http.headers.clear()  # httpx's defaults would ask for compression even if the agent does not
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self.failures: list[str] = []

    @property
    def port(self) -> int:
        assert self._server is not None, "the relay is not open; use it as a context manager"
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=_HEAD_BYTES, backlog=1024)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for each in list(self._open):
            each.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await self._http.aclose()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, which carries one request."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._answer(_Connection(reader, writer))
        except (ConnectionError, asyncio.CancelledError):  # the agent hung up, or the relay is closing
            writer.transport.abort()
        finally:
            self._open.discard(task)
            writer.close()

    async def _answer(self, connection: _Connection) -> None:
        try:
            request = await connection.head()
            self._admit(request)
            body = await connection.body()
        except _Refused as refused:
            await connection.refuse(refused)
            return
        except h11.RemoteProtocolError as error:
            await connection.refuse(_Refused(400, "bad_request", f"not an HTTP/1.1 request: {error}"))
            return
        forwarding = asyncio.create_task(self._forward(request, body, connection))
        leaving = asyncio.create_task(connection.gone())
        try:
            await asyncio.wait({forwarding, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if forwarding.done():
                forwarding.result()
        finally:
            for each in (forwarding, leaving):
                each.cancel()
            await asyncio.gather(forwarding, leaving, return_exceptions=True)

    def _admit(self, request: h11.Request) -> None:
        """Raise _Refused if a request's path is outside the inference API or the request lacks the episode's key."""
        path = _unquoted(request.target.decode("latin-1").partition("?")[0])
        if not path.startswith("/v1/") or not {".", ".."}.isdisjoint(path.replace("\\", "/").split("/")):
            raise _Refused(
                403, "forbidden", f"an episode's api key can only call the model, at /v1/..., not {path[:200]!r}"
            )
        headers = dict(request.headers)
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = (token.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b""))
        if not any(hmac.compare_digest(each, self._key.encode()) for each in given):
            raise _Refused(401, "unauthorized", "use the episode's api key, from OPENAI_API_KEY or ANTHROPIC_API_KEY")

    def _sampled(self, request: h11.Request, body: bytes) -> bytes:
        """Return the body, with our sampling fields added if the request samples from the model."""
        path = _unquoted(request.target.decode("latin-1").partition("?")[0])
        if not self._sampling or not path.endswith(_SAMPLED):
            return body
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):  # forward it; the server will say what is wrong
            return body
        return json.dumps(asked | self._sampling).encode() if isinstance(asked, dict) else body

    async def _forward(self, request: h11.Request, body: bytes, connection: _Connection) -> None:
        passed = [(name, value) for name, value in request.headers.raw_items() if name.lower().decode() not in _HOP]
        headers = [*passed, (b"authorization", f"Bearer {self._key}".encode())]
        method, url = request.method.decode(), f"{self._upstream}{request.target.decode('latin-1')}"
        body = self._sampled(request, body)
        try:
            async with self._http.stream(method, url, headers=headers, content=body) as answer:
                length = {"content-length"} & answer.headers.keys()
                kept = [
                    (name, value) for name, value in answer.headers.raw if name.lower().decode() not in _HOP - length
                ]
                await connection.send(_response(answer.status_code, answer.reason_phrase.encode("latin-1"), kept))
                async for part in answer.aiter_raw():
                    await connection.send(h11.Data(data=part))
                await connection.send(h11.EndOfMessage())
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            # The agent's request is invalid.
            await connection.refuse(_Refused(400, "bad_request", f"this request cannot be forwarded: {error}"))
        except httpx.TransportError as error:
            words = f"{type(error).__name__}: {error}".rstrip(": ")
            self.failures.append(words)
            await connection.refuse(_Refused(502, "server_unreachable", f"the server cannot be reached ({words})"))


class _Connection:
    """One connection, which carries one request. Its methods raise h11.RemoteProtocolError if the other side does not speak HTTP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)
        self._method = b""

    async def head(self) -> h11.Request:
        event = await self._event()
        if not isinstance(event, h11.Request):
            raise ConnectionResetError("the connection was closed without a request")
        self._method = event.method
        return event

    async def body(self) -> bytes:
        """Read and return the request's body. Raises: _Refused if it is too large."""
        if self._http.they_are_waiting_for_100_continue:
            await self.send(h11.InformationalResponse(status_code=100, headers=[]))
        parts, length = list[bytes](), 0
        while isinstance(event := await self._event(), h11.Data):
            parts.append(bytes(event.data))
            length += len(event.data)
            if length > _BODY_BYTES:
                raise _Refused(413, "over_limit", "the body is larger than 64 MiB")
        return b"".join(parts)

    async def _event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_READ_BYTES))
        return event

    async def send(self, event: h11.Event) -> None:
        self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()

    async def refuse(self, refused: _Refused) -> None:
        """Respond with an error in OpenAI's format, which Anthropic's SDK also displays.

        If a response has already begun, cut it off so that it looks incomplete.
        """
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._writer.transport.abort()
            return
        kind = "server_error" if refused.status >= 500 else "invalid_request_error"
        error = {"message": str(refused), "type": kind, "param": None, "code": refused.code}
        body = json.dumps({"type": "error", "error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self.send(_response(refused.status, b"Refused", headers))
        if self._method != b"HEAD":
            await self.send(h11.Data(data=body))

    async def gone(self) -> None:
        """Wait until the other side hangs up. Ignores anything it sends after its request."""
        with suppress(ConnectionError):
            while await self._reader.read(_READ_BYTES):
                continue


def _response(status: int, reason: bytes, headers: list[tuple[bytes, bytes]]) -> h11.Response:
    """Return the head of a response. If it has no content length, h11 sends the body in chunks, provided the client's HTTP version
    allows it."""
    return h11.Response(status_code=status, reason=reason, headers=[*headers, (b"connection", b"close")])


def _unquoted(path: str) -> str:
    """Unquote a path repeatedly until it no longer changes, because each proxy on the way may unquote it once."""
    while (plainer := unquote(path)) != path:
        path = plainer
    return path
