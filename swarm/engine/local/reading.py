"""A micro-batch made ready, and what the current or the first weights say of it without a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.engine.local.forward import MicroBatch, Policy
from swarm.engine.local.head import Heads, survey
from swarm.engine.local.loss import TokenFacts, facts_of
from swarm.engine.tree import Branch, Segment, cut, grow


@dataclass(slots=True, kw_only=True)
class Piece:
    """One segment of a tree as tensors, with what the loss needs to know of its uses.

    All passes over a piece compute the same shapes, so that equal weights give equal numbers, bit for bit.
    """

    micro: MicroBatch
    heads: Heads
    facts: TokenFacts

    @classmethod
    def of(cls, segment: Segment, branches: Sequence[Branch], dtype: torch.dtype) -> Piece:
        return cls(micro=MicroBatch.of(segment, dtype), heads=Heads.of(segment), facts=facts_of(segment, branches))


def pieces(branches: Sequence[Branch], policy: Policy) -> list[Piece]:
    """The tree over these branches, in pieces that fit into memory. Raises: TrainingRefused."""
    return [Piece.of(segment, branches, policy.compute_dtype) for segment in cut(grow(branches), policy.segment_tokens)]


@torch.no_grad()
def read(policy: Policy, piece: Piece, *, at_start: bool = False) -> tuple[Tensor, Tensor]:
    """(logp_U, entropy_U) of the piece's uses, under the current weights or the first ones."""
    with policy.autocast():
        hidden_TD = policy.start_hidden(piece.micro) if at_start else policy.hidden(piece.micro)
    dtype = policy.compute_dtype
    weight_VD = policy.start_output_weight.to(dtype) if at_start else policy.cast_output_weight
    return survey(piece.heads, hidden_TD[piece.heads.at_H].to(dtype), weight_VD)
