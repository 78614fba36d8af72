"""Secret URL prefixes: AgentJet's clients send no credentials, so their server address contains one.

Such a client gets `http://host:8642/ajet/SECRET` as the server's address. We strip the secret before any other code sees the
request, so it appears in no log, error or answer.
"""

from __future__ import annotations

import hmac
import re
import stat
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from foundation.nearest import nearest
from swarm.protocol.errors import SwarmError
from swarm.server.keys import Role
from swarm.server.routes.wire import answer_json

MOUNT = "/ajet/"
ROLE = "swarm.agentjet_role"
"""Key in the ASGI scope for the role that the request's prefix grants; None at the root of a server without tokens."""
_LEAST_SECRET_CHARS = 16
_SECRET = re.compile(r"[A-Za-z0-9_~.-]+")
_INFERENCE = "/v1/"


class PrefixFault(SwarmError):
    """The file of secret prefixes cannot be used. The message says what to fix and contains no secret."""


@dataclass(frozen=True, slots=True, repr=False)
class Prefixes:
    """The secret prefixes of admin and clients. An admin can also start and stop runs. `AT_ROOT` means that there are no secrets."""

    admin: str
    client: str

    @classmethod
    def load(cls, path: Path) -> Prefixes:
        """Read the prefixes from a TOML file that only its owner can read. Raises: PrefixFault."""
        try:
            mode = path.stat().st_mode
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PrefixFault(
                f"cannot read the prefixes in {path}: {getattr(error, 'strerror', 'not UTF-8')}"
            ) from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise PrefixFault(f"users other than the owner can access {path}: chmod 600 it, and change the secrets")
        try:
            given = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:  # the error's text may quote the line
            raise PrefixFault(f'{path} is not TOML: write two lines, admin = "…" and client = "…"') from error
        for name in given:
            if name not in cls.__slots__:
                hint = nearest(name, cls.__slots__)
                meant = f"; did you mean {hint}?" if hint else "; the keys are admin and client"
                raise PrefixFault(f"{path}: unknown key {name[:40]!r}{meant}")
        secrets = [_secret(path, name, given.get(name)) for name in cls.__slots__]
        if hmac.compare_digest(*secrets):
            raise PrefixFault(f"{path}: admin and client must differ, or clients could stop the run")
        return cls(*secrets)

    def role_of(self, secret: str) -> Role | None:
        """Return the role of this secret, compared in constant time; None if the secret is unknown."""
        given = secret.encode()
        admin = hmac.compare_digest(given, self.admin.encode())
        client = hmac.compare_digest(given, self.client.encode())
        return Role.ADMIN if admin else Role.CLIENT if client else None


AT_ROOT = Prefixes(admin="", client="")
"""Serves the facade at the root, without a secret, for a loopback server without tokens."""


def _secret(path: Path, name: str, given: object) -> str:
    if not isinstance(given, str) or len(given) < _LEAST_SECRET_CHARS or not _SECRET.fullmatch(given):
        wanted = f"at least {_LEAST_SECRET_CHARS} letters, digits, or characters of `-_.~`"
        raise PrefixFault(f"{path}: {name} must be {wanted}; `openssl rand -hex 20` makes one")
    return given


class Front:
    """ASGI application that sends requests under a secret prefix to the facade, except `/v1`, and all others to the server.

    With `AT_ROOT` there is no prefix: the facade gets the requests to `paths`.
    """

    def __init__(self, server: ASGIApp, facade: ASGIApp, prefixes: Prefixes, paths: Collection[str]) -> None:
        self._server = server
        self._facade = facade
        self._prefixes = prefixes
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._server(scope, receive, send)
            return
        app, inner = self._place(scope)
        await app(inner, receive, send)

    def _place(self, scope: Scope) -> tuple[ASGIApp, Scope]:
        """Return the application that answers a request, and the scope without the secret."""
        path = str(scope["path"])
        if self._prefixes is AT_ROOT:
            plain = _plain(path)
            return (self._facade if plain in self._paths else self._server), _moved(scope, plain, None)
        if not path.startswith(MOUNT):
            return self._server, scope
        secret, _, rest = path.removeprefix(MOUNT).partition("/")
        role, plain = self._prefixes.role_of(secret), _plain(rest)
        if role is None:
            return _nobody, scope
        return (self._server if plain.startswith(_INFERENCE) else self._facade), _moved(scope, plain, role)


def _plain(path: str) -> str:
    """Return the path with one leading slash: a server address that ends with a slash gives paths that begin with two."""
    return "/" + path.lstrip("/")


def _moved(scope: Scope, path: str, role: Role | None) -> Scope:
    return {**scope, "path": path, "raw_path": path.encode(), ROLE: role}


async def _nobody(scope: Scope, receive: Receive, send: Send) -> None:
    await answer_json({"detail": "no such address on this server"}, status=404)(scope, receive, send)
