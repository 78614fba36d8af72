"""A bad network between clients and one server: answers lost, requests doubled, stalls, connections reset mid-stream.

A small HTTP/1.1 proxy over asyncio. Each request has a connection of its own on both sides. Which fault the n-th request
meets follows from the seed and n alone. Knows nothing of what it carries.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CONNECTION = re.compile(rb"\r\nconnection:[^\r]*", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes a close a reset."""
_PAST = 256
_CHUNK_BYTES = 65_536


class Fault(StrEnum):
    NONE = "none"
    LOSE_REQUEST = "lose_request"
    """Reset before the server hears of it."""
    LOSE_ANSWER = "lose_answer"
    """The server answers whole; the client sees a reset."""
    DUPLICATE = "duplicate"
    """The server gets it twice, at the same time."""
    REPLAY = "replay"
    """Some earlier request comes to the server once more, late."""
    STALL = "stall"
    """Nothing moves for a while, before the request or before its answer."""
    CUT = "cut"
    """Reset in the midst of the answer, on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """How likely each fault is, per request."""

    lose_request: float = 0.02
    lose_answer: float = 0.04
    duplicate: float = 0.04
    replay: float = 0.02
    stall: float = 0.02
    cut: float = 0.04
    longest_stall_s: float = 2.0

    def draw(self, rng: random.Random) -> Fault:
        ill = [Fault(name) for name in ("lose_request", "lose_answer", "duplicate", "replay", "stall", "cut")]
        likely = [float(getattr(self, fault)) for fault in ill]
        return rng.choices([Fault.NONE, *ill], [1.0 - sum(likely), *likely])[0]


CALM = Weather(lose_request=0, lose_answer=0, duplicate=0, replay=0, stall=0, cut=0)


class FaultyProxy:
    """Use as an async context manager. `target` is the server's port, None while there is none: connections are then reset.

    strikes: by the request's number, what to call while that request is under way: before it reaches the server where the
    number is even, else when its answer begins to come.
    """

    def __init__(self, seed: int, weather: Weather, target: int | None = None) -> None:
        self.weather = weather
        self.target = target
        self.strikes: dict[int, Callable[[], None]] = {}
        self.met: Counter[Fault] = Counter()
        self.requests = 0
        self._seed = seed
        self._past: list[bytes] = []
        self._server: asyncio.Server | None = None
        self._at_work: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0, backlog=1024)
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._at_work):
            task.cancel()
        await asyncio.gather(*self._at_work, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._detach(self._serve(reader, writer))

    def _detach(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._at_work.add(task)
        task.add_done_callback(self._at_work.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            try:
                request = await _read_request(reader)
                self.requests += 1
                await self._carry(self.requests, request, reader, writer)
            finally:
                writer.close()

    async def _carry(
        self, number: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        fault = self.weather.draw(rng)
        self.met[fault] += 1
        strike = self.strikes.pop(number, None)
        if strike is not None and number % 2 == 0:
            strike()
            strike = None
        if fault is Fault.LOSE_REQUEST:
            _reset(writer)
            return
        if fault is Fault.DUPLICATE:
            self._detach(self._unheard(request))
        if fault is Fault.REPLAY and self._past:
            self._detach(self._unheard(rng.choice(self._past)))
        self._past = [*self._past[-_PAST:], request]
        pause_s = rng.uniform(0, self.weather.longest_stall_s) if fault is Fault.STALL else 0.0
        if pause_s and rng.random() < 0.5:
            await asyncio.sleep(pause_s)
            pause_s = 0.0
        relaying = asyncio.create_task(self._relay(request, writer, fault, pause_s, rng, strike))
        gone = asyncio.create_task(reader.read(1))  # nothing but a hang-up can come
        try:
            await asyncio.wait({relaying, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (relaying, gone):
                task.cancel()
            await asyncio.gather(relaying, gone, return_exceptions=True)

    async def _relay(
        self,
        request: bytes,
        writer: asyncio.StreamWriter,
        fault: Fault,
        pause_s: float,
        rng: random.Random,
        strike: Callable[[], None] | None,
    ) -> None:
        """Send the request on and its answer back, as far as the fault lets it."""
        try:
            from_server, to_server = await self._ask(request)
        except OSError:
            _reset(writer)
            return
        try:
            first = True
            while part := await from_server.read(_CHUNK_BYTES):
                if first and strike is not None:
                    strike()
                if first and pause_s:
                    await asyncio.sleep(pause_s)
                first = False
                if fault is Fault.LOSE_ANSWER:
                    continue
                if fault is Fault.CUT and rng.random() < 0.6:
                    writer.write(part[: rng.randrange(1, len(part))])
                    await writer.drain()
                    _reset(to_server)
                    _reset(writer)
                    return
                writer.write(part)
                await writer.drain()
            if fault is Fault.LOSE_ANSWER:
                _reset(writer)
        except OSError:
            _reset(writer)
        finally:
            to_server.close()

    async def _unheard(self, request: bytes) -> None:
        """Send a request of which nobody reads the answer, whole as it comes."""
        with contextlib.suppress(OSError):
            from_server, to_server = await self._ask(request)
            try:
                while await from_server.read(_CHUNK_BYTES):
                    continue
            finally:
                to_server.close()

    async def _ask(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.target is None:
            raise ConnectionRefusedError("the server is down")
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self.target)
        to_server.write(request)
        return from_server, to_server


async def _read_request(reader: asyncio.StreamReader) -> bytes:
    """One whole request, which asks for the connection to be closed after it. Raises: IncompleteReadError."""
    head = await reader.readuntil(_HEAD_END)
    length = _LENGTH.search(head)
    body = await reader.readexactly(int(length[1])) if length else b""
    plain = _CONNECTION.sub(b"", head).removesuffix(_HEAD_END)
    return plain + b"\r\nConnection: close" + _HEAD_END + body


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close as a lost connection does: with a reset, and what was not sent yet thrown away."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
