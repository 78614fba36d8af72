"""The faulty proxy does what each of its faults is named for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import httpx
import pytest

from tests.fakes.proxy import CALM, Fault, FaultyProxy

pytestmark = pytest.mark.anyio

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nfour"


@asynccontextmanager
async def behind(
    fault: Fault, strikes: dict[int, Callable[[], None]] | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Queue[bytes]]]:
    """A client of a proxy that always meets this fault, and what the server behind it is asked."""
    asked: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.put_nowait(await reader.readexactly(4))
        writer.write(ANSWER)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    weather = CALM if fault is Fault.NONE else replace(CALM, **{str(fault): 1.0})
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        FaultyProxy(1, weather, port) as proxy,
        httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=30) as http,
    ):
        proxy.strikes.update(strikes or {})
        yield http, asked


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.DUPLICATE, Fault.STALL, Fault.REPLAY])
async def test_the_answer_comes_through(fault: Fault) -> None:
    async with behind(fault) as (http, asked), asyncio.timeout(30):
        for body in (b"one.", b"two."):
            assert (await http.post("/", content=body)).content == b"four"
        heard = [await asked.get() for _ in range({Fault.DUPLICATE: 4, Fault.REPLAY: 3}.get(fault, 2))]
        assert set(heard) == {b"one.", b"two."}


@pytest.mark.parametrize("fault", [Fault.LOSE_ANSWER, Fault.LOSE_REQUEST, Fault.CUT])
async def test_the_answer_is_lost(fault: Fault) -> None:
    async with behind(fault) as (http, asked), asyncio.timeout(30):
        posts = 50 if fault is Fault.CUT else 1  # a short answer gets through a cut at times
        answers = await asyncio.gather(*(http.post("/", content=b"one.") for _ in range(posts)), return_exceptions=True)
        assert any(isinstance(answer, httpx.TransportError) for answer in answers)
        assert asked.empty() == (fault is Fault.LOSE_REQUEST)


async def test_each_strike_falls_once() -> None:
    struck: list[int] = []
    async with behind(Fault.NONE, {n: partial(struck.append, n) for n in (1, 2)}) as (http, _), asyncio.timeout(30):
        for _ in range(3):
            await http.post("/", content=b"one.")
    assert struck == [1, 2]
