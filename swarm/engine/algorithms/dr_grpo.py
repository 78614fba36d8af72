"""Dr. GRPO: GRPO without the two normalisations that favour long wrong answers and easy or hard tasks.

A_i = r_i - mean(r); L = -(1 / episodes) sum over episodes of (1 / loss_length) sum over tokens of GRPO's clipped gain, with
loss_length the same for all episodes. Source: Liu et al. 2025 (arXiv 2503.20783), section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.rewards import Trajectory, group_relative, within_groups


class DrGrpo(Algorithm):
    """Group-relative advantages without division by the standard deviation. The constant divisor comes from its default `loss_agg`."""

    def outcomes(self, trajectories: Sequence[Trajectory]) -> list[float]:
        return within_groups(trajectories, lambda rewards: group_relative(rewards, "none"))
