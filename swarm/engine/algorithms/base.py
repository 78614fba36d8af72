"""Base of all algorithms: turn rewards into advantages, and compute each token's loss from its facts.

It holds the clipped surrogate and the KL and entropy terms; subclasses override what differs. `corrections` has importance corrections.
Suffix of tensors: U uses (sampled tokens of trained calls).
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

    has_critic: advantages need values. couples_calls: a token's ratio depends on all tokens of its call, so that
    `call_gap_U` is needed once the weights have moved. reads_tokens: advantages depend on the tokens' log-probabilities.
    """

    has_critic: ClassVar[bool] = False
    couples_calls: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.spec = spec
        self.correction = correction_of(spec)

    @property
    def rewards_alone(self) -> bool:
        """Whether a token with advantage 0 has no part in the loss, and advantages follow from the rewards alone."""
        return not (self.spec.kl or self.spec.entropy or self.has_critic)

    @property
    def credits_tokens(self) -> bool:
        """Whether advantages need the trainer's pass over the tokens first: use `credit` instead of `outcomes`."""
        return self.has_critic or self.penalises

    @property
    def penalises(self) -> bool:
        """Whether the KL penalty is subtracted from the rewards."""
        return self.spec.kl > 0 and self.spec.kl_in == "reward"

    @property
    def of_updates(self) -> bool:
        """Whether a token's loss depends on all tokens of its update; then call `over_update` before each update."""
        return self.correction.of_updates

    # -- advantages ---------------------------------------------------------------------------------------------------

    def shaped(self, reward: float, longest: int, limit: int) -> float:
        """The reward after shaping. longest: tokens of the longest answer; limit: most tokens allowed in an answer."""
        return reward

    @abstractmethod
    def outcomes(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """One advantage per trajectory of a batch, from rewards alone."""

    def credit(self, trajectories: Sequence[Trajectory]) -> list[Credit]:
        """Advantages of all tokens of a batch, including penalties and the critic's values."""
        net = [trajectory.net for trajectory in trajectories]
        return [
            Credit(advantages=[advantage] * trajectory.tokens)
            for advantage, trajectory in zip(self.outcomes(net), net, strict=True)
        ]

    # -- the price of a token -------------------------------------------------------------------------------------------

    def over_update(self, update: Update) -> TokenFacts:
        """The facts of an update's tokens, plus those that `loss` needs about the whole update. Raises: TrainingRefused."""
        return self.correction.over_update(update)

    def loss(self, logp_U: Tensor, entropy_U: Tensor, facts: TokenFacts) -> Tensor:
        """The quantity minimised: a scalar, the weighted sum over these uses."""
        spec, loss_U = self.spec, self.surrogate(logp_U, facts)
        if spec.kl and not self.penalises:
            if facts.start_U is None:
                raise ValueError("a loss with kl > 0 needs the start weights' log-probabilities")
            loss_U = loss_U + spec.kl * kl_to_start(logp_U, facts.start_U)
        if spec.entropy:
            loss_U = loss_U - spec.entropy * entropy_U
        return (loss_U * facts.weight_U).sum()

    def surrogate(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        """Policy loss of each use, with the importance correction."""
        gain_U = self.gain(logp_U, facts)
        correction_U = self.correction.weights(old(logp_U, facts), facts)
        if correction_U is not None:
            gain_U = gain_U * correction_U
        return -gain_U

    def gain(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        """Gain of each use: min(r A, clip(r, 1 - low, 1 + high) A). Schulman et al. 2017 (arXiv
        1707.06347), eq. 7."""
        ratio_U = self.ratio(logp_U, facts)
        kept_U = ratio_U.clamp(1 - self.spec.clip_low, 1 + self.spec.clip_high)
        return (ratio_U * facts.advantage_U).minimum(kept_U * facts.advantage_U)

    def clipped(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        """Which uses get no gradient because their ratio left the clip range."""
        ratio_U = self.ratio(logp_U, facts)
        above = (ratio_U > 1 + self.spec.clip_high) & (facts.advantage_U > 0)
        below = (ratio_U < 1 - self.spec.clip_low) & (facts.advantage_U < 0)
        return above | below

    def ratio(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        """Current over old probability."""
        return ratio(logp_U, old(logp_U, facts))

    def value_loss(self, value_U: Tensor, facts: TokenFacts) -> Tensor:
        """The critic's own loss, a scalar; for algorithms that have one."""
        raise TypeError(f"{self.spec.name} has no critic")
