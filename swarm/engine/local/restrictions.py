"""What restricted the choice at each head: the part of the vocabulary that was left, and changes of the logits.

The trainer takes log-probabilities under the same restriction as the sampler, so that their ratio is one before the first step.

Suffixes of tensors: H heads, V vocabulary, S distinct rows of bits, B bytes of a row, E changed logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from swarm.engine.seam import TrainCall
from swarm.engine.tree import Branch, Segment

_NEVER = -1e30
"""The logit of a token that could not be drawn: finite, for -inf times a probability of 0 is no number."""
_WHOLE_VOCABULARY = 0
"""The row of heads that no mask restricts."""


@dataclass(frozen=True, slots=True)
class _Changed:
    """Logits of one head that were changed: z becomes (z + bias) / repetition or * repetition, less the rest."""

    token_E: Tensor
    bias_E: Tensor
    repetition_E: Tensor
    penalty_E: Tensor


@dataclass(frozen=True, slots=True)
class Slopes:
    """How much the logits of some heads moved with the model's own, where that is not one."""

    head_E: Tensor
    token_E: Tensor
    factor_E: Tensor

    def apply(self, slope_HV: Tensor) -> None:
        """From the gradient by the changed logits to that by the model's."""
        slope_HV[self.head_E, self.token_E] *= self.factor_E


class Restrictions:
    """Of all heads of a segment."""

    def __init__(self, segment: Segment, branches: Sequence[Branch], device: torch.device | None) -> None:
        drawn = [None if at is None else (branches[at[0]].call, at[1]) for at in segment.head_drawn]
        number_of: dict[bytes, int] = {}
        rows = [
            _WHOLE_VOCABULARY if row is None else number_of.setdefault(row, len(number_of) + 1)
            for row in (None if at is None else _row(*at) for at in drawn)
        ]
        self._row_H: Tensor | None = None
        self._changed: dict[int, _Changed] = {}
        if number_of:
            width = max(map(len, number_of))
            whole = b"\xff" * width
            table = np.frombuffer(b"".join(row.ljust(width, b"\0") for row in (whole, *number_of)), dtype=np.uint8)
            self._bits_SB = torch.tensor(table.reshape(-1, width), device=device)
            self._row_H = torch.tensor(rows, device=device)
            self._bit = torch.arange(8, dtype=torch.uint8, device=device)
        for head, at in enumerate(drawn):
            if at is not None and at[0].changes is not None:
                self._changed[head] = _changed(*at, device)

    def change(self, logits_HV: Tensor, at: slice) -> Slopes | None:
        """Change the logits of these heads, before they are divided by the temperature."""
        heads = [head for head in range(at.start, at.stop) if head in self._changed] if self._changed else []
        if not heads:
            return None
        parts = [self._changed[head] for head in heads]
        head_E = torch.cat(
            [torch.full_like(one.token_E, head - at.start) for head, one in zip(heads, parts, strict=True)]
        )
        token_E, bias_E, repetition_E, penalty_E = (
            torch.cat([getattr(one, name) for one in parts])
            for name in ("token_E", "bias_E", "repetition_E", "penalty_E")
        )
        biased_E = logits_HV[head_E, token_E] + bias_E
        factor_E = torch.where(biased_E > 0, 1.0 / repetition_E, repetition_E)
        logits_HV[head_E, token_E] = biased_E * factor_E - penalty_E
        return Slopes(head_E, token_E, factor_E)

    def forbid(self, scaled_HV: Tensor, at: slice) -> None:
        """Take away what could not be drawn."""
        if self._row_H is None:
            return
        row_H = self._row_H[at]
        if not bool(row_H.any()):
            return
        bits_HB = self._bits_SB[row_H]
        allowed_HV = (bits_HB[:, :, None] >> self._bit & 1).flatten(1)
        spare = scaled_HV.shape[1] - allowed_HV.shape[1]  # below 0: bits of the last byte that stand for nothing
        allowed_HV = functional.pad(allowed_HV, (0, spare))
        if spare > 0:
            allowed_HV[row_H == _WHOLE_VOCABULARY, -spare:] = 1
        scaled_HV.masked_fill_(allowed_HV == 0, _NEVER)


def _row(call: TrainCall, position: int) -> bytes | None:
    return None if call.mask is None else call.mask.rows[call.mask.row_of[position]]


def _changed(call: TrainCall, position: int, device: torch.device | None) -> _Changed:
    """What the request's bias and penalties changed when the token at `position` was drawn."""
    changes, said = call.changes, Counter(call.sampled_ids[:position])
    assert changes is not None
    bias, repeats = dict(changes.bias), {*call.prompt_ids, *said} if changes.repetition != 1.0 else set[int]()
    tokens = sorted({*bias, *repeats, *(said if changes.frequency or changes.presence else ())})
    penalties = [changes.frequency * said[token] + changes.presence * (token in said) for token in tokens]
    return _Changed(
        token_E=torch.tensor(tokens, dtype=torch.int64, device=device),
        bias_E=torch.tensor([bias.get(token, 0.0) for token in tokens], device=device),
        repetition_E=torch.tensor([changes.repetition if token in repeats else 1.0 for token in tokens], device=device),
        penalty_E=torch.tensor(penalties, device=device),
    )
