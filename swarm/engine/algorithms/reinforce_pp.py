"""REINFORCE++: returns normalised over the whole batch instead of a group, with the KL penalty inside the reward.

G_t = sum over k >= t of gamma^(k - t) r_k, where r_k is minus the token's KL penalty, plus the reward at the last token;
A_t = (G_t - mean) / std over all trained tokens of the batch; then PPO's clipped surrogate, without a critic. With
`baseline: group` the group's mean reward is subtracted first. In that case the paper puts the KL penalty into the loss, with the
k2 estimator; here `kl_in` decides where it goes. Source: Hu et al. 2025 (arXiv 2501.03262).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.rewards import Credit, Trajectory, discounted, whitened, whitened_tokens, within_groups


class ReinforcePlusPlus(Algorithm):
    """Batch-normalised returns, with the clipped surrogate of `Algorithm`."""

    @property
    def credits_tokens(self) -> bool:
        """Also True with a discount, which gives each token its own return."""
        return super().credits_tokens or self.spec.gamma < 1

    @property
    def rewards_alone(self) -> bool:
        return super().rewards_alone and not self.credits_tokens

    def outcomes(self, trajectories: Sequence[Trajectory]) -> list[float]:
        rewards = [trajectory.reward for trajectory in self._compared(trajectories)]
        return whitened(rewards, [trajectory.tokens for trajectory in trajectories])

    def credit(self, trajectories: Sequence[Trajectory]) -> list[Credit]:
        returns = [discounted(trajectory.token_rewards, self.spec.gamma) for trajectory in self._compared(trajectories)]
        return [Credit(advantages=advantages) for advantages in whitened_tokens(returns)]

    def _compared(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        if self.spec.baseline == "none":
            return trajectories
        means = within_groups([each.net for each in trajectories], lambda rewards: [_mean(rewards)] * len(rewards))
        return [replace(each, reward=each.reward - mean) for each, mean in zip(trajectories, means, strict=True)]


def _mean(rewards: Sequence[float]) -> float:
    """Return the mean; for equal rewards, exactly their value, so that rounding creates no differences."""
    return rewards[0] if max(rewards) == min(rewards) else fmean(rewards)
