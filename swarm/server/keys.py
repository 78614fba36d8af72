"""Who may do what: an episode's api key, and the two control tokens. Nothing is looked up in a database.

An api key `swk_…` names its episode, carries the episode's lease sealed (an agent that holds the key can call the model
but cannot end the episode), and is signed. The secret behind it lives in the state directory, mode 0600. Control tokens
`swt_…` come from the environment or from files, never from process arguments. All comparisons take constant time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from foundation.paths import write_atomically
from swarm.protocol.errors import SwarmError

API_KEY_PREFIX = "swk_"
TOKEN_PREFIX = "swt_"
TEAM_KEY_PREFIX = "swd_"
_PAD_BYTES = 64
_MAC_BYTES = 18
_SECRET_BYTES = 32
_LEAST_TOKEN_CHARS = 16


class KeyRefused(SwarmError):
    """The api key is not one of this server's."""


class TokenFault(SwarmError):
    """The control tokens, as configured, cannot be used. Says what to set."""


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """What a genuine api key says. Whether the lease still holds is the book's to know."""

    episode_id: str
    lease: str


class Keyring:
    """Makes and reads api keys under one secret."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _SECRET_BYTES:
            raise ValueError(f"the secret must have at least {_SECRET_BYTES} bytes, got {len(secret)}")
        self._secret = secret

    @classmethod
    def open(cls, path: Path) -> Keyring:
        """The keyring of a state directory. The secret is made on first use and readable by its owner alone."""
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_secretly(path, secrets.token_bytes(_SECRET_BYTES))
        return cls(path.read_bytes())

    def api_key(self, episode_id: str, lease: str) -> str:
        raw = lease.encode()
        if len(raw) > _PAD_BYTES:
            raise ValueError(f"a lease has at most {_PAD_BYTES} bytes, got {len(raw)}")
        sealed = bytes(a ^ b for a, b in zip(raw, self._pad(episode_id), strict=False))
        body = f"{_text(episode_id.encode())}.{_text(sealed)}"
        return f"{API_KEY_PREFIX}{body}.{_text(self._mac(body))}"

    def read(self, api_key: str) -> EpisodeKey:
        """Raises: KeyRefused for anything that this keyring did not make."""
        parts = api_key.removeprefix(API_KEY_PREFIX).split(".")
        if not api_key.startswith(API_KEY_PREFIX) or len(parts) != 3 or not api_key.isascii():
            raise KeyRefused("not an episode's api key; use the api_key of a claimed episode")
        if not hmac.compare_digest(_text(self._mac(f"{parts[0]}.{parts[1]}")), parts[2]):
            raise KeyRefused("this api key was not made by this server; use the api_key of an episode claimed here")
        episode_id = _raw(parts[0]).decode()
        lease = bytes(a ^ b for a, b in zip(_raw(parts[1]), self._pad(episode_id), strict=False)).decode()
        return EpisodeKey(episode_id, lease)

    def team_key(self, episode_id: str) -> str:
        """Lets whoever holds it ask what the team of this episode decided, and nothing else."""
        return TEAM_KEY_PREFIX + _text(self._mac(f"team:{episode_id}"))

    def is_team_key(self, key: str, episode_id: str) -> bool:
        return hmac.compare_digest(key.encode(), self.team_key(episode_id).encode())

    def seal(self, episode_id: str, key: str) -> str:
        """Another server's team key, as it may stand in the pool: only this keyring can open it."""
        return _text(self._padded(key.encode(), episode_id))

    def unseal(self, episode_id: str, sealed: str) -> str:
        """Raises: KeyRefused for what another keyring sealed."""
        try:
            return self._padded(_raw(sealed), episode_id).decode("ascii")
        except UnicodeDecodeError as error:
            raise KeyRefused(f"the team key of {episode_id} was sealed under another secret than this one") from error

    def _padded(self, raw: bytes, episode_id: str) -> bytes:
        if len(raw) > _PAD_BYTES:
            raise ValueError(f"a team key has at most {_PAD_BYTES} bytes, got {len(raw)}")
        return bytes(a ^ b for a, b in zip(raw, self._pad(episode_id, b"team-pad"), strict=False))

    def _pad(self, episode_id: str, purpose: bytes = b"lease-pad") -> bytes:
        """One-time pad of an episode: it has one lease and one team in its life, so no pad is used for two texts."""
        return hashlib.blake2b(episode_id.encode(), key=self._secret, person=purpose, digest_size=_PAD_BYTES).digest()

    def _mac(self, body: str) -> bytes:
        return hmac.digest(self._secret, body.encode(), "sha256")[:_MAC_BYTES]


class Role(StrEnum):
    """What a control token allows: a client claims and reports episodes and reads; an admin may also run and stop."""

    ADMIN = "admin"
    CLIENT = "client"


class ControlTokens:
    """The tokens a server was started with. Without any, every caller is an admin (a loopback server only)."""

    def __init__(self, admin: str | None, client: str | None) -> None:
        for role, token in ((Role.ADMIN, admin), (Role.CLIENT, client)):
            if token is not None and (len(token) < _LEAST_TOKEN_CHARS or not token.isascii()):
                raise TokenFault(f"the {role} token must have at least {_LEAST_TOKEN_CHARS} ASCII characters")
        if client is not None and admin is None:
            raise TokenFault(
                "a client token without an admin token: nobody could start a run; set SWARM_ADMIN_TOKEN too"
            )
        if admin is not None and admin == client:
            raise TokenFault("the admin token and the client token must differ")
        self._admin = admin
        self._client = client

    @classmethod
    def load(
        cls, environ: Mapping[str, str], admin_file: Path | None = None, client_file: Path | None = None
    ) -> ControlTokens:
        """From token files where they are given, else SWARM_ADMIN_TOKEN and SWARM_CLIENT_TOKEN. Raises: TokenFault."""
        return cls(
            _token(admin_file, environ.get("SWARM_ADMIN_TOKEN")),
            _token(client_file, environ.get("SWARM_CLIENT_TOKEN")),
        )

    @property
    def required(self) -> bool:
        return self._admin is not None

    def role_of(self, authorization: str | None) -> Role | None:
        """The role behind an `Authorization` header; None where it has none."""
        if self._admin is None:
            return Role.ADMIN
        token = bearer(authorization)
        if hmac.compare_digest(token.encode(), self._admin.encode()):
            return Role.ADMIN
        if self._client is not None and hmac.compare_digest(token.encode(), self._client.encode()):
            return Role.CLIENT
        return None


def bearer(authorization: str | None) -> str:
    """The token of an `Authorization: Bearer` header; empty where there is none."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def write_secretly(path: Path, data: bytes) -> None:
    """Write `data` whole or not at all, readable by the owner alone from the first byte on."""
    before = os.umask(0o077)
    try:
        write_atomically(path, data)
    finally:
        os.umask(before)


def _token(file: Path | None, from_environment: str | None) -> str | None:
    if file is None:
        return from_environment or None
    try:
        token = file.read_text().strip()
    except OSError as error:
        raise TokenFault(f"cannot read the token file {file}: {error.strerror}") from error
    if not token:
        raise TokenFault(f"the token file {file} is empty; put the token in its first line")
    return token


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _raw(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error as error:  # signed text that is no base64 cannot come from api_key()
        raise KeyRefused("this api key is damaged; claim a new episode") from error
