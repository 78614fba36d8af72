"""The relay between an agent and its model: it changes nothing on the way, and lets nothing else through."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from swarm.client.inference_relay import InferenceRelay

pytestmark = pytest.mark.anyio
KEY = "swk_episode"
BEARER = {"Authorization": f"Bearer {KEY}"}


def relay(handler: httpx.MockTransport) -> InferenceRelay:
    return InferenceRelay("http://server.test:8642/v1", KEY, transport=handler)


def echo(request: httpx.Request) -> httpx.Response:
    seen = {"path": request.url.raw_path.decode(), "body": request.content.decode(), "headers": dict(request.headers)}
    body = json.dumps(seen).encode()
    headers = {"x-mine": "kept", "content-length": str(len(body)), "content-type": "application/json"}
    return httpx.Response(200, headers=headers, stream=httpx.ByteStream(body))


async def asked(
    address: str, method: str = "POST", headers: dict[str, str] | None = None, content: object = None
) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as http:
        return await http.request(method, address, headers=BEARER if headers is None else headers, content=content)  # type: ignore[arg-type]


async def test_a_call_arrives_as_it_was_sent_and_its_answer_as_it_was_given() -> None:
    async with relay(httpx.MockTransport(echo)) as open_:
        headers = {"x-api-key": KEY, "X-Agent-Name": "planner", "Connection": "keep-alive"}
        answer = await asked(f"{open_.base_url}/chat/completions?x=%201", headers=headers, content=b'{"a": 1}')
    assert answer.headers["x-mine"] == "kept"
    seen = answer.json()
    assert (seen["path"], seen["body"]) == ("/v1/chat/completions?x=%201", '{"a": 1}')
    assert seen["headers"]["x-agent-name"] == "planner"
    assert seen["headers"]["authorization"] == BEARER["Authorization"]


async def test_what_every_call_is_given_stands_in_each_whatever_the_agent_says() -> None:
    given = InferenceRelay(
        "http://server.test/v1", KEY, sampling={"temperature": 0.5}, transport=httpx.MockTransport(echo)
    )
    async with given as open_:
        for path in ("chat/completions", "chat/completion%73", "completions", "responses", "messages?beta=true"):
            answer = await asked(f"{open_.base_url}/{path}", content=b'{"temperature": 1, "a": 1}')
            assert json.loads(answer.json()["body"]) == {"temperature": 0.5, "a": 1}
        for path, body in (
            ("messages/count_tokens", '{"a": 1}'),
            ("chat/completions", "no JSON"),
            ("responses", "[1]"),
            ("responses", "[" * 100_000),
        ):
            assert (await asked(f"{open_.base_url}/{path}", content=body)).json()["body"] == body
    with pytest.raises(ValueError, match="not max_tokens"):
        InferenceRelay("http://server.test/v1", KEY, sampling={"max_tokens": 5})


async def test_a_body_in_chunks_arrives_whole() -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b'{"a":'
        yield b" 1}"

    async with relay(httpx.MockTransport(echo)) as open_:
        answer = await asked(f"{open_.base_url}/messages", content=parts())
    assert answer.json()["body"] == '{"a": 1}'


async def test_a_stream_is_passed_on_while_it_comes_and_stops_when_nobody_reads_it() -> None:
    read, closed = asyncio.Event(), asyncio.Event()

    class Frames(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            await read.wait()
            yield b"data: 2\n\n"
            await asyncio.Event().wait()

        async def aclose(self) -> None:
            closed.set()

    handler = httpx.MockTransport(lambda request: httpx.Response(200, stream=Frames()))
    async with relay(handler) as open_, httpx.AsyncClient(trust_env=False) as http:
        async with http.stream("POST", f"{open_.base_url}/responses", headers=BEARER) as answer:
            frames = answer.aiter_raw()
            assert await anext(frames) == b"data: 1\n\n"
            read.set()
            assert await anext(frames) == b"data: 2\n\n"
        await asyncio.wait_for(closed.wait(), 10)
    assert open_.failures == []


async def test_a_server_that_is_not_there_is_noted_and_said_so() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with relay(httpx.MockTransport(refuse)) as open_:
        answer = await asked(f"{open_.base_url}/chat/completions")
        assert answer.status_code == 502
        assert json.loads(answer.content)["error"]["code"] == "server_unreachable"
    assert open_.failures == ["ConnectError: refused"]


async def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one() -> None:
    class Broken(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"half"
            raise httpx.ReadError("reset")

    handler = httpx.MockTransport(lambda request: httpx.Response(200, stream=Broken()))
    async with relay(handler) as open_:
        with pytest.raises(httpx.TransportError):
            await asked(f"{open_.base_url}/chat/completions")
    assert open_.failures == ["ReadError: reset"]


@pytest.mark.parametrize(
    ("target", "headers", "status"),
    [
        ("/swarm/v1/status", BEARER, 403),
        ("/health", BEARER, 403),
        ("/v1/%2e%2e/swarm/v1/status", BEARER, 403),
        ("/v1/%252e%252e/swarm/v1/status", BEARER, 403),
        ("/v1/..%5cswarm/v1/status", BEARER, 403),
        ("/v1/models", {}, 401),
        ("/v1/models", {"Authorization": "Bearer other"}, 401),
        ("/v1/models", {"x-api-key": "other"}, 401),
    ],
)
async def test_nothing_else_goes_through(target: str, headers: dict[str, str], status: int) -> None:
    reached = []
    handler = httpx.MockTransport(lambda request: reached.append(request) or httpx.Response(200))  # type: ignore[func-returns-value]
    async with relay(handler) as open_:
        answers = [await asked(f"http://127.0.0.1:{open_.port}{target}", method, headers) for method in ("GET", "HEAD")]
    assert ([answer.status_code for answer in answers], reached) == ([status, status], [])
    assert [bool(answer.content) for answer in answers] == [True, False]


async def test_a_request_that_cannot_be_sent_is_the_agents_own_fault_and_no_failure_of_the_network() -> None:
    open_ = InferenceRelay("http://127.0.0.1:9/v1", KEY)
    async with open_:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(open_.base_url).port)
        writer.write(f"GET /v1/models HTTP/1.1\r\nauthorization: Bearer {KEY}\r\nbad name: x\r\n\r\n".encode())
        head = await reader.readline()
        writer.close()
    assert b" 400 " in head
    assert open_.failures == []
