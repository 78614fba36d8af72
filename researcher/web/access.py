"""Access control of the page: the guard in front of its routes, the session cookie, response headers."""

from __future__ import annotations

from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from researcher.serving import Access

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # With `no-referrer`, browsers would send `Origin: null` even with the page's own forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
OPEN = ("/login", "/static/")
"""Paths that need no session, because they show no study data."""


class Guard:
    """ASGI middleware around the application. Sets `request.state.session`; each POST must carry this session's form token."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, fresh = Request(scope), None
        answer: ASGIApp | None = self._foreign(request)
        if answer is None and not request.url.path.startswith(OPEN):
            request.state.session = self._access.session(request.cookies.get(self._access.cookie, ""))
            if request.state.session is None and self._access.token is None:
                fresh = self._access.new_session()
                request.state.session = self._access.session(fresh)
            if request.state.session is None:
                answer = self._ask_for_token(request)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._dress(MutableHeaders(scope=message), fresh)
            await send(message)

        await (answer or self._app)(scope, receive, with_headers)

    def _foreign(self, request: Request) -> Response | None:
        """Refuse a request for another host, or a write from another site; else return None."""
        host = request.headers.get("host", "")
        if not self._access.serves(host):
            return PlainTextResponse(f"this page is only served at {self._access.url}\n", 403)
        own = self._access.is_own(host, request.headers.get("origin"), request.headers.get("sec-fetch-site"))
        if request.method not in ("GET", "HEAD") and not own:
            return PlainTextResponse("this request came from another site; nothing was done\n", 403)
        return None

    def _ask_for_token(self, request: Request) -> Response:
        if request.method in ("GET", "HEAD"):
            return RedirectResponse(f"/login?next={quote(request.url.path)}", 303)
        return PlainTextResponse("you are not logged in, so nothing was done; open this page again to log in\n", 401)

    def _dress(self, headers: MutableHeaders, fresh: str | None) -> None:
        for name, value in HEADERS.items():
            headers.setdefault(name, value)
        if fresh is not None:
            headers.append("set-cookie", session_cookie(self._access, fresh))


def session_cookie(access: Access, session: str) -> str:
    """Build the Set-Cookie header of a session, which is valid until the browser or the server ends.

    Browsers do not send the cookie with requests that other sites make, except when a person follows a link (SameSite=Lax).
    """
    secure = "; Secure" if access.url.startswith("https://") else ""
    return f"{access.cookie}={session}; Path=/; HttpOnly; SameSite=Lax{secure}"
