"""SAPO: a smooth gate in place of the clipped ratio, so that the gradient fades out instead of stopping abruptly.

L = -f(r_t) A, f(x) = (4 / tau) sigmoid(tau (x - 1)), with tau = `tau_positive` where A > 0, else `tau_negative`; averaged within
each episode, then over episodes. At r = 1 the gradient equals the plain policy gradient: f'(1) = 1 for every tau.
Source: Gao et al. 2025, "Soft Adaptive Policy Optimization" (arXiv 2511.20347); tau 1 and 1.05 are the paper's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm.engine.algorithms.facts import TokenFacts, excess, nothing_clipped, old
from swarm.engine.algorithms.grpo import Grpo

if TYPE_CHECKING:
    from torch import Tensor


class Sapo(Grpo):
    """SAPO has no clip range, so no token counts as clipped."""

    def gain(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        positive, negative = self.spec.tau_positive, self.spec.tau_negative
        raised_U = facts.advantage_U > 0
        excess_U = excess(logp_U, old(logp_U, facts))
        above_U, below_U = ((tau * excess_U).sigmoid() * (4.0 / tau) for tau in (positive, negative))
        return (above_U * raised_U + below_U * (1.0 - 1.0 * raised_U)) * facts.advantage_U

    def clipped(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        return nothing_clipped(logp_U)
