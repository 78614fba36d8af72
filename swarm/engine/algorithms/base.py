"""Base class of all algorithms: turns rewards into advantages, and computes each token's loss from its facts.

It implements the clipped surrogate and the KL and entropy terms; subclasses override what differs. Importance corrections are in
`corrections`. Tensor suffix U: uses, i.e. sampled tokens of trained calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from swarm.engine.algorithms.corrections import correction_of
from swarm.engine.algorithms.facts import TokenFacts, kl_to_start, old, ratio
from swarm.engine.algorithms.rewards import Credit, Trajectory
from swarm.protocol.algorithms import AlgorithmSpec

if TYPE_CHECKING:
    from torch import Tensor

    from swarm.engine.algorithms.functions import Update


class Algorithm(ABC):
    """One algorithm with its fields.

    has_critic: advantages need a critic's values.
    couples_calls: a token's ratio depends on all tokens of its call, so the loss needs `call_gap_U` once the weights have moved.
    reads_tokens: advantages depend on the tokens' log-probabilities.
    """

    has_critic: ClassVar[bool] = False
    couples_calls: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.spec = spec
        self.correction = correction_of(spec)

    @property
    def rewards_alone(self) -> bool:
        """True if advantages depend only on rewards, and a token with advantage 0 adds nothing to the loss."""
        return not (self.spec.kl or self.spec.entropy or self.has_critic)

    @property
    def credits_tokens(self) -> bool:
        """True if advantages can be computed only after the trainer has read the tokens; then call `credit`, not `outcomes`."""
        return self.has_critic or self.penalises

    @property
    def penalises(self) -> bool:
        """True if the KL penalty is subtracted from the rewards."""
        return self.spec.kl > 0 and self.spec.kl_in == "reward"

    @property
    def of_updates(self) -> bool:
        """True if a token's loss depends on all tokens of its update; then call `over_update` before each update."""
        return self.correction.of_updates

    # -- advantages ---------------------------------------------------------------------------------------------------

    def shaped(self, reward: float, longest: int, limit: int) -> float:
        """Return the shaped reward. `longest` is the token count of the longest answer, `limit` the maximum for an answer."""
        return reward

    @abstractmethod
    def outcomes(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Return one advantage per trajectory of a batch, computed only from rewards."""

    def credit(self, trajectories: Sequence[Trajectory]) -> list[Credit]:
        """Return each trajectory's token advantages, including penalties and the critic's values."""
        net = [trajectory.net for trajectory in trajectories]
        return [
            Credit(advantages=[advantage] * trajectory.tokens)
            for advantage, trajectory in zip(self.outcomes(net), net, strict=True)
        ]

    # -- the loss of a token --------------------------------------------------------------------------------------------

    def over_update(self, update: Update) -> TokenFacts:
        """Return the update's facts, plus those that `loss` needs about the whole update. Raises: TrainingRefused."""
        return self.correction.over_update(update)

    def loss(self, logp_U: Tensor, entropy_U: Tensor, facts: TokenFacts) -> Tensor:
        """Return the loss to minimise: a scalar, the weighted sum over these uses."""
        spec, loss_U = self.spec, self.surrogate(logp_U, facts)
        if spec.kl and not self.penalises:
            if facts.start_U is None:
                raise ValueError(
                    "a loss with kl > 0 needs start_U, the log-probabilities under the run's first weights"
                )
            loss_U = loss_U + spec.kl * kl_to_start(logp_U, facts.start_U)
        if spec.entropy:
            loss_U = loss_U - spec.entropy * entropy_U
        return (loss_U * facts.weight_U).sum()

    def surrogate(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        """Return the policy loss of each use, including the importance correction."""
        gain_U = self.gain(logp_U, facts)
        correction_U = self.correction.weights(old(logp_U, facts), facts)
        if correction_U is not None:
            gain_U = gain_U * correction_U
        return -gain_U

    def gain(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        """Return the gain of each use: min(r A, clip(r, 1 - low, 1 + high) A). Schulman et al. 2017 (arXiv 1707.06347), eq. 7."""
        ratio_U = self.ratio(logp_U, facts)
        kept_U = ratio_U.clamp(1 - self.spec.clip_low, 1 + self.spec.clip_high)
        return (ratio_U * facts.advantage_U).minimum(kept_U * facts.advantage_U)

    def clipped(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        """Return a mask of the uses that get no gradient because their ratio left the clip range."""
        ratio_U = self.ratio(logp_U, facts)
        above = (ratio_U > 1 + self.spec.clip_high) & (facts.advantage_U > 0)
        below = (ratio_U < 1 - self.spec.clip_low) & (facts.advantage_U < 0)
        return above | below

    def ratio(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        """Return the current probability divided by the old one."""
        return ratio(logp_U, old(logp_U, facts))

    def value_loss(self, value_U: Tensor, facts: TokenFacts) -> Tensor:
        """Return the critic's loss, a scalar. Only algorithms with a critic implement it."""
        raise TypeError(f"{self.spec.name} has no critic")
