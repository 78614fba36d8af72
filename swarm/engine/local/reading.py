"""A micro-batch made ready, and what the current or the first weights say of it without a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from swarm.engine.local.attention import MicroBatch
from swarm.engine.local.forward import Policy
from swarm.engine.local.head import Heads, survey
from swarm.engine.local.loss import TokenFacts, facts_of
from swarm.engine.tree import Branch, Segment, cut, grow, timelines


@dataclass(slots=True, kw_only=True)
class Piece:
    """One segment of a tree as tensors, with what the loss needs to know of its uses.

    All passes over a piece compute the same shapes, so that equal weights give equal numbers, bit for bit.
    """

    micro: MicroBatch
    heads: Heads
    facts: TokenFacts

    @classmethod
    def of(cls, segment: Segment, branches: Sequence[Branch], device: torch.device) -> Piece:
        return cls(
            micro=MicroBatch.of(segment, device),
            heads=Heads.of(segment, device),
            facts=_moved(facts_of(segment, branches), device),
        )

    @property
    def tokens(self) -> int:
        """How many are computed, those that another piece computes too among them."""
        return len(self.micro.token_T)


def pieces(branches: Sequence[Branch], policy: Policy) -> list[Piece]:
    """The tree over these branches, in pieces that fit into memory; its timelines for models that compute no trees.

    Raises: TrainingRefused.
    """
    tree = grow(branches)
    segments = cut(tree, policy.segment_tokens) if policy.on_trees else timelines(tree)
    return [Piece.of(segment, branches, policy.device) for segment in segments]


@torch.no_grad()
def read(policy: Policy, piece: Piece, *, at_start: bool = False) -> tuple[Tensor, Tensor]:
    """(logp_U, entropy_U) of the piece's uses, under the current weights or the first ones."""
    with policy.autocast():
        hidden_TD = policy.start_hidden(piece.micro) if at_start else policy.hidden(piece.micro)
    dtype = policy.compute_dtype
    weight_VD = policy.start_output_weight.to(dtype) if at_start else policy.cast_output_weight
    return survey(piece.heads, hidden_TD[piece.heads.at_H].to(dtype), weight_VD)


def _moved(facts: TokenFacts, device: torch.device) -> TokenFacts:
    values = {field.name: getattr(facts, field.name) for field in fields(facts)}
    return replace(facts, **{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)})
