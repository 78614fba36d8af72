"""An HTTP relay to a Unix socket, in a thread of its own: bare vLLM on a TCP port, and the witness's place on the way to it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.conformance.witness import Witness

_SAMPLING = frozenset({"/v1/chat/completions", "/v1/completions"})
_DONE = b"data: [DONE]"
_LOOK_EVERY_S = 0.02
_HOP = frozenset({"connection", "transfer-encoding", "keep-alive", "host"})


class NoSocket(Exception):
    """vLLM's socket did not appear."""


@contextlib.contextmanager
def relaying(listener: socket.socket, upstream: Path, witness: Witness | None = None) -> Iterator[None]:
    """Pass requests at `listener` on to `upstream` meanwhile; the witness sees the answers that hold sampled ids."""
    server = uvicorn.Server(
        uvicorn.Config(_app(upstream, witness), lifespan="off", log_config=None, timeout_graceful_shutdown=2)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def served_bare(upstream: Path) -> Iterator[str]:
    """vLLM's socket on a port of loopback; its base URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener, relaying(listener, upstream):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


@contextlib.contextmanager
def witnessed(vllm_socket: Path, witness: Witness) -> Iterator[Path]:
    """Put the witness where clients look for vLLM; gives the path at which vLLM itself is found from now on.

    To be entered before vLLM serves: connections that are open already would pass it by.
    """
    real = vllm_socket.with_name("sampling.sock")
    vllm_socket.rename(real)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(vllm_socket))
        vllm_socket.chmod(0o600)
        listener.listen(256)
        with relaying(listener, real, witness):
            yield real


def vllm_socket_of(state_dir: Path, *, limit_s: float = 120.0) -> Path:
    """vLLM's socket, as soon as the server in `state_dir` has made it, long before it serves. Raises: NoSocket."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        for note in state_dir.rglob("*.socket-dir"):
            if (found := Path(note.read_text()) / "vllm.sock").exists():
                return found
        time.sleep(_LOOK_EVERY_S)
    raise NoSocket(f"no socket of vLLM within {limit_s:.0f} s; its log is in {state_dir}")


def _app(upstream: Path, witness: Witness | None) -> Starlette:
    http = httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=str(upstream), limits=httpx.Limits(max_connections=None)),
        base_url="http://vllm",
        timeout=None,
    )

    async def pass_on(request: Request) -> Response:
        target = httpx.URL(path=request.url.path, query=request.url.query.encode())
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        asked = http.build_request(request.method, target, headers=headers, content=await request.body())
        try:
            answer = await http.send(asked, stream=True)
        except httpx.TransportError as error:  # vLLM does not listen yet, or has ended
            return Response(f"vLLM does not answer: {error}", status_code=502)
        noted = witness if request.url.path in _SAMPLING and answer.status_code == 200 else None
        told = {name: value for name, value in answer.headers.items() if name not in _HOP}
        return StreamingResponse(_passed(answer, noted), status_code=answer.status_code, headers=told)

    return Starlette(routes=[Route("/{path:path}", pass_on, methods=["GET", "POST", "PUT", "DELETE"])])


async def _passed(answer: httpx.Response, witness: Witness | None) -> AsyncIterator[bytes]:
    """The bytes as they come. The witness notes an answer before its end is handed on."""
    events = answer.headers.get("content-type", "").startswith("text/event-stream")
    kept, noted = b"", witness is None
    try:
        if not events:
            kept = b"".join([part async for part in answer.aiter_raw()])
            if witness is not None:
                noted = True
                witness.note(kept, events=False)
            yield kept
            return
        async for part in answer.aiter_raw():
            kept += b"" if noted else part
            if witness is not None and not noted and _DONE in kept[-64:]:
                noted = True
                witness.note(kept, events=True)
            yield part
    finally:
        await answer.aclose()
        if witness is not None and not noted:  # broken off
            witness.note(kept, events=events)
