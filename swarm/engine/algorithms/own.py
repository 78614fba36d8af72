"""Algorithms with functions of users' own in the place of an advantage or a loss (`functions` says what these are given).

A loss over a whole update becomes a price of each token: its value, and its slope by the token's log-probability. A trainer that holds
a few tokens at a time makes the same gradient of these.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, ClassVar

from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.facts import TokenFacts, old
from swarm.engine.algorithms.functions import OwnFunction, Tokens, Update
from swarm.engine.algorithms.rewards import Credit, Trajectory
from swarm.engine.seam import TrainingRefused
from swarm.protocol.algorithms import AlgorithmSpec

if TYPE_CHECKING:
    from torch import Tensor


class OwnAdvantage(Algorithm):
    """The advantage of a function, the clipped surrogate for a loss. No group is left out for its equal rewards."""

    reads_tokens = True

    @property
    def rewards_alone(self) -> bool:
        return False

    @property
    def credits_tokens(self) -> bool:
        return True

    def outcomes(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """0 until the trainer has read the tokens."""
        return [0.0] * len(trajectories)

    def credit(self, trajectories: Sequence[Trajectory]) -> list[Credit]:
        net = [trajectory.net for trajectory in trajectories]
        advantages = OwnFunction(self.spec, "name")(_tokens(net, self.spec)).tolist()
        edges = accumulate((trajectory.tokens for trajectory in net), initial=0)
        return [Credit(advantages=advantages[first:last]) for first, last in pairwise(edges)]


class OwnLoss(Algorithm):
    """Laid over an algorithm: what it says of a token's price is a function's. KL, entropy and importance correction are as ever."""

    couples_calls: ClassVar[bool] = False

    @property
    def of_updates(self) -> bool:
        return True

    def over_update(self, update: Update) -> TokenFacts:
        import torch

        facts = super().over_update(update)
        with torch.enable_grad():
            logp_N = update.logp_N.detach().clone().requires_grad_()
            function = OwnFunction(self.spec, "loss")
            loss_N = function(update.tokens(self.spec, logp_N))
            correction_N = self.correction.weights(old(update.logp_N, facts), facts)
            if correction_N is not None:
                loss_N = loss_N * correction_N
            if not loss_N.requires_grad:
                raise TrainingRefused(
                    f"{function.file}:{function.name} does not depend on logp_N: it would train nothing"
                )
            (slope_N,) = torch.autograd.grad((loss_N * facts.weight_U).sum(), logp_N)
        return replace(facts, price_U=loss_N.detach(), slope_U=slope_N / facts.weight_U)

    def surrogate(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        if facts.price_U is None or facts.slope_U is None:
            raise ValueError("an own loss prices tokens over their whole update, before")
        return facts.price_U + facts.slope_U * (logp_U - logp_U.detach())

    def clipped(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        """No function says what it clips."""
        return self.ratio(logp_U, facts) < 0


def with_own_loss(kind: type[Algorithm]) -> type[Algorithm]:
    """The algorithm with a function in the place of its loss."""
    return type(f"{kind.__name__}WithOwnLoss", (OwnLoss, kind), {})


def _tokens(trajectories: Sequence[Trajectory], spec: AlgorithmSpec) -> Tokens:
    """All tokens of a batch."""
    import torch

    groups: dict[Hashable, int] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, len(groups))
    logp_N = torch.tensor(list(chain.from_iterable(each.logps for each in trajectories)))
    sizes = torch.tensor([size for each in trajectories for size in each.calls])
    return Tokens(
        logp_N=logp_N,
        old_logp_N=logp_N,
        sampled_logp_N=torch.tensor(list(chain.from_iterable(each.recorded for each in trajectories))),
        entropy_N=torch.tensor(list(chain.from_iterable(each.entropies for each in trajectories))),
        mask_N=torch.ones_like(logp_N, dtype=torch.bool),
        advantage_N=torch.zeros_like(logp_N),
        call_N=torch.arange(len(sizes)).repeat_interleave(sizes),
        episode_N=torch.arange(len(trajectories)).repeat_interleave(
            torch.tensor([each.tokens for each in trajectories])
        ),
        reward_E=torch.tensor([each.reward for each in trajectories]),
        group_E=torch.tensor([groups[each.group] for each in trajectories]),
        settings=spec,
    )
