"""A chat endpoint on this machine at which a person sits: any agent that speaks chat.completions can be played through it.

Knows HTTP and the dialect's frames; who answers, and what, is its owner's. One request at a time per connection.

People are slower than HTTP timeouts. A question outlives the connection that asked it: an agent that hung up and sends an
equal request again gets the answer to the first.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

from foundation.ids import Ids
from swarm.client.join.model import ModelRefused
from swarm.protocol.episodes import POLICY_MODEL

MAX_BODY_BYTES = 64 * 2**20
_CHUNK = 65_536
Answer = Callable[[dict[str, Any], str | None], Coroutine[Any, Any, dict[str, Any]]]
"""(chat.completions body, agent's name) → a whole chat.completion. Raises: ModelRefused."""
Delivered = Callable[[dict[str, Any]], None]
"""Told of each answer (the very object) that was sent to an agent that waited for it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    body: dict[str, Any]
    agent: str | None
    answer: asyncio.Task[dict[str, Any]]

    @property
    def refused(self) -> bool:
        return self.answer.done() and (self.answer.cancelled() or self.answer.exception() is not None)


class Seat:
    """Serves while its block is open. `base_url` and `api_key` are what an agent is given."""

    def __init__(self, answer: Answer, ids: Ids, delivered: Delivered = lambda _: None) -> None:
        self._answer = answer
        self._delivered = delivered
        self._open: dict[asyncio.Task[None], _Question] = {}
        """By the connection that waits for the answer."""
        self._left: list[_Question] = []
        """Those whose agent hung up."""
        self.api_key = f"sk-seat-{ids.secret()}"
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()

    @property
    def base_url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=MAX_BODY_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)
        answers = [question.answer for question in self._left]
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = asyncio.current_task()
        assert talk is not None
        self._talks.add(talk)
        try:
            status, headers, body = await self._answered(reader, talk)
            writer.write(_head(status, headers, body) + body)
            await writer.drain()
            self._settle(talk)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # the agent hung up, or the sitting is over
        finally:
            self._leave(talk)
            self._talks.discard(talk)
            writer.close()

    async def _answered(self, reader: asyncio.StreamReader, talk: asyncio.Task[None]) -> tuple[int, str, bytes]:
        method, path, headers = _request_head(await reader.readuntil(b"\r\n\r\n"))
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return _error(411, "send a Content-Length of at most 64 MiB")
        raw = await reader.readexactly(int(length))
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.api_key.encode()):
            return _error(401, "this endpoint is another episode's; use the episode's own api_key")
        if (method, path) == ("GET", "/v1/models"):
            models = {"object": "list", "data": [{"id": POLICY_MODEL, "object": "model", "owned_by": "swarm"}]}
            return 200, "application/json", json.dumps(models).encode()
        if (method, path) != ("POST", "/v1/chat/completions"):
            return _error(404, f"a person answers POST /v1/chat/completions only, not {method} {path}")
        try:
            body = json.loads(raw)
        except ValueError as error:
            return _error(400, f"the body is not JSON: {error}")
        wrong = _wrong_with(body)
        if wrong:
            return _error(400, wrong)
        self._open[talk] = question = self._question(body, headers.get("x-agent-name"))
        return await _told(question, reader)

    def _question(self, body: dict[str, Any], agent: str | None) -> _Question:
        """The equal one whose agent hung up, else a new one."""
        self._left = [question for question in self._left if not question.refused]
        for question in self._left:
            if (question.body, question.agent) == (body, agent):
                self._left.remove(question)
                return question
        return _Question(body, agent, asyncio.ensure_future(self._answer(body, agent)))

    def _settle(self, talk: asyncio.Task[None]) -> None:
        question = self._open.pop(talk, None)
        if question is not None and not question.refused:
            self._delivered(question.answer.result())

    def _leave(self, talk: asyncio.Task[None]) -> None:
        question = self._open.pop(talk, None)
        if question is not None:
            self._left.append(question)


async def _told(question: _Question, reader: asyncio.StreamReader) -> tuple[int, str, bytes]:
    """The answer as HTTP. Raises: ConnectionResetError when the agent hangs up before it is there."""
    gone = asyncio.ensure_future(_hung_up(reader))
    try:
        await asyncio.wait({question.answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ConnectionResetError("the agent hung up")
        answer = question.answer.result()
    except ModelRefused as refusal:
        return refusal.status, "application/json", json.dumps(refusal.body).encode()
    finally:
        gone.cancel()
    if question.body.get("stream"):
        usage = bool((question.body.get("stream_options") or {}).get("include_usage"))
        return 200, "text/event-stream", _frames(answer, usage=usage)
    return 200, "application/json", json.dumps(answer).encode()


async def _hung_up(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await reader.read(_CHUNK):
            pass


def _wrong_with(body: Any) -> str:
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        return "a chat completion needs messages"
    return "" if body.get("n") in (None, 1) else "a person gives one answer at a time; leave n out"


def _request_head(raw: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, path, *_ = [*first.split(" "), "", ""]
    pairs = (line.partition(":") for line in lines)
    return method, path.partition("?")[0], {name.strip().lower(): value.strip() for name, _, value in pairs}


def _head(status: int, content_type: str, body: bytes) -> bytes:
    reason = next((known.phrase for known in HTTPStatus if known.value == status), "Refused")
    return (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    ).encode()


def _error(status: int, message: str) -> tuple[int, str, bytes]:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return status, "application/json", json.dumps({"error": error}).encode()


def _frames(answer: dict[str, Any], *, usage: bool) -> bytes:
    """A whole answer as a stream of three chunks: a person decides on all of it at once."""
    common = {name: answer.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choice = answer["choices"][0]
    delta = {name: value for name, value in choice["message"].items() if value is not None}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta["tool_calls"])]
    steps = [
        {"index": 0, "delta": delta, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]},
    ]
    chunks: list[dict[str, Any]] = [{**common, "choices": [step]} for step in steps]
    if usage:
        chunks.append({**common, "choices": [], "usage": answer.get("usage")})
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
