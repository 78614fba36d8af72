"""Log-probabilities and entropies of recorded tokens, without a gradient: under the current weights or the first ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.engine.local.forward import MicroBatch, Policy
from swarm.engine.local.head import Heads, survey
from swarm.engine.local.loss import Place, places
from swarm.engine.tree import Branch, Segment, cut, grow


@torch.no_grad()
def read_segment(policy: Policy, segment: Segment, *, at_start: bool) -> tuple[Tensor, Tensor]:
    """(logp_U, entropy_U) of the segment's uses."""
    heads = Heads.of(segment)
    micro = MicroBatch.of(segment, policy.compute_dtype)
    with policy.autocast():
        hidden_TD = policy.start_hidden(micro) if at_start else policy.hidden(micro)
    weight_VD = policy.start_output_weight if at_start else policy.output_weight
    dtype = policy.compute_dtype
    return survey(heads, hidden_TD[heads.at_H].to(dtype), weight_VD.to(dtype))


def read_logprobs(policy: Policy, made: Sequence[Branch], *, at_start: bool) -> dict[Place, float]:
    """Log-probability, after temperature, of every sampled token of these branches."""
    known: dict[Place, float] = {}
    for segment in cut(grow(made), policy.segment_tokens):
        logp_U, _ = read_segment(policy, segment, at_start=at_start)
        known.update(zip(places(segment, made), logp_U.tolist(), strict=True))
    return known
