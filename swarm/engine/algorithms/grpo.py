"""GRPO: a clipped policy gradient on advantages relative to the group.

A_i = (r_i - mean(r)) / std(r), over the episodes of one task; L = -min(r_t A, clip(r_t, 1 - low, 1 + high) A), averaged
within each episode, then over episodes. Source: Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), eq. 3 and section 4.1.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.rewards import Trajectory, group_relative, within_groups


class Grpo(Algorithm):
    """Group-relative advantages, with the clipped surrogate of `Algorithm`."""

    def outcomes(self, trajectories: Sequence[Trajectory]) -> list[float]:
        return within_groups(trajectories, lambda rewards: group_relative(rewards, self.spec.advantage_norm))
