"""A local chat endpoint at which a person answers, so that a person can play for any agent that uses chat.completions.

It handles HTTP and the API's message format; its owner supplies the answers.

People are slower than HTTP timeouts, so a question outlives its connection: if an agent hangs up and repeats the request, it gets
the answer to the first one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from foundation.ids import Ids
from swarm.client.join.model import ModelRefused
from swarm.protocol.episodes import POLICY_MODEL
from swarm.protocol.errors import ErrorCode

MAX_BODY_BYTES = 64 * 2**20
Answer = Callable[[dict[str, Any], str | None], Coroutine[Any, Any, dict[str, Any]]]
"""Takes a chat.completions body and the agent's name; returns a whole chat.completion. Raises: ModelRefused."""
Delivered = Callable[[dict[str, Any]], None]
"""Called with each answer that was sent to a waiting agent. Gets the same object that `Answer` returned."""


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    body: dict[str, Any]
    agent: str | None
    answer: asyncio.Task[dict[str, Any]]

    @property
    def failed(self) -> bool:
        return self.answer.done() and (self.answer.cancelled() or self.answer.exception() is not None)


class PersonEndpoint:
    """The server of the endpoint, which runs while its `async with` block is open. Give its `base_url` and `api_key` to an agent."""

    def __init__(self, answer: Answer, ids: Ids, delivered: Delivered = lambda _: None) -> None:
        self._answer = answer
        self._delivered = delivered
        self._left: list[_Question] = []
        """Questions whose agents have hung up."""
        self.api_key = f"sk-person-{ids.secret()}"
        self._socket = socket.socket()
        routes = [Route("/v1/models", self._models), Route("/v1/chat/completions", self._chat, methods=["POST"])]
        handlers: Any = {HTTPException: _refused, ModelRefused: _model_refused, ClientDisconnect: _left_early}
        self._server = _Server(Starlette(routes=routes, exception_handlers=handlers))
        self._serving: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"

    async def __aenter__(self) -> Self:
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen()
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._serving is not None
        self._server.should_exit = self._server.force_exit = True
        await asyncio.wait([self._serving])
        self._socket.close()
        answers = [question.answer for question in self._left]
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)

    async def _models(self, request: Request) -> Response:
        self._require_key(request)
        models = [{"id": POLICY_MODEL, "object": "model", "owned_by": "swarm"}]
        return JSONResponse({"object": "list", "data": models})

    async def _chat(self, request: Request) -> Response:
        self._require_key(request)
        question = self._question(await _body(request), request.headers.get("x-agent-name"))
        leaving = asyncio.create_task(_hung_up(request))
        try:
            await asyncio.wait({question.answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not question.answer.done() or leaving.done():
                self._left.append(question)
        if leaving.done():
            return Response()  # nobody will read it
        answer = question.answer.result()
        sent = BackgroundTask(self._delivered, answer)
        if not question.body.get("stream"):
            return JSONResponse(answer, background=sent)
        usage = bool((question.body.get("stream_options") or {}).get("include_usage"))
        return Response(_frames(answer, usage=usage), media_type="text/event-stream", background=sent)

    def _question(self, body: dict[str, Any], agent: str | None) -> _Question:
        """Return an identical question whose agent hung up, if there is one, else a new question."""
        self._left = [question for question in self._left if not question.failed]
        for question in self._left:
            if (question.body, question.agent) == (body, agent):
                self._left.remove(question)
                return question
        return _Question(body, agent, asyncio.ensure_future(self._answer(body, agent)))

    def _require_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.api_key.encode()):
            raise HTTPException(401, "wrong API key: this endpoint belongs to one episode; use that episode's api_key")


class _Server(uvicorn.Server):
    """uvicorn without signal handlers, because the program has its own."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _body(request: Request) -> dict[str, Any]:
    """Read and check a request's body. Raises: HTTPException."""
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > MAX_BODY_BYTES:
            raise HTTPException(413, "the body is larger than 64 MiB")
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise HTTPException(400, "the body needs a list of `messages`")
    if body.get("n") not in (None, 1):
        raise HTTPException(400, "a person gives one answer at a time; omit n")
    return body


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def _refused(request: Request, error: HTTPException) -> Response:
    message = error.detail
    if error.status_code in (404, 405):
        message = f"only POST /v1/chat/completions is answered by a person, not {request.method} {request.url.path}"
    code = {401: ErrorCode.UNAUTHORIZED, 404: ErrorCode.NOT_FOUND, 405: ErrorCode.NOT_FOUND}.get(
        error.status_code, ErrorCode.INVALID_SPEC
    )
    document = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": document}, 404 if error.status_code == 405 else error.status_code)


async def _model_refused(request: Request, refusal: ModelRefused) -> Response:
    return JSONResponse(refusal.body, refusal.status)


async def _left_early(request: Request, error: ClientDisconnect) -> Response:
    return Response()  # nobody is left to read it


def _frames(answer: dict[str, Any], *, usage: bool) -> bytes:
    """Return a complete answer as a short event stream: a person gives the whole text in one go."""
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
