"""GSPO: uses the ratio of a whole answer instead of each token's own.

s = (p(y) / p_old(y))^(1 / |y|), L = -min(s A, clip(s, 1 - low, 1 + high) A), averaged within each call, then over calls. Here
an answer is a call: all tokens sampled for one request. Each token's gradient is s A d log p(y_t), from the token-wise
form s_t = sg[s] p(y_t) / sg[p(y_t)]. Source: Zheng et al. 2025 (arXiv 2507.18071), eq. 5 to 7 and 14.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm.engine.algorithms.facts import TokenFacts, exponential
from swarm.engine.algorithms.grpo import Grpo

if TYPE_CHECKING:
    from torch import Tensor


class Gspo(Grpo):
    """The ratio s is one until the first update of a step moves the weights."""

    couples_calls = True

    def ratio(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        own_U = logp_U - logp_U.detach()
        if facts.call_gap_U is None:
            if facts.old_U is not None:
                raise ValueError("a ratio of whole calls needs call_gap_U, their log-ratios")
            return exponential(own_U)
        return exponential(facts.call_gap_U + own_U)
