"""A minimal HTTP/1.1 keep-alive client for JSON, so cheap that a bench measures the server and not the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any


class Connection:
    """One connection, one request at a time. Raises: RuntimeError for any status but 200."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        return cls(*await asyncio.open_connection(host, port))

    @classmethod
    async def open_socket(cls, path: Path) -> Connection:
        """Connect to a server on a Unix socket."""
        return cls(*await asyncio.open_unix_connection(path))

    async def post(self, path: str, body: dict[str, Any], bearer: str = "") -> dict[str, Any]:
        """Send a POST request; returns the JSON of the answer."""
        head = await self._ask(path, body, bearer)
        content = await self._content(head)
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"POST {path}: {head[:40]!r} {content[:300]!r}")
        return dict(json.loads(content))

    async def stream(self, path: str, body: dict[str, Any], bearer: str = "") -> AsyncIterator[bytes]:
        """Yield the data of each server-sent event as it arrives. The caller must read to the end."""
        head = await self._ask(path, body, bearer)
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"POST {path}: {head[:40]!r} {(await self._content(head))[:300]!r}")
        rest = b""
        while part := await self._chunk():
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: "):
                    yield event[6:]

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def _ask(self, path: str, body: dict[str, Any], bearer: str) -> bytes:
        """Send the request; returns the answer's head in lower case."""
        content = json.dumps(body).encode()
        lines = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        authorization = f"Authorization: Bearer {bearer}\r\n" if bearer else ""
        self._writer.write(f"{lines}{authorization}\r\n".encode() + content)
        return (await self._reader.readuntil(b"\r\n\r\n")).lower()

    async def _content(self, head: bytes) -> bytes:
        if b"transfer-encoding: chunked" in head:
            parts = []
            while part := await self._chunk():
                parts.append(part)
            return b"".join(parts)
        length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        return await self._reader.readexactly(length)

    async def _chunk(self) -> bytes:
        """The next chunk of a chunked answer; empty at the end."""
        size = int((await self._reader.readline()).split(b";", 1)[0], 16)
        part = await self._reader.readexactly(size)
        await self._reader.readexactly(2)
        return part
