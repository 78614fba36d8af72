"""The server's transports: standard input and output, or HTTP with a bearer token."""

from __future__ import annotations

import signal
from typing import Any

import anyio
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from researcher.serving import Access

PATH = "/mcp"
_BEARER = "bearer "


def serve_stdio(server: Server[dict[str, Any]]) -> None:
    """Serve the parent process until it closes standard input.

    An interrupt ends the process immediately, because the SDK reads standard input in a thread that would otherwise wait for
    another line.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    anyio.run(_over_stdio, server)


async def _over_stdio(server: Server[dict[str, Any]]) -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def http_app(server: Server[dict[str, Any]], access: Access) -> ASGIApp:
    """Serve streamable HTTP at PATH, without sessions: calls are independent, so clients survive a restart of the server."""
    guarded = TransportSecuritySettings(enable_dns_rebinding_protection=False)  # the guard's rules are stricter
    app = server.streamable_http_app(
        streamable_http_path=PATH, json_response=True, stateless_http=True, transport_security=guarded
    )
    return Guard(app, access)


class Guard:
    """Passes requests that name this server as their host, do not come from another site, and carry the token if one is set."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, headers: Headers) -> Response | None:
        host, access = headers.get("host", ""), self._access
        if not access.serves(host):
            return PlainTextResponse(f"this server is at {access.url}{PATH}\n", 403)
        if not access.is_own(host, headers.get("origin"), headers.get("sec-fetch-site")):
            return PlainTextResponse("this request came from another site; nothing was done\n", 403)
        if access.token is None or access.knows(_token_in(headers.get("authorization", ""))):
            return None
        said = f"send the token of {access.variable} as `Authorization: Bearer TOKEN`; nothing was done\n"
        return PlainTextResponse(said, 401, {"www-authenticate": "Bearer"})


def _token_in(authorization: str) -> str:
    return authorization[len(_BEARER) :].strip() if authorization.lower().startswith(_BEARER) else ""
