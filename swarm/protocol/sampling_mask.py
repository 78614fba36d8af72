"""Among which tokens each token of a call was drawn, where that was not the whole vocabulary.

A row is a bit per token of the vocabulary, lowest bit first; 1: it could be drawn.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

LEAST_TEMPERATURE = 0.01
"""vLLM draws at this one where a lower is asked for, but for 0, at which nothing is drawn."""
RestrictedTraining = Literal["exact", "policy", "off"]
"""What is trained of a call that was not drawn from the whole vocabulary (`SamplingSpec.train`)."""
_MOST_BIAS = 100.0
"""vLLM cuts a larger one."""
_LEVEL = 1
"""Of zlib: rows are long and plain, and are packed while calls are served."""


class SamplingMask(BaseModel):
    """Equal rows are kept once."""

    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    row_of: list[int]
    """Which row each sampled token was drawn from."""
    allowed: list[int]
    """How many tokens each row allows."""
    packed: bytes
    """All rows, one behind the other, compressed by zlib."""

    @classmethod
    def of(cls, rows: Sequence[bytes]) -> SamplingMask:
        """rows: of each sampled token, all of one length."""
        number_of: dict[bytes, int] = {}
        row_of = [number_of.setdefault(row, len(number_of)) for row in rows]
        allowed = [int.from_bytes(row, "little").bit_count() for row in number_of]
        return cls(row_of=row_of, allowed=allowed, packed=zlib.compress(b"".join(number_of), _LEVEL))

    @cached_property
    def rows(self) -> list[bytes]:
        """The distinct rows."""
        joined = zlib.decompress(self.packed)
        width = len(joined) // max(1, len(self.allowed))
        return [joined[start : start + width] for start in range(0, len(joined), width)] if width else []

    @property
    def forced(self) -> int:
        """How many sampled tokens had no alternative."""
        return sum(self.allowed[row] == 1 for row in self.row_of)


def allows(row: bytes, token: int) -> bool:
    """Whether `token` could be drawn."""
    return token // 8 < len(row) and bool(row[token // 8] >> token % 8 & 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitChanges:
    """What a request adds to the logits before they are divided by the temperature, as vLLM does: first the bias, then the penalties.

    repetition: a logit of a token that prompt or answer holds is divided by it above 0, multiplied below (Keskar et al. 2019, arXiv
    1909.05858). frequency: taken off per occurrence in the answer so far; presence: once.
    """

    bias: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> LogitChanges | None:
        """Of a recorded request; None: it changes nothing."""
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
