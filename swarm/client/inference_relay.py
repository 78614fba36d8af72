"""An episode's private address of the model, on this machine: the inference surface and nothing else.

An agent that is given this address instead of the server's can call the model with its episode's key. It reaches no control
route, whatever the server would say to it, and nothing at all once the relay is closed.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import unquote

import httpx

from foundation.addresses import is_loopback

_HEAD_BYTES = 64 * 2**10
_BODY_BYTES = 64 * 2**20
_LINE = re.compile(r"([A-Z]+) (/[!-~]*) HTTP/1\.([01])")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
        *(
            "transfer-encoding",
            "upgrade",
            "content-length",
            "expect",
            "host",
            "authorization",
            "x-api-key",
            "forwarded",
        ),
        *("x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"),
    }
)
"""Headers of a connection, and those that say who asks: they are not passed on."""
_TIMEOUT = httpx.Timeout(None, connect=5.0)


class _Refused(Exception):
    """A request that goes no further."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """One request. target: path and query."""

    method: str
    target: str
    keeps_chunks: bool
    """Whether whoever asks understands chunks (HTTP/1.1)."""
    headers: list[tuple[bytes, bytes]]
    body: bytes


class InferenceRelay:
    """Use as an async context manager. `base_url` is the address while it is open.

    failures: what went wrong between here and the server, in the order in which it did.
    """

    def __init__(self, base_url: str, api_key: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._upstream = base_url.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self._http = httpx.AsyncClient(
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            trust_env=not is_loopback(httpx.URL(base_url).host),
            transport=transport,
        )
        self._http.headers.clear()  # an agent that asks for no encoding gets none
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
        """One connection, which carries one request."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.CancelledError):  # whoever asked is gone, or the relay closes
            writer.transport.abort()
        finally:
            self._open.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = await self._read(reader, writer)
        except _Refused as refused:
            writer.write(_refusal(refused))
            await writer.drain()
            return
        forwarding = asyncio.create_task(self._forward(asked, writer))
        leaving = asyncio.create_task(_gone(reader))
        try:
            await asyncio.wait({forwarding, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if forwarding.done():
                forwarding.result()
        finally:
            for each in (forwarding, leaving):
                each.cancel()
            await asyncio.gather(forwarding, leaving, return_exceptions=True)

    # -- in ---------------------------------------------------------------------------------------------------------------

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Asked:
        """Raises: _Refused."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise _Refused(400, "bad_request", "the request has no head, or one of more than 64 KiB") from error
        first, *lines = head[:-4].split("\r\n")
        line = _LINE.fullmatch(first)
        if line is None or any(char in head.replace("\r\n", "") for char in "\r\n\0"):
            raise _Refused(400, "bad_request", "not an HTTP/1.1 request")
        headers = [(name.strip().lower(), value.strip()) for name, _, value in (each.partition(":") for each in lines)]
        if not all(_NAME.fullmatch(name) for name, _ in headers):
            raise _Refused(400, "bad_request", "a header's name is not one that HTTP allows")
        names = dict(headers)
        self._admit(line[2], names)
        if names.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await writer.drain()
        try:
            body = await _body(reader, names)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise _Refused(400, "bad_request", f"the body cannot be read: {error}") from error
        passed = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers if name not in _HOP]
        return _Asked(method=line[1], target=line[2], keeps_chunks=line[3] == "1", headers=passed, body=body)

    def _admit(self, target: str, names: Mapping[str, str]) -> None:
        """Raises: _Refused for what is not the model's, or comes without the episode's key."""
        path = _unquoted(target.partition("?")[0])
        if not path.startswith("/v1/") or not {".", ".."}.isdisjoint(path.replace("\\", "/").split("/")):
            raise _Refused(
                403, "forbidden", f"an episode's api key only calls the model, at /v1/..., not {path[:200]!r}"
            )
        scheme, _, token = names.get("authorization", "").partition(" ")
        given = (token.strip() if scheme.lower() == "bearer" else "", names.get("x-api-key", ""))
        if not any(hmac.compare_digest(each.encode("latin-1"), self._key.encode()) for each in given):
            raise _Refused(401, "unauthorized", "use the episode's api key, from OPENAI_API_KEY or ANTHROPIC_API_KEY")

    # -- out --------------------------------------------------------------------------------------------------------------

    async def _forward(self, asked: _Asked, writer: asyncio.StreamWriter) -> None:
        headers = [*asked.headers, (b"authorization", f"Bearer {self._key}".encode())]
        begun = False
        try:
            async with self._http.stream(
                asked.method, f"{self._upstream}{asked.target}", headers=headers, content=asked.body
            ) as answer:
                chunked = "content-length" not in answer.headers and asked.keeps_chunks
                writer.write(_answer_head(answer, chunked))
                begun = True
                async for part in answer.aiter_raw():
                    writer.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
                    await writer.drain()
                writer.write(b"0\r\n\r\n" if chunked else b"")
                await writer.drain()
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:  # what the agent sent
            writer.write(_refusal(_Refused(400, "bad_request", f"this request cannot be passed on: {error}")))
            await writer.drain()
        except httpx.TransportError as error:
            words = f"{type(error).__name__}: {error}".rstrip(": ")
            self.failures.append(words)
            if begun:  # without its end, so that nobody takes it for the whole answer
                writer.transport.abort()
                return
            writer.write(_refusal(_Refused(502, "server_unreachable", f"the server cannot be reached ({words})")))
            await writer.drain()


def _unquoted(path: str) -> str:
    """As the last of any number of proxies would read it."""
    while (plainer := unquote(path)) != path:
        path = plainer
    return path


async def _body(reader: asyncio.StreamReader, names: Mapping[str, str]) -> bytes:
    """Raises: _Refused, ValueError, asyncio.IncompleteReadError."""
    if "transfer-encoding" not in names:
        length = int(names.get("content-length", "0"))
        if not 0 <= length <= _BODY_BYTES:
            raise _Refused(413, "over_limit", "the body is larger than 64 MiB")
        return await reader.readexactly(length)
    if names["transfer-encoding"].lower() != "chunked":
        raise _Refused(501, "bad_request", "unsupported transfer encoding; use `chunked`")
    parts: list[bytes] = []
    while (length := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)) > 0:
        if sum(map(len, parts)) + length > _BODY_BYTES:
            raise _Refused(413, "over_limit", "the body is larger than 64 MiB")
        parts.append(await reader.readexactly(length))
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
        continue
    return b"".join(parts)


def _answer_head(answer: httpx.Response, chunked: bool) -> bytes:
    kept = [(name, value) for name, value in answer.headers.raw if name.lower().decode("latin-1") not in _HOP]
    if "content-length" in answer.headers:
        kept.append((b"content-length", answer.headers["content-length"].encode("latin-1")))
    if chunked:
        kept.append((b"transfer-encoding", b"chunked"))
    lines = [b"HTTP/1.1 %d %b" % (answer.status_code, answer.reason_phrase.encode("latin-1")), b"connection: close"]
    return b"\r\n".join([*lines, *(name + b": " + value for name, value in kept)]) + b"\r\n\r\n"


def _refusal(refused: _Refused) -> bytes:
    """In OpenAI's format, which Anthropic's SDK shows too."""
    error = {"message": str(refused), "type": "invalid_request_error", "param": None, "code": refused.code}
    if refused.status >= 500:
        error["type"] = "server_error"
    body = json.dumps({"type": "error", "error": error}).encode()
    head = f"HTTP/1.1 {refused.status} Refused\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def _gone(reader: asyncio.StreamReader) -> None:
    """Returns when the other end has hung up. What it sends behind its request is not read as another."""
    with suppress(ConnectionError):
        while await reader.read(_HEAD_BYTES):
            continue
