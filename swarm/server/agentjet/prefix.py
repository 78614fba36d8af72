"""Secret URL prefixes: AgentJet's clients send no credential, so the address that they are given is one.

`http://host:8642/ajet/SECRET` is what such a client takes for the server's address. The secret is taken off before anything else sees
the request: no log, error or answer has it.
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
"""Of the ASGI scope: what the prefix of this request allows. None: it had none."""
_LEAST_SECRET_CHARS = 16
_SECRET = re.compile(r"[A-Za-z0-9_~.-]+")
_INFERENCE = "/v1/"


class PrefixFault(SwarmError):
    """The file of secret prefixes cannot be used. Says what to mend, and repeats no secret."""


@dataclass(frozen=True, slots=True, repr=False)
class Prefixes:
    """The two secrets: an admin's also starts and stops runs. See `AT_ROOT` for none."""

    admin: str
    client: str

    @classmethod
    def load(cls, path: Path) -> Prefixes:
        """From a TOML file that its owner alone can read. Raises: PrefixFault."""
        try:
            mode = path.stat().st_mode
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PrefixFault(
                f"cannot read the prefixes in {path}: {getattr(error, 'strerror', 'not UTF-8')}"
            ) from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise PrefixFault(f"others than its owner can read or change {path}: chmod 600 it, and change the secrets")
        try:
            given = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:  # its text may quote the line
            raise PrefixFault(f'{path} is not TOML; it takes two lines: admin = "…" and client = "…"') from error
        for name in given:
            if name not in cls.__slots__:
                hint = nearest(name, cls.__slots__)
                meant = f"; did you mean {hint}?" if hint else "; it takes admin and client"
                raise PrefixFault(f"{path}: unknown key {name[:40]!r}{meant}")
        secrets = [_secret(path, name, given.get(name)) for name in cls.__slots__]
        if hmac.compare_digest(*secrets):
            raise PrefixFault(f"{path}: admin and client must differ: clients could stop the run")
        return cls(*secrets)

    def role_of(self, secret: str) -> Role | None:
        """Whose prefix it is, in constant time; None where it is nobody's."""
        given = secret.encode()
        admin = hmac.compare_digest(given, self.admin.encode())
        client = hmac.compare_digest(given, self.client.encode())
        return Role.ADMIN if admin else Role.CLIENT if client else None


AT_ROOT = Prefixes(admin="", client="")
"""The facade asks for no secret, and stands at the root: for a server on loopback without tokens."""


def _secret(path: Path, name: str, given: object) -> str:
    if not isinstance(given, str) or len(given) < _LEAST_SECRET_CHARS or not _SECRET.fullmatch(given):
        wanted = f"a text of at least {_LEAST_SECRET_CHARS} letters, digits, and `-_.~`"
        raise PrefixFault(f"{path}: {name} must be {wanted}; `openssl rand -hex 20` makes one")
    return given


class Front:
    """ASGI: what comes under a secret prefix goes to the facade, its `/v1` and everything else to the server.

    paths: of the facade.
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
        """Who answers a request, and the scope without the secret."""
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
    """A server's address with a slash at its end gives paths that begin with two."""
    return "/" + path.lstrip("/")


def _moved(scope: Scope, path: str, role: Role | None) -> Scope:
    return {**scope, "path": path, "raw_path": path.encode(), ROLE: role}


async def _nobody(scope: Scope, receive: Receive, send: Send) -> None:
    await answer_json({"detail": "no such address on this server"}, status=404)(scope, receive, send)
