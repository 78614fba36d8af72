"""Access to the page: addresses, token, sessions, forms that only the page can send, response headers.

Nothing is stored: sessions and forms are signed with a secret that lives as long as the process.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foundation.addresses import is_loopback
from foundation.commandline import UsageError

TOKEN_VARIABLE = "RESEARCHER_UI_TOKEN"
_LEAST_TOKEN_CHARS = 16
_SECRET_BYTES = 32
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The rules of one page. host, port: where it listens. public_url: how browsers call it behind a proxy.

    Raises: UsageError where it could be reached from other machines and asks for no token.
    """

    host: str
    port: int
    token: str | None = None
    public_url: str | None = None
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(_SECRET_BYTES), repr=False)

    def __post_init__(self) -> None:
        public = urlsplit(self.public_url or "http://none")
        if public.scheme not in ("http", "https") or not public.netloc or public.path or public.query:
            raise UsageError(
                f"--public-url {self.public_url!r} is not the address of a page; write it as https://name[:port]"
            )
        if self.token is None and (self.public_url is not None or not is_loopback(self.host)):
            raise UsageError(
                f"{self.public_url or self.host} can be reached from other machines: set {TOKEN_VARIABLE} in the "
                "environment (or --token-file), or listen on 127.0.0.1"
            )

    @property
    def url(self) -> str:
        """The page's address, for people."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return self.public_url or f"http://{_named(host)}:{self.port}"

    @property
    def local(self) -> bool:
        """Whether browsers of this machine alone can reach it."""
        return self.public_url is None and is_loopback(self.host)

    @property
    def cookie(self) -> str:
        """Browsers share cookies between all ports of a host: two pages must not overwrite each other's."""
        return f"researcher_{self.port}"

    # -- addresses ----------------------------------------------------------------------------------------------------

    def serves(self, host: str) -> bool:
        """Whether a request that names this `Host` is meant for the page: on loopback a stranger's name that was pointed
        at 127.0.0.1 is not. Elsewhere names are free, and the token decides."""
        if not self.local:
            return True
        names = {*_LOOPBACK_NAMES, _named(self.host).lower()}
        named = {f"{name}:{self.port}" for name in names}
        return host.lower() in (named if self.port != 80 else named | names)

    def is_own_form(self, host: str, origin: str | None, fetch_site: str | None) -> bool:
        """Whether a POST comes from a page of this origin, by what the browser says: `Origin`, `Sec-Fetch-Site`."""
        if fetch_site not in (None, "same-origin"):
            return False
        if origin is None:
            return True
        own = {host.lower()} | ({urlsplit(self.public_url).netloc.lower()} if self.public_url else set())
        return urlsplit(origin).netloc.lower() in own - {""}

    # -- people -------------------------------------------------------------------------------------------------------

    def knows(self, token: str) -> bool:
        """Whether this is the token; without one nobody needs to know any."""
        return self.token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def new_session(self) -> str:
        """The cookie of a browser that may see the page."""
        session = secrets.token_urlsafe(18)
        return f"{session}.{self._signed('session', session)}"

    def session(self, cookie: str) -> str | None:
        """The session behind a cookie; None where this process did not make it."""
        session, _, signature = cookie.partition(".")
        genuine = hmac.compare_digest(signature.encode(), self._signed("session", session).encode())
        return session if genuine else None

    def form_token(self, session: str) -> str:
        """CSRF token of this session's forms."""
        return self._signed("form", session)

    def form_fits(self, session: str, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.form_token(session).encode())

    def _signed(self, purpose: str, text: str) -> str:
        return hmac.digest(self._secret, f"{purpose}:{text}".encode(), "sha256").hex()


def _named(host: str) -> str:
    """The host as part of an address."""
    return f"[{host}]" if ":" in host else host


def load_token(environ: Mapping[str, str], file: Path | None) -> str | None:
    """The token from the file, else from the environment. Raises: UsageError for an unusable one."""
    try:
        token = environ.get(TOKEN_VARIABLE) if file is None else file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the token file {file} cannot be read: {error}") from error
    if not token and file is None:
        return None
    if not token or len(token) < _LEAST_TOKEN_CHARS or not token.isascii():
        raise UsageError(f"the token must have at least {_LEAST_TOKEN_CHARS} ASCII characters; `openssl rand -hex 24`")
    return token


HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # With `no-referrer` browsers would send `Origin: null` with the page's own forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
OPEN = ("/login", "/static/")
"""Paths that need no session: nothing of any study is there."""


class Guard:
    """Wraps the application. `request.state.session` is the session; its form token is the only one that POSTs may carry."""

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
        """The refusal of a request that is not for this page, or comes from another one."""
        host = request.headers.get("host", "")
        if not self._access.serves(host):
            return PlainTextResponse(f"this page is at {self._access.url}\n", 403)
        own = self._access.is_own_form(host, request.headers.get("origin"), request.headers.get("sec-fetch-site"))
        if request.method not in ("GET", "HEAD") and not own:
            return PlainTextResponse("this was sent from another site; nothing was done\n", 403)
        return None

    def _ask_for_token(self, request: Request) -> Response:
        if request.method in ("GET", "HEAD"):
            return RedirectResponse(f"/login?next={quote(request.url.path)}", 303)
        return PlainTextResponse("log in first: open this page again; nothing was done\n", 401)

    def _dress(self, headers: MutableHeaders, fresh: str | None) -> None:
        for name, value in HEADERS.items():
            headers.setdefault(name, value)
        if fresh is not None:
            headers.append("set-cookie", session_cookie(self._access, fresh))


def session_cookie(access: Access, session: str) -> str:
    """Kept until the browser or the page is closed; never sent with requests that other sites make for themselves."""
    secure = "; Secure" if access.url.startswith("https://") else ""
    return f"{access.cookie}={session}; Path=/; HttpOnly; SameSite=Lax{secure}"
