"""GRPO: a clipped policy gradient on advantages relative to the group, with optional KL and entropy terms.

Source: Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), eq. 3; the asymmetric clip range is DAPO's (arXiv 2503.14476).
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm.engine.local.loss import TokenFacts, kl_to_start, ratio
from swarm.protocol.runspec import AlgorithmSpec

TRUNCATED_AT = 2.0
"""Importance weights are cut here (`importance_correction: truncated`)."""


class Grpo:
    """See `loss.Objective`."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        self._spec = spec

    def loss(self, logp_U: Tensor, entropy_U: Tensor, facts: TokenFacts) -> Tensor:
        spec = self._spec
        old_U = _old(logp_U, facts)
        ratio_U = ratio(logp_U, old_U)
        kept_U = ratio_U.clamp(1 - spec.clip_low, 1 + spec.clip_high)
        gain_U = torch.minimum(ratio_U * facts.advantage_U, kept_U * facts.advantage_U)
        if spec.importance_correction == "truncated":
            gain_U = gain_U * ratio(old_U, facts.recorded_U).clamp(max=TRUNCATED_AT)
        loss_U = -gain_U
        if spec.kl:
            if facts.start_U is None:
                raise ValueError("a loss with kl > 0 needs the start weights' log-probabilities")
            loss_U = loss_U + spec.kl * kl_to_start(logp_U, facts.start_U)
        if spec.entropy:
            loss_U = loss_U - spec.entropy * entropy_U
        return (loss_U * facts.weight_U).sum()

    def clipped(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        ratio_U = ratio(logp_U, _old(logp_U, facts))
        above = (ratio_U > 1 + self._spec.clip_high) & (facts.advantage_U > 0)
        below = (ratio_U < 1 - self._spec.clip_low) & (facts.advantage_U < 0)
        return above | below


def _old(logp_U: Tensor, facts: TokenFacts) -> Tensor:
    return logp_U.detach() if facts.old_U is None else facts.old_U
