"""Where ids and randomness come from.

Ids are opaque strings with a readable prefix (`ep-3f…`), never reused. `SeededIds` repeats its ids for the same seed, for
tests and simulations.
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
    """Reproducible ids. Not for a server that strangers can reach."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def new(self, prefix: str) -> str:
        return f"{prefix}-{self._random.getrandbits(64):016x}"

    def secret(self) -> str:
        return f"{self._random.getrandbits(128):032x}"


def derived_seed(*parts: object) -> int:
    """A 31-bit seed that depends on every part and on nothing else, equal in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFFFFFF
