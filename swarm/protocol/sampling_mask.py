"""Sampling masks: the candidate tokens of each draw of a call, if they were not the whole vocabulary.

A row is a set of tokens in the shortest of three forms: a letter for the form, then 32-bit numbers, little-endian.

ONLY   the tokens of the set, ascending
BUT    the size of the vocabulary, then the tokens that are not in the set, ascending
BITS   a bit per token of the vocabulary, lowest first; 1: it is in the set

The size of a set determines its form (`is_short`), so that equal sets have equal bytes.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

LEAST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one, except 0, which means greedy sampling."""
RestrictedTraining = Literal["exact", "policy", "off"]
"""How to train a call that was not drawn from the whole vocabulary (`SamplingSpec.train`)."""
ONLY, BUT, BITS = b"o", b"b", b"m"
_MOST_BIAS = 100.0
"""vLLM clips larger biases to this value."""
_LEVEL = 1
"""zlib's compression level: low, because rows compress easily and are packed while calls are served."""


class SamplingMask(BaseModel):
    """Equal rows are kept once."""

    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    row_of: list[int]
    """Which row each sampled token was drawn from."""
    lengths: list[int]
    """Bytes of each row."""
    packed: bytes
    """All rows concatenated and compressed with zlib."""

    @classmethod
    def of(cls, rows: Sequence[bytes]) -> SamplingMask:
        """Build the mask. rows: one per sampled token."""
        number_of: dict[bytes, int] = {}
        row_of = [number_of.setdefault(row, len(number_of)) for row in rows]
        packed = zlib.compress(b"".join(number_of), _LEVEL)
        return cls(row_of=row_of, lengths=[len(row) for row in number_of], packed=packed)

    @cached_property
    def rows(self) -> list[bytes]:
        """The distinct rows."""
        joined, ends = zlib.decompress(self.packed), list(accumulate(self.lengths, initial=0))
        return [joined[start:end] for start, end in pairwise(ends)]

    @property
    def forced(self) -> int:
        """How many sampled tokens had no alternative."""
        alone = [size(row) == 1 for row in self.rows]
        return sum(alone[row] for row in self.row_of)


def is_short(tokens: int, vocabulary: int) -> bool:
    """Whether a set of this many tokens is listed token by token instead of as bits."""
    return tokens * 32 <= vocabulary


def numbers(row: bytes) -> array[int]:
    """The numbers in an ONLY or a BUT row."""
    found = array("i", row[1:])
    if sys.byteorder == "big":
        found.byteswap()
    return found


def only(tokens: Iterable[int]) -> bytes:
    """The ONLY row of these tokens."""
    written = array("i", sorted(set(tokens)))
    if sys.byteorder == "big":
        written.byteswap()
    return ONLY + written.tobytes()


def size(row: bytes) -> int:
    """How many tokens are in the set."""
    match row[:1]:
        case b"o":
            return len(row) // 4
        case b"b":
            vocabulary, *without = numbers(row)
            return vocabulary - len(without)
        case _:
            return int.from_bytes(row[1:], "little").bit_count()


def allows(row: bytes, token: int) -> bool:
    """Whether `token` is in the set."""
    match row[:1]:
        case b"o":
            return token in numbers(row)
        case b"b":
            vocabulary, *without = numbers(row)
            return 0 <= token < vocabulary and token not in without
        case _:
            return token // 8 < len(row) - 1 and bool(row[1 + token // 8] >> token % 8 & 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitChanges:
    """Changes of the logits before division by the temperature, in vLLM's order: first the bias, then the penalties.

    repetition: for tokens in the prompt or the answer, positive logits are divided by it and negative ones multiplied (Keskar
    et al. 2019, arXiv 1909.05858). frequency: subtracted per occurrence in the answer so far; presence: subtracted once.
    """

    bias: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> LogitChanges | None:
        """The changes of a recorded request; None if there are none."""
        bias = request.get("logit_bias") or {}
        made = cls(
            bias=tuple(
                (int(token), max(-_MOST_BIAS, min(_MOST_BIAS, float(value)))) for token, value in sorted(bias.items())
            ),
            repetition=_number(request.get("repetition_penalty"), 1.0),
            frequency=_number(request.get("frequency_penalty"), 0.0),
            presence=_number(request.get("presence_penalty"), 0.0),
        )
        return None if made == cls() else made


def _number(given: Any, neutral: float) -> float:
    return neutral if given is None else float(given)
