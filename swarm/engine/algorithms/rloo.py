"""RLOO: REINFORCE with the mean reward of the group's other episodes as baseline.

A_i = r_i - (1 / (n - 1)) sum over j != i of r_j. The gradient is that of the whole answer's log-probability, which is the
sum over its tokens: `loss_agg: token`, up to a factor that is the same for all tokens. The paper does not clip; here the clip
range applies once the weights have moved within a step. Source: Ahmadian et al. 2024 (arXiv 2402.14740), section 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.rewards import Trajectory, leave_one_out, within_groups


class Rloo(Algorithm):
    """Leave-one-out advantages, with the clipped surrogate of `Algorithm`."""

    def outcomes(self, trajectories: Sequence[Trajectory]) -> list[float]:
        return within_groups(trajectories, leave_one_out)
