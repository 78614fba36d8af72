"""The client of vLLM's server, against a server that says word for word what a test wants it to say."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from swarm.engine.sampling import client as vllm_client
from swarm.engine.sampling.client import VllmClient
from swarm.engine.seam import EngineDown, EngineError, EngineHung, RequestRefused

pytestmark = pytest.mark.anyio

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LIMIT_S = 30.0


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


class Server:
    """Answers each request with `parts`; then hangs up, or waits for the client to do so."""

    def __init__(self, *parts: bytes, hangs_up: bool = False) -> None:
        self._parts = parts
        self._hangs_up = hangs_up
        self.heard = asyncio.Event()
        self.left = asyncio.Event()
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
                await reader.readexactly(length)
                self.heard.set()
                writer.write(b"".join(self._parts))
                if self._hangs_up:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(server: Server, **fields: Any) -> AsyncIterator[VllmClient]:
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "s"
        listener = await asyncio.start_unix_server(server.serve, socket)
        client = VllmClient(socket, **fields)
        try:
            yield client
        finally:
            await client.close()
            listener.close()


async def test_events_come_whole_however_they_are_cut() -> None:
    events = b'data: {"a": 1}\n\n: a comment\n\ndata: {"a": "\xc3\xa4"}\n\ndata: [DONE]\n\n'
    pieces = [chunk(events[at : at + 3]) for at in range(0, len(events), 3)]
    server = Server(STREAM, *pieces, chunk(b""))
    async with serving(server) as client:
        for _ in range(2):
            assert [each async for each in client.stream("chat.completions", {})] == [{"a": 1}, {"a": "ä"}]
    assert server.connections == 1


async def test_a_connection_that_lay_idle_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_client, "_KEEP_S", 0.0)
    server = Server(STREAM, chunk(b"data: [DONE]\n\n"), chunk(b""))
    async with serving(server) as client:
        for _ in range(2):
            assert [each async for each in client.stream("chat.completions", {})] == []
    assert server.connections == 2


async def test_a_server_waits_for_who_reads_slowly() -> None:
    many = 20_000
    server = Server(
        STREAM, *[chunk(b'data: {"a": %d}\n\n' % i) for i in range(many)], chunk(b"data: [DONE]\n\n"), chunk(b"")
    )
    async with serving(server) as client:
        read = []
        async for each in client.stream("chat.completions", {}):
            read.append(each["a"])
            if len(read) % 1000 == 1:
                await asyncio.sleep(0.001)
    assert read == list(range(many))


async def test_a_stream_that_is_left_hangs_up_so_that_the_sampling_stops() -> None:
    server = Server(STREAM, chunk(b'data: {"a": 1}\n\n'))
    async with serving(server) as client:
        async with aclosing(client.stream("chat.completions", {})) as chunks:
            assert await anext(chunks) == {"a": 1}
        await asyncio.wait_for(server.left.wait(), LIMIT_S)


async def test_after_a_long_answer_that_was_left_unread_the_next_one_comes() -> None:
    many = b"".join(b'data: {"a": 1}\n\n' for _ in range(2000))
    server = Server(STREAM, chunk(many + b"data: [DONE]\n\n"), chunk(b""))
    async with serving(server) as client:
        for _ in range(2):
            async with asyncio.timeout(LIMIT_S), aclosing(client.stream("chat.completions", {})) as chunks:
                assert await anext(chunks) == {"a": 1}


async def test_an_answer_nobody_waits_for_any_more_hangs_up() -> None:
    server = Server()
    async with serving(server) as client:
        asking = asyncio.create_task(client.sample("chat.completions", {}))
        await asyncio.wait_for(server.heard.wait(), LIMIT_S)
        asking.cancel()
        await asyncio.wait_for(server.left.wait(), LIMIT_S)


class Patient(Server):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.may_answer.wait()
        self._parts = (answer(b"200 OK", b"{}"),)
        await super().serve(reader, writer)


async def test_weights_may_take_as_long_to_load_as_there_are_many(tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    for folder, size in ((few, 0), (many, 100 << 30)):
        folder.mkdir()
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(size)  # takes no room
    server = Patient()
    async with serving(server, answer_s=0.1) as client:
        loading = asyncio.create_task(client.replace_weights(many))
        with pytest.raises(EngineHung, match="has not answered /collective_rpc"):
            await client.replace_weights(few)
        server.may_answer.set()
        await asyncio.wait_for(loading, LIMIT_S)


@pytest.mark.parametrize("parts", [(), (STREAM,), (STREAM, chunk(b'data: {"a": 1}\n\n')), (STREAM, chunk(b""))])
async def test_a_server_that_breaks_off_is_down(parts: tuple[bytes, ...]) -> None:
    async with serving(Server(*parts, hangs_up=True)) as client:
        with pytest.raises(EngineDown):
            assert [each async for each in client.stream("chat.completions", {})] == []


async def test_a_refusal_keeps_its_body_and_a_fault_is_the_servers() -> None:
    body = b'{"error": {"message": "too long", "type": "BadRequestError", "code": 400}}'
    async with serving(Server(answer(b"400 Bad Request", body))) as client:
        with pytest.raises(RequestRefused) as refused:
            await client.sample("chat.completions", {})
        assert refused.value.status == 400
        assert refused.value.body["error"]["message"] == "too long"
        with pytest.raises(RequestRefused):
            assert [each async for each in client.stream("chat.completions", {})] == []
    async with serving(Server(STREAM, chunk(b"data: " + body + b"\n\n"), chunk(b""))) as client:
        with pytest.raises(RequestRefused):
            assert [each async for each in client.stream("chat.completions", {})] == []
    async with serving(Server(answer(b"500 Internal Server Error", b"oh"))) as client:
        with pytest.raises(EngineDown, match="oh"):
            await client.sample("chat.completions", {})
        with pytest.raises(EngineError, match="pause"):
            await client.pause()


async def test_a_server_that_does_not_listen_is_not_healthy(tmp_path: Path) -> None:
    client = VllmClient(tmp_path / "nobody")
    try:
        assert not await client.healthy()
        with pytest.raises(EngineDown):
            await client.render("chat.completions", {})
    finally:
        await client.close()
    async with serving(Server(answer(b"200 OK", b""))) as served:
        assert await served.healthy()
