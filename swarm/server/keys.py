"""Authorisation by an episode's API key, a team's key, or one of two control tokens. All comparisons take constant time.

An API key `swk_…` is random; the server stores its digest with the episode. A team key `swd_…` is a MAC made with the secret
of the state directory, which also encrypts the stored team keys of other servers. Control tokens `swt_…` come from the
environment or from files, never from process arguments.
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

from cryptography.fernet import Fernet, InvalidToken

from foundation.paths import write_atomically
from swarm.protocol.errors import SwarmError
from swarm.server.state.leases import API_KEY_PREFIX

TOKEN_PREFIX = "swt_"
TEAM_KEY_PREFIX = "swd_"
_MAC_BYTES = 18
_SECRET_BYTES = 32
_OLD_PAD_BYTES = 64
_LEAST_TOKEN_CHARS = 16


class KeyRefused(SwarmError):
    """This server did not issue the key."""


class TokenFault(SwarmError):
    """The configured control tokens cannot be used. The message says what to set."""


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """The episode and lease that an API key belongs to."""

    episode_id: str
    lease: str
    any_model: bool = False
    """Whether the episode's agents may call the model by any name."""


class Keyring:
    """Creates and checks keys with the secret of a state directory."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _SECRET_BYTES:
            raise ValueError(f"the secret must be at least {_SECRET_BYTES} bytes long, got {len(secret)}")
        self._secret = secret
        self._store = Fernet(base64.urlsafe_b64encode(hmac.digest(secret, b"stored team keys", "sha256")))

    @classmethod
    def open(cls, path: Path) -> Keyring:
        """Open the keyring of a state directory. The secret is created on first use, readable only by its owner."""
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_secretly(path, secrets.token_bytes(_SECRET_BYTES))
        return cls(path.read_bytes())

    def team_key(self, episode_id: str) -> str:
        """Return the key that lets its holder ask for the decision of this episode's team, and nothing else."""
        return TEAM_KEY_PREFIX + _text(self._mac(f"team:{episode_id}"))

    def is_team_key(self, key: str, episode_id: str) -> bool:
        return hmac.compare_digest(key.encode(), self.team_key(episode_id).encode())

    def seal(self, key: str) -> str:
        """Encrypt another server's team key for storage."""
        return self._store.encrypt(key.encode()).decode()

    def unseal(self, episode_id: str, sealed: str) -> str:
        """Decrypt a stored team key. Raises: KeyRefused if it was sealed with a different secret."""
        try:
            return self._store.decrypt(sealed).decode()
        except InvalidToken:
            return self._unseal_old(episode_id, sealed)

    # -- made by older servers ----------------------------------------------------------------------------------------

    def episode_of_old_key(self, api_key: str) -> str | None:
        """Return the episode of an API key that an older server signed, `swk_<episode>.<sealed lease>.<mac>`; None for other keys."""
        body, _, mac = api_key.removeprefix(API_KEY_PREFIX).rpartition(".")
        if not api_key.startswith(API_KEY_PREFIX) or body.count(".") != 1:
            return None
        if not hmac.compare_digest(_text(self._mac(body)).encode(), mac.encode()):
            return None
        return _raw(body.partition(".")[0]).decode()

    def _unseal_old(self, episode_id: str, sealed: str) -> str:
        refused = KeyRefused(f"the team key of {episode_id} was not sealed with this server's secret")
        pad = hashlib.blake2b(
            episode_id.encode(), key=self._secret, person=b"team-pad", digest_size=_OLD_PAD_BYTES
        ).digest()
        try:
            key = bytes(a ^ b for a, b in zip(_raw(sealed), pad, strict=False)).decode("ascii")
        except (binascii.Error, UnicodeDecodeError) as error:  # sealed differently, or with a different secret
            raise refused from error
        if not key.startswith(TEAM_KEY_PREFIX):
            raise refused
        return key

    def _mac(self, body: str) -> bytes:
        return hmac.digest(self._secret, body.encode(), "sha256")[:_MAC_BYTES]


class Role(StrEnum):
    """What a control token allows: a client may claim and report episodes, and read; an admin may also start and stop runs."""

    ADMIN = "admin"
    CLIENT = "client"


class ControlTokens:
    """The tokens that a server was started with. Without tokens every caller is an admin, which only a loopback server allows."""

    def __init__(self, admin: str | None, client: str | None) -> None:
        for role, token in ((Role.ADMIN, admin), (Role.CLIENT, client)):
            if token is not None and (len(token) < _LEAST_TOKEN_CHARS or not token.isascii()):
                raise TokenFault(f"the {role} token must have at least {_LEAST_TOKEN_CHARS} ASCII characters")
        if client is not None and admin is None:
            raise TokenFault(
                "a client token without an admin token would let nobody start a run; set SWARM_ADMIN_TOKEN too"
            )
        if admin is not None and admin == client:
            raise TokenFault("the admin token and the client token must differ")
        self._admin = admin
        self._client = client

    @classmethod
    def load(
        cls, environ: Mapping[str, str], admin_file: Path | None = None, client_file: Path | None = None
    ) -> ControlTokens:
        """Read the tokens from the given files, or else from SWARM_ADMIN_TOKEN and SWARM_CLIENT_TOKEN. Raises: TokenFault."""
        return cls(
            _token(admin_file, environ.get("SWARM_ADMIN_TOKEN")),
            _token(client_file, environ.get("SWARM_CLIENT_TOKEN")),
        )

    @property
    def required(self) -> bool:
        return self._admin is not None

    def role_of(self, authorization: str | None) -> Role | None:
        """Return the role that an `Authorization` header grants; None if it grants no role."""
        if self._admin is None:
            return Role.ADMIN
        token = bearer(authorization)
        if hmac.compare_digest(token.encode(), self._admin.encode()):
            return Role.ADMIN
        if self._client is not None and hmac.compare_digest(token.encode(), self._client.encode()):
            return Role.CLIENT
        return None


def bearer(authorization: str | None) -> str:
    """Return the token of an `Authorization: Bearer` header; empty if there is none."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def write_secretly(path: Path, data: bytes) -> None:
    """Write `data` atomically, in a file that only its owner can read from the start."""
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
        raise TokenFault(f"the token file {file} is empty; put the token on its first line")
    return token


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _raw(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
