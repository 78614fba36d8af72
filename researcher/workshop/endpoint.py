"""An endpoint that gives one fixed answer to every call, in each dialect that agents speak: what code is tried against."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ECHO = "@echo"
"""As an answer: the last thing that was said to the model."""
MOST_CALLS = 64
"""Of one episode; then the endpoint refuses, so that no agent goes on for ever."""


class FixedEndpoint:
    """Bound at once, so that its port is known; serves after `serve`."""

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.answer = ""
        self.asked: list[str] = []
        """Hashes of what was asked since `begin`."""

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def serve(self) -> None:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def begin(self, answer: str) -> None:
        self.answer, self.asked = answer, []

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, str, bytes]:
        """Status, content type and content."""
        if len(self.asked) >= MOST_CALLS:
            return 400, _JSON, json.dumps({"error": {"message": "too many calls in one episode"}}).encode()
        self.asked.append(hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16])
        text = _last_said(body) if self.answer == ECHO else self.answer
        for ending, shape in _SHAPES.items():
            if path.endswith(ending):
                if body.get("stream"):
                    return _streamed(ending, text)
                return 200, _JSON, json.dumps(shape(text, int(body.get("n") or 1))).encode()
        return 404, _JSON, json.dumps({"error": {"message": f"nothing is served at {path}"}}).encode()


_JSON = "application/json"


def _handler(endpoint: FixedEndpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else the second part of each answer waits 40 ms

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                body = json.loads(raw)
            except ValueError:
                body = {}
            status, kind, content = endpoint.reply(self.path, body if isinstance(body, dict) else {})
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    return Handler


def _last_said(body: dict[str, Any]) -> str:
    said = body.get("messages") or body.get("input") or body.get("prompt") or ""
    if isinstance(said, list):
        said = said[-1].get("content", "") if said and isinstance(said[-1], dict) else ""
    return said if isinstance(said, str) else json.dumps(said)


_USED = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
_COUNTED = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}


def _chat(text: str, count: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choices = [{"index": at, "message": message, "finish_reason": "stop", "logprobs": None} for at in range(count)]
    return {
        "id": "c-1",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": choices,
        "usage": _USED,
    }


def _completion(text: str, count: int) -> dict[str, Any]:
    choices = [{"index": at, "text": text, "finish_reason": "stop", "logprobs": None} for at in range(count)]
    return {
        "id": "c-1",
        "object": "text_completion",
        "created": 0,
        "model": "policy",
        "choices": choices,
        "usage": _USED,
    }


def _response(text: str, _count: int) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"type": "message", "id": "m-1", "role": "assistant", "status": "completed", "content": content}
    rest = {"parallel_tool_calls": False, "tool_choice": "auto", "tools": [], "model": "policy", "usage": _COUNTED}
    return {"id": "r-1", "object": "response", "created_at": 0, "status": "completed", "output": [message], **rest}


def _message(text: str, _count: int) -> dict[str, Any]:
    end = {"stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}
    content = [{"type": "text", "text": text}]
    return {"id": "m-1", "type": "message", "role": "assistant", "model": "policy", "content": content, **end}


_SHAPES = {
    "/chat/completions": _chat,
    "/completions": _completion,
    "/responses": _response,
    "/messages": _message,
}


def _streamed(ending: str, text: str) -> tuple[int, str, bytes]:
    if ending != "/chat/completions":
        return 400, _JSON, json.dumps({"error": {"message": "only chat completions are streamed here"}}).encode()
    delta = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    chunk = {"id": "c-1", "object": "chat.completion.chunk", "created": 0, "model": "policy", "choices": [delta]}
    return 200, "text/event-stream", f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
