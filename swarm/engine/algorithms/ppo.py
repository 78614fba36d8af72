"""PPO: the clipped surrogate on generalised advantage estimates over a critic's values.

delta_t = r_t + gamma V_{t+1} - V_t, A_t = sum over l of (gamma lambda)^l delta_{t+l}, normalised over the trained tokens of
the batch; r_t is minus the token's KL penalty, plus the reward at the last token. The critic is trained towards R_t = A_t + V_t
(before normalisation): L_V = max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2.
Sources: Schulman et al. 2017 (arXiv 1707.06347), eq. 7 and 9; advantages Schulman et al. 2016 (arXiv 1506.02438), eq. 16;
the penalty inside the reward and the clipped value loss as in Ziegler et al. 2019 (arXiv 1909.08593) and its code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.facts import TokenFacts
from swarm.engine.algorithms.rewards import Credit, Trajectory, generalised, whitened, whitened_tokens

if TYPE_CHECKING:
    from torch import Tensor


class Ppo(Algorithm):
    """The clipped surrogate of `Algorithm`, with a critic."""

    has_critic = True

    def outcomes(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Return advantages as if the critic gave all states the same value, which the normalisation cancels."""
        rewards, tokens = [each.reward for each in trajectories], [each.tokens for each in trajectories]
        return whitened(rewards, tokens, self.spec.advantage_norm)

    def credit(self, trajectories: Sequence[Trajectory]) -> list[Credit]:
        spec = self.spec
        raw = [generalised(each.token_rewards, each.values, spec.gamma, spec.gae_lambda) for each in trajectories]
        targets = [
            [advantage + value for advantage, value in zip(advantages, each.values, strict=True)]
            for advantages, each in zip(raw, trajectories, strict=True)
        ]
        normed = whitened_tokens(raw) if spec.advantage_norm == "std" else raw
        return [Credit(advantages=own, targets=target) for own, target in zip(normed, targets, strict=True)]

    def value_loss(self, value_U: Tensor, facts: TokenFacts) -> Tensor:
        if facts.value_U is None or facts.target_U is None:
            raise ValueError("a critic's loss needs value_U and target_U, its values before the step and their targets")
        reach = self.spec.value_clip
        kept_U = facts.value_U + (value_U - facts.value_U).clamp(-reach, reach)
        error_U = (value_U - facts.target_U).square().maximum((kept_U - facts.target_U).square())
        return (error_U * facts.weight_U).sum() / 2
