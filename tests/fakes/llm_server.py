"""An OpenAI-compatible server on this machine whose answers are scripted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class LlmServer:
    """asked: the body of every request. refuses: fields of a request that are answered with an error, as by an endpoint without them."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def llm_server(
    answers: Sequence[dict[str, Any]] = (),
    refuses: Sequence[str] = (),
    status: int = 400,
    when: Callable[[dict[str, Any]], dict[str, Any] | int] | None = None,
) -> Iterator[LlmServer]:
    """Answers in turn, those that are refused not counted. when: finds the answer to a request, or the status of an error."""
    waiting = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            served.asked.append(body)
            if when is not None:
                found = when(body)
                failed = {"error": {"message": "not now"}}
                self._send(*((found, failed) if isinstance(found, int) else (200, found)))
                return
            unknown = next((name for name in refuses if name in body), None)
            if self.path != "/v1/chat/completions" or not (unknown or waiting):
                self._send(404, {"error": {"message": "nothing is here"}})
            elif unknown:
                self._send(status, {"error": {"message": f"unknown field: {unknown}"}})
            else:
                self._send(200, waiting.pop(0))

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = LlmServer(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
