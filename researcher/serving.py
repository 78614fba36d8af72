"""HTTP serving for the web page and the MCP server: access rules, the listening socket, and a loop with an orderly shutdown.

Nothing is stored: sessions and forms are signed with a secret that exists only as long as the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp

from foundation.addresses import is_loopback
from foundation.commandline import UsageError
from foundation.event_loop import on_stop_signals

UI_TOKEN, MCP_TOKEN = "RESEARCHER_UI_TOKEN", "RESEARCHER_MCP_TOKEN"
"""Environment variables of the tokens. They are separate, so that an agent with the MCP token cannot answer gates on the page."""
_LEAST_TOKEN_CHARS = 16
_SECRET_BYTES = 32
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Access rules of a web page or MCP server.

    Args:
        host, port: where it listens.
        public_url: its URL behind a proxy.
        variable: name of the environment variable that holds its token.
    Raises: UsageError if other machines could reach it without a token.
    """

    host: str
    port: int
    token: str | None = None
    public_url: str | None = None
    variable: str = UI_TOKEN
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(_SECRET_BYTES), repr=False)

    def __post_init__(self) -> None:
        public = urlsplit(self.public_url or "http://none")
        if public.scheme not in ("http", "https") or not public.netloc or public.path or public.query:
            raise UsageError(
                f"--public-url {self.public_url!r} is not a web address without a path; write it as https://name[:port]"
            )
        if self.token is None and (self.public_url is not None or not is_loopback(self.host)):
            raise UsageError(
                f"{self.public_url or self.host} can be reached from other machines: set {self.variable} in the "
                "environment (or --token-file), or listen on 127.0.0.1"
            )

    @property
    def url(self) -> str:
        """The page's URL, for people."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return self.public_url or f"http://{_named(host)}:{self.port}"

    @property
    def local(self) -> bool:
        """Whether only browsers on this machine can reach it."""
        return self.public_url is None and is_loopback(self.host)

    @property
    def cookie(self) -> str:
        """The cookie's name. Browsers share cookies between all ports of a host, so pages on two ports need different names."""
        return f"researcher_{self.port}"

    # -- addresses ----------------------------------------------------------------------------------------------------

    def serves(self, host: str) -> bool:
        """Return whether a request with this `Host` header is meant for the page.

        On loopback, a foreign name that resolves to 127.0.0.1 (DNS rebinding) is refused. Elsewhere any name is fine, because the
        token decides.
        """
        if not self.local:
            return True
        names = {*_LOOPBACK_NAMES, _named(self.host).lower()}
        named = {f"{name}:{self.port}" for name in names}
        return host.lower() in (named if self.port != 80 else named | names)

    def is_own(self, host: str, origin: str | None, fetch_site: str | None) -> bool:
        """Return whether a request comes from a page of this origin, by the browser's headers `Origin` and `Sec-Fetch-Site`.

        True for programs, which send neither.
        """
        if fetch_site not in (None, "same-origin"):
            return False
        if origin is None:
            return True
        own = {host.lower()} | ({urlsplit(self.public_url).netloc.lower()} if self.public_url else set())
        return urlsplit(origin).netloc.lower() in own - {""}

    # -- people -------------------------------------------------------------------------------------------------------

    def knows(self, token: str) -> bool:
        """Return whether this is the token. False if no token is set; then nobody needs one."""
        return self.token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def new_session(self) -> str:
        """Return a new session cookie for a browser that may see the page."""
        session = secrets.token_urlsafe(18)
        return f"{session}.{self._signed('session', session)}"

    def session(self, cookie: str) -> str | None:
        """Return the session of a cookie; None if this process did not issue it."""
        session, _, signature = cookie.partition(".")
        genuine = hmac.compare_digest(signature.encode(), self._signed("session", session).encode())
        return session if genuine else None

    def form_token(self, session: str) -> str:
        """Return the CSRF token of this session's forms."""
        return self._signed("form", session)

    def form_fits(self, session: str, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.form_token(session).encode())

    def _signed(self, purpose: str, text: str) -> str:
        return hmac.digest(self._secret, f"{purpose}:{text}".encode(), "sha256").hex()


def _named(host: str) -> str:
    """Return the host as it appears in a URL."""
    return f"[{host}]" if ":" in host else host


def load_token(environ: Mapping[str, str], file: Path | None, variable: str = UI_TOKEN) -> str | None:
    """Return the token from the file, else from the environment variable. Raises: UsageError for an unusable token."""
    try:
        token = environ.get(variable) if file is None else file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the token file {file} cannot be read: {error}") from error
    if not token and file is None:
        return None
    if not token or len(token) < _LEAST_TOKEN_CHARS or not token.isascii():
        raise UsageError(
            f"the token must have at least {_LEAST_TOKEN_CHARS} ASCII characters; `openssl rand -hex 24` makes one"
        )
    return token


_STOP_LIMIT_S = 5


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open a listening socket; port 0 takes a free port. Raises: UsageError when it cannot be opened."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Name the protocol: without it, asyncio does not set TCP_NODELAY, and an answer takes 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another --port, or 0 for any"
            ) from error
        yield listener


def serve(app: ASGIApp, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM. Calls `ready` once the server answers."""
    asyncio.run(_Server(app, ready).serve(sockets=[listener]))


class _Server(uvicorn.Server):
    """A uvicorn server that exits normally after a signal, instead of raising the signal again."""

    def __init__(self, app: ASGIApp, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_STOP_LIMIT_S,
            )
        )
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with on_stop_signals(self._stop):
            yield

    def _stop(self) -> None:
        self.force_exit = self.should_exit  # a second signal: do not wait for open requests
        self.should_exit = True
