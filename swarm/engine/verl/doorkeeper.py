"""Who may ask a replica: whoever knows its key. vLLM itself asks for the key on some of its paths alone.

Runs inside a replica's HTTP server, which loads it by name; the control process never imports it.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An application of the ASGI specification, 3.0."""

_OPEN = ("/health", "/version")
_REFUSAL = b'{"error":"Unauthorized"}'


class Doorkeeper:
    """ASGI middleware: every path but `/health` and `/version` asks for a key of the server's own, whatever the method.

    The keys are where vLLM keeps them, in the arguments that its application was built with.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in _OPEN or _knows_a_key(scope):
            await self._app(scope, receive, send)
        else:
            await _refuse(scope["type"], send)


async def _refuse(kind: str, send: Send) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_REFUSAL)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": _REFUSAL})


def _knows_a_key(scope: Scope) -> bool:
    said = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, told = said.partition(b" ")
    keys = [str(key).encode() for key in scope["app"].state.args.api_key]
    return scheme.lower() == b"bearer" and any(secrets.compare_digest(told, key) for key in keys)
