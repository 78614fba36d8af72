"""Sampling masks: the candidate tokens for each sampled token of a call, if they were not the whole vocabulary.

A row is a set of tokens in the shortest of three encodings: a letter for the encoding, then 32-bit little-endian numbers or bits.

ONLY   the tokens in the set, ascending
BUT    the size of the vocabulary, then the tokens that are not in the set, ascending
BITS   one bit per token of the vocabulary, lowest first; 1 means that the token is in the set

The size of a set determines its encoding (`is_short`), so that equal sets have equal bytes.
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
"""vLLM raises lower temperatures to this value, except for 0, which means greedy sampling."""
RestrictedTraining = Literal["exact", "policy", "off"]
"""How to train on a call that was not sampled from the whole vocabulary (`SamplingSpec.train`)."""
ONLY, BUT, BITS = b"o", b"b", b"m"
_MOST_BIAS = 100.0
"""vLLM clips larger biases to this value."""
_LEVEL = 1
"""zlib's compression level. It is low because rows compress easily and are packed while calls are being served."""


class SamplingMask(BaseModel):
    """The mask of one call. Equal rows are stored only once."""

    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    row_of: list[int]
    """For each sampled token, the index of the row it was sampled from."""
    lengths: list[int]
    """Length of each row, in bytes."""
    packed: bytes
    """All rows concatenated and compressed with zlib."""

    @classmethod
    def of(cls, rows: Sequence[bytes]) -> SamplingMask:
        """Build the mask from one row per sampled token."""
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
        """The number of sampled tokens that had no alternative."""
        alone = [size(row) == 1 for row in self.rows]
        return sum(alone[row] for row in self.row_of)


def is_short(tokens: int, vocabulary: int) -> bool:
    """True if a set of this many tokens is stored as a list of tokens instead of bits."""
    return tokens * 32 <= vocabulary


def numbers(row: bytes) -> array[int]:
    """Return the numbers in an ONLY or a BUT row."""
    found = array("i", row[1:])
    if sys.byteorder == "big":
        found.byteswap()
    return found


def only(tokens: Iterable[int]) -> bytes:
    """Return the ONLY row for these tokens."""
    written = array("i", sorted(set(tokens)))
    if sys.byteorder == "big":
        written.byteswap()
    return ONLY + written.tobytes()


def size(row: bytes) -> int:
    """Return the number of tokens in a row's set."""
    match row[:1]:
        case b"o":
            return len(row) // 4
        case b"b":
            vocabulary, *without = numbers(row)
            return vocabulary - len(without)
        case _:
            return int.from_bytes(row[1:], "little").bit_count()


def allows(row: bytes, token: int) -> bool:
    """True if `token` is in a row's set."""
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
    """Changes to the logits before division by the temperature. As in vLLM, the bias comes first, then the penalties.

    Args:
        bias: pairs of a token and the value to add to its logit.
        repetition: for tokens in the prompt or the answer so far, positive logits are divided by this and negative ones multiplied by
            it (Keskar et al. 2019, arXiv 1909.05858).
        frequency: subtracted from a token's logit for each occurrence in the answer so far.
        presence: subtracted once from the logit of each token that occurs in the answer so far.
    """

    bias: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> LogitChanges | None:
        """Return the logit changes that a recorded request asked for, or None if it asked for none."""
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
