"""Who may ask a replica: whoever knows its key. vLLM itself asks for the key on some of its paths alone.

Runs inside a replica's HTTP server, which loads it by name; the control process never imports it.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

_OPEN = ("/health", "/version")
_JSON = [(b"content-type", b"application/json")]
_POLICY_VIOLATION = 1008


class Doorkeeper:
    """ASGI middleware: every path but `/health` and `/version` asks for a key of the server's own, whatever the method.

    The keys are where vLLM keeps them, in the arguments that its application was built with.
    """

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in _OPEN or _knows_a_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": _JSON})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})


def _knows_a_key(scope: Message) -> bool:
    told: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, key = told.partition(b" ")
    keys = [str(one).encode() for one in scope["app"].state.args.api_key]
    return scheme.lower() == b"bearer" and any(secrets.compare_digest(key, one) for one in keys)
