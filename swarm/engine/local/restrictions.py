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

from swarm.engine.seam import TrainCall
from swarm.engine.tree import Branch, Segment
from swarm.protocol.sampling_mask import BITS, ONLY, numbers

_NEVER = -1e30
"""The logit of a token that could not be drawn: finite, for -inf times a probability of 0 is no number."""
_HEADS_OF_BITS = 64
"""So many rows of bits are taken apart at a time."""


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
    """Of all heads of a segment. Rows of bits are many heads' and long: they are kept once. Rows of tokens are short."""

    def __init__(self, segment: Segment, branches: Sequence[Branch], device: torch.device | None) -> None:
        self._changed: dict[int, _Changed] = {}
        self._tokens: dict[int, tuple[bool, Tensor]] = {}
        """By head: whether these are all that could be drawn, or what could not."""
        self._bits: dict[int, int] = {}
        """By head: which row of bits."""
        self._vocabulary = 0
        """Tokens that the sampler knows; a model may have rows for more."""
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
                self._tokens[head] = True, tokens
            else:
                self._tokens[head] = False, tokens[1:]
                self._vocabulary = int(tokens[0])
        self._bits_SB = _stacked(list(number_of), device)
        self._bit = torch.arange(8, dtype=torch.uint8, device=device)

    def change(self, logits_HV: Tensor, at: slice) -> Slopes | None:
        """Change the logits of these heads, before they are divided by the temperature."""
        heads = [head for head in range(at.start, at.stop) if head in self._changed] if self._changed else []
        if not heads:
            return None
        parts = [self._changed[head] for head in heads]
        head_E = _numbered([head - at.start for head in heads], [one.token_E for one in parts])
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
        for wanted in (True, False) if self._tokens else ():
            heads = [head for head in range(at.start, at.stop) if self._tokens.get(head, (None,))[0] is wanted]
            if not heads:
                continue
            tokens = [self._tokens[head][1] for head in heads]
            place_H = [head - at.start for head in heads]
            head_E, token_E = _numbered(place_H, tokens), torch.cat(tokens)
            if wanted:
                kept_E = scaled_HV[head_E, token_E]
                scaled_HV[place_H] = _NEVER
                scaled_HV[head_E, token_E] = kept_E
            else:
                scaled_HV[head_E, token_E] = _NEVER
                if self._vocabulary < scaled_HV.shape[1]:
                    scaled_HV[place_H, self._vocabulary :] = _NEVER
        heads = [head for head in range(at.start, at.stop) if head in self._bits] if self._bits else []
        for part in (heads[start : start + _HEADS_OF_BITS] for start in range(0, len(heads), _HEADS_OF_BITS)):
            bits_HB = self._bits_SB[[self._bits[head] for head in part]]
            allowed_HV = (bits_HB[:, :, None] >> self._bit & 1).flatten(1)[:, : scaled_HV.shape[1]]
            place_H = [head - at.start for head in part]
            seen_HV = scaled_HV[place_H, : allowed_HV.shape[1]]
            scaled_HV[place_H, : allowed_HV.shape[1]] = seen_HV.masked_fill_(allowed_HV == 0, _NEVER)
            scaled_HV[place_H, allowed_HV.shape[1] :] = _NEVER


def _numbered(heads: Sequence[int], entries: Sequence[Tensor]) -> Tensor:
    """Each head as often as it has entries."""
    lengths = torch.tensor([len(each) for each in entries], device=entries[0].device)
    return torch.tensor(list(heads), device=entries[0].device).repeat_interleave(lengths)


def _stacked(rows: Sequence[bytes], device: torch.device | None) -> Tensor:
    width = max(map(len, rows), default=0)
    table = np.frombuffer(b"".join(row.ljust(width, b"\0") for row in rows), dtype=np.uint8)
    return torch.tensor(table.reshape(len(rows), width), device=device)


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
