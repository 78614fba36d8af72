"""The source of ids and randomness.

Ids are opaque strings with a readable prefix (`ep-3f…`) and are never reused. `SeededIds`, for tests and simulations, repeats
its ids for the same seed.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from typing import Protocol


class Ids(Protocol):
    """A source of fresh ids and of unguessable secrets."""

    def new(self, prefix: str) -> str: ...

    def secret(self) -> str: ...


class RandomIds:
    """Ids from the operating system's entropy."""

    def new(self, prefix: str) -> str:
        return f"{prefix}-{secrets.token_hex(8)}"

    def secret(self) -> str:
        return secrets.token_urlsafe(24)


class SeededIds:
    """Reproducible ids and secrets. Do not use them on a server that strangers can reach."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def new(self, prefix: str) -> str:
        return f"{prefix}-{self._random.getrandbits(64):016x}"

    def secret(self) -> str:
        return f"{self._random.getrandbits(128):032x}"


def derived_seed(*parts: object) -> int:
    """Return a 31-bit seed that depends only on the parts, and is the same in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFFFFFF
