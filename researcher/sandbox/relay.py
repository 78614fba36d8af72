"""Bytes between a Unix socket and a TCP port: the one way out of a sandbox that has no network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

_CHUNK = 1 << 16

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """Knows nothing of what it carries."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []

    async def to_network(self, path: str, host: str, port: int) -> None:
        """What connects to the Unix socket at `path` reaches the host's port."""
        serve = _carrier(lambda: asyncio.open_connection(host, port))
        self._servers.append(await asyncio.start_unix_server(serve, path))

    async def to_socket(self, host: str, port: int, path: str) -> None:
        """What connects to the port of this machine reaches the Unix socket at `path`."""
        serve = _carrier(lambda: asyncio.open_unix_connection(path))
        self._servers.append(await asyncio.start_server(serve, host, port))

    async def close(self) -> None:
        """Take nothing more. What is being carried ends with the process."""
        for server in self._servers:
            server.close()


def _carrier(
    connect: Callable[[], Awaitable[Streams]],
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def serve(near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            far, forth = await connect()
        except OSError:  # the server is away: the client sees its connection end, as it would without a relay
            back.close()
            return
        await asyncio.gather(_pump(near, forth), _pump(far, back))
        for writer in (forth, back):
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    return serve


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(_CHUNK):
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()
