"""Sampling restrictions at each head: the allowed part of the vocabulary, and changes of the logits.

The trainer computes log-probabilities under the sampler's restriction, so that their ratio is one before the first step.

Tensor suffixes: H heads, V vocabulary, S distinct rows of bits, B bytes of a row, E changed logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarm.engine.seam import TrainCall
from swarm.engine.tree import Branch, Segment
from swarm.protocol.sampling_mask import BITS, ONLY, numbers

_NEVER = -1e30
"""Logit of a token that could not be sampled. It is finite, because -inf times a probability of 0 is NaN."""
_HEADS_OF_BITS = 64
"""Number of bit rows to unpack at a time."""


@dataclass(frozen=True, slots=True)
class _Changed:
    """The changed logits of one head: z + bias is divided by repetition if positive, else multiplied by it; then penalty is
    subtracted."""

    token_E: Tensor
    bias_E: Tensor
    repetition_E: Tensor
    penalty_E: Tensor


@dataclass(frozen=True, slots=True)
class Slopes:
    """Derivatives of changed logits with respect to the model's own logits, where they are not one."""

    head_E: Tensor
    token_E: Tensor
    factor_E: Tensor

    def apply(self, slope_HV: Tensor) -> None:
        """Convert the gradient of the changed logits into that of the model's logits, in place."""
        slope_HV[self.head_E, self.token_E] *= self.factor_E


class Restrictions:
    """The restrictions of a segment's heads. Rows of bits are long and many heads share one, so equal rows are stored once."""

    def __init__(self, segment: Segment, branches: Sequence[Branch], device: torch.device | None) -> None:
        self._changed: dict[int, _Changed] = {}
        self._only: dict[int, Tensor] = {}
        """Maps a head to the only tokens that could be sampled."""
        self._without: dict[int, Tensor] = {}
        """Maps a head to the only tokens that could not be sampled."""
        self._vocabulary = 0
        """Size of the sampler's vocabulary if `_without` is not empty; the model may have more rows."""
        self._bits: dict[int, int] = {}
        """Maps a head to the index of its row in `_bits_SB`."""
        number_of: dict[bytes, int] = {}
        for head, at in enumerate(segment.head_drawn):
            if at is None:
                continue
            call, position = branches[at[0]].call, at[1]
            if call.changes is not None:
                self._changed[head] = _changed(call, position, device)
            if call.mask is None:
                continue
            row = call.mask.rows[call.mask.row_of[position]]
            if row[:1] == BITS:
                self._bits[head] = number_of.setdefault(row[1:], len(number_of))
                continue
            tokens = torch.tensor(np.array(numbers(row), dtype=np.int64), device=device)
            if row[:1] == ONLY:
                self._only[head] = tokens
            else:
                self._vocabulary, self._without[head] = int(tokens[0]), tokens[1:]
        self._bits_SB = _stacked(list(number_of), device) if number_of else None

    def change(self, logits_HV: Tensor, at: slice) -> Slopes | None:
        """Change the logits of these heads, before division by the temperature. Returns the derivatives, or None if nothing changed."""
        heads = _among(self._changed, at)
        if not heads:
            return None
        parts = [self._changed[head] for head in heads]
        head_E = _repeated(heads, at, [one.token_E for one in parts])
        token_E, bias_E, repetition_E, penalty_E = (
            torch.cat([getattr(one, name) for one in parts])
            for name in ("token_E", "bias_E", "repetition_E", "penalty_E")
        )
        biased_E = logits_HV[head_E, token_E] + bias_E
        factor_E = torch.where(biased_E > 0, 1.0 / repetition_E, repetition_E)
        logits_HV[head_E, token_E] = biased_E * factor_E - penalty_E
        return Slopes(head_E, token_E, factor_E)

    def forbid(self, scaled_HV: Tensor, at: slice) -> None:
        """Mask the tokens that could not be sampled."""
        if heads := _among(self._only, at):
            tokens = [self._only[head] for head in heads]
            head_E, token_E = _repeated(heads, at, tokens), torch.cat(tokens)
            kept_E = scaled_HV[head_E, token_E]
            scaled_HV[[head - at.start for head in heads]] = _NEVER
            scaled_HV[head_E, token_E] = kept_E
        if heads := _among(self._without, at):
            tokens = [self._without[head] for head in heads]
            scaled_HV[_repeated(heads, at, tokens), torch.cat(tokens)] = _NEVER
            if self._vocabulary < scaled_HV.shape[1]:
                scaled_HV[[head - at.start for head in heads], self._vocabulary :] = _NEVER
        if self._bits_SB is not None:
            heads = _among(self._bits, at)
            for start in range(0, len(heads), _HEADS_OF_BITS):
                self._forbid_by_bits(scaled_HV, at, heads[start : start + _HEADS_OF_BITS], self._bits_SB)

    def _forbid_by_bits(self, scaled_HV: Tensor, at: slice, heads: Sequence[int], bits_SB: Tensor) -> None:
        bits_HB = bits_SB[[self._bits[head] for head in heads]]
        places = torch.arange(8, dtype=torch.uint8, device=bits_SB.device)
        allowed_HV = (bits_HB[:, :, None] >> places & 1).flatten(1)[:, : scaled_HV.shape[1]]
        own, known = [head - at.start for head in heads], allowed_HV.shape[1]
        scaled_HV[own, :known] = scaled_HV[own, :known].masked_fill_(allowed_HV == 0, _NEVER)
        scaled_HV[own, known:] = _NEVER


def _among(known: Mapping[int, object], at: slice) -> list[int]:
    """Return the heads of this slice that have an entry."""
    return [head for head in range(at.start, at.stop) if head in known] if known else []


def _repeated(heads: Sequence[int], at: slice, entries: Sequence[Tensor]) -> Tensor:
    """Return each head's position within this slice, repeated once per entry."""
    device = entries[0].device
    lengths = torch.tensor([len(each) for each in entries], device=device)
    return torch.tensor([head - at.start for head in heads], device=device).repeat_interleave(lengths)


def _stacked(rows: Sequence[bytes], device: torch.device | None) -> Tensor:
    width = max(map(len, rows))
    table = np.frombuffer(b"".join(row.ljust(width, b"\0") for row in rows), dtype=np.uint8)
    return torch.tensor(table.reshape(len(rows), width), device=device)


def _changed(call: TrainCall, position: int, device: torch.device | None) -> _Changed:
    """Return how the request's bias and penalties changed the logits when the token at `position` was sampled."""
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
