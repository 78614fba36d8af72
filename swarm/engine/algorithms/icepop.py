"""IcePop: GRPO without the tokens on which trainer and sampler disagree too much.

L = -M(k_t) min(r_t A, clip(r_t, 1 - low, 1 + high) A), where k_t = p_old(y_t) / p_sampled(y_t) by trainer and sampler, and
M(k) = k if alpha <= k <= beta else 0, without a gradient; averaged within each episode, then over episodes. alpha is
`importance_floor`, beta `importance_limit`. Sources: Zhao et al. 2025, "Small Leak Can Sink a Great Ship: Boost RL Training on
MoE with IcePop" (ringtech.notion.site/icepop); Ling Team 2025 (arXiv 2510.18855), eq. 1 and 2, with alpha 0.5 and beta 5 in
section 2.3.4.
"""

from __future__ import annotations

from swarm.engine.algorithms.grpo import Grpo


class IcePop(Grpo):
    """Differs from GRPO only in its default `importance_correction` and that correction's bounds."""
