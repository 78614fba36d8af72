"""Between a coding agent and the server: makes it call tools, loses answers, and notes what the server refused.

A headless agent offers its model many tools and forces none, and a small model calls none by itself. The stage puts a `tool_choice`
into its requests, in the words of each dialect.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

_SAMPLING = ("/chat/completions", "/responses", "/messages")
_HOP = frozenset({"connection", "transfer-encoding", "keep-alive", "content-length"})


class Stage:
    """url: where agents and their client find the server. Used by one agent at a time."""

    def __init__(self) -> None:
        self.url = ""
        self.refused: list[tuple[str, str]] = []
        """Path and words of what the server answered with 4xx or 5xx."""
        self.asked: list[dict[str, Any]] = []
        """Bodies of the agent's own requests for an answer, as it sent them."""
        self._tools: list[str] = []
        self._lost = 0

    def force(self, tools: Sequence[str]) -> None:
        """Make the next requests that offer these tools call them, in turn."""
        self._tools, self.refused, self.asked = list(tools), [], []

    def lose(self, count: int) -> None:
        """Answer so many of the next requests with 529, as a provider does that is overloaded: agents try again."""
        self._lost = count

    def directed(self, path: str, body: bytes) -> bytes | None:
        """The body that the server gets; None: it gets none, and the agent an error."""
        if not path.endswith(_SAMPLING):
            return body
        asked = json.loads(body)
        self.asked.append(asked)
        if self._lost:
            self._lost -= 1
            return None
        if self._tools and self._tools[0] in _names(asked.get("tools") or []):
            asked = asked | {"tool_choice": _choice(path, self._tools.pop(0))}
        return json.dumps(asked).encode()


def _names(tools: Sequence[dict[str, Any]]) -> list[str]:
    return [str(tool.get("name") or (tool.get("function") or {}).get("name")) for tool in tools]


def _choice(path: str, name: str) -> dict[str, Any]:
    if path.endswith("/messages"):
        return {"type": "tool", "name": name}
    if path.endswith("/responses"):
        return {"type": "function", "name": name}
    return {"type": "function", "function": {"name": name}}


@contextlib.contextmanager
def staged(upstream: str) -> Iterator[Stage]:
    """A stage in front of the server at `upstream`, on a port of loopback."""
    stage = Stage()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stage.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(_app(upstream, stage), lifespan="on", log_config=None, timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield stage
        finally:
            server.should_exit = True
            thread.join()


def _app(upstream: str, stage: Stage) -> Starlette:
    http = httpx.AsyncClient(
        base_url=upstream, timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None)
    )

    async def pass_on(request: Request) -> Response:
        path = request.url.path
        body = stage.directed(path, await request.body())
        if body is None:
            error = {"type": "overloaded_error", "message": "overloaded"}
            return JSONResponse({"type": "error", "error": error}, status_code=529, headers={"retry-after": "0"})
        # The host stays what was asked for: the server's grants name it, so that the episode's calls come here as well.
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        target = httpx.URL(path=path, query=request.url.query.encode())
        answer = await http.send(http.build_request(request.method, target, headers=headers, content=body), stream=True)
        told = {name: value for name, value in answer.headers.items() if name not in _HOP}
        if path.startswith("/v1/") and answer.status_code >= 400:
            words = (await answer.aread()).decode(errors="replace")
            stage.refused.append((path, words[:600]))
            return Response(words, status_code=answer.status_code, headers=told)
        return StreamingResponse(_passed(answer), status_code=answer.status_code, headers=told)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with http:
            yield

    return Starlette(
        routes=[Route("/{path:path}", pass_on, methods=["GET", "POST", "PATCH", "PUT", "DELETE", "HEAD"])],
        lifespan=lifespan,
    )


async def _passed(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()
