"""CISPO: the ratio is clipped as a weight, so that no token loses its gradient.

L = -sg[clip(r_t, 1 - low, 1 + high)] A log p(y_t), averaged over all tokens; with low = 1 the ratio has no lower bound.
Source: MiniMax 2025, MiniMax-M1 (arXiv 2506.13585), eq. 4 and 5. The paper gives no upper bound; 1 + 4 is our choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm.engine.algorithms.facts import TokenFacts
from swarm.engine.algorithms.grpo import Grpo

if TYPE_CHECKING:
    from torch import Tensor


class Cispo(Grpo):
    """CISPO's loss. Only its gradient is meaningful, not its value."""

    def gain(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        ratio_U = self.ratio(logp_U, facts).detach()
        weight_U = ratio_U.clamp(1 - self.spec.clip_low, 1 + self.spec.clip_high)
        return weight_U * facts.advantage_U * logp_U

    def clipped(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        """Return a mask of the uses whose weight was clipped."""
        ratio_U = self.ratio(logp_U, facts)
        return (ratio_U > 1 + self.spec.clip_high) | (ratio_U < 1 - self.spec.clip_low)
