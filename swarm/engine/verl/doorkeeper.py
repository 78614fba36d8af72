"""Who may ask a replica: whoever knows its key. vLLM itself asks for the key on some of its paths alone.

Runs inside a replica's HTTP server, which loads it by name; the control process never imports it.
"""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_OPEN = ("/health", "/version")


class Doorkeeper:
    """ASGI middleware: every path but `/health` and `/version` asks for a key of the server's own, whatever the method.

    The keys are where vLLM keeps them, in the arguments that its application was built with.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in _OPEN or _knows_a_key(scope):
            await self._app(scope, receive, send)
        else:
            await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)


def _knows_a_key(scope: Scope) -> bool:
    scheme, _, told = Headers(scope=scope).get("authorization", "").partition(" ")
    keys = [str(key).encode() for key in scope["app"].state.args.api_key]
    return scheme.lower() == "bearer" and any(secrets.compare_digest(told.encode(), key) for key in keys)
