"""Algorithms and corrections that call users' functions (`functions` describes their arguments).

A loss over a whole update is reduced to each token's value and its derivative with respect to the token's log-probability. From
these, a trainer that holds only a few tokens at a time computes the same gradient.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import ClassVar

import torch
from torch import Tensor

from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.corrections import Correction
from swarm.engine.algorithms.facts import TokenFacts, nothing_clipped, old
from swarm.engine.algorithms.functions import OwnFunction, Tokens, Update
from swarm.engine.algorithms.rewards import Credit, Episodes, Trajectory
from swarm.engine.seam import TrainingRefused
from swarm.protocol.algorithms import AlgorithmSpec


class OwnAdvantage(Algorithm):
    """Advantages from a user's function, with the clipped surrogate as loss. Groups with equal rewards are trained too."""

    reads_tokens = True

    @property
    def rewards_alone(self) -> bool:
        return False

    @property
    def credits_tokens(self) -> bool:
        return True

    def outcomes(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Return zeros: the user's function computes advantages later, in `credit`, once the trainer has read the tokens."""
        return [0.0] * len(trajectories)

    def credit(self, trajectories: Sequence[Trajectory]) -> list[Credit]:
        net = [trajectory.net for trajectory in trajectories]
        advantages = OwnFunction(self.spec, "name")(_tokens(net, self.spec)).tolist()
        edges = accumulate((trajectory.tokens for trajectory in net), initial=0)
        return [Credit(advantages=advantages[first:last]) for first, last in pairwise(edges)]


class OwnCorrection(Correction):
    """Importance weights computed by a user's function."""

    of_updates = True

    def over_update(self, update: Update) -> TokenFacts:
        tokens = update.tokens(self.spec, update.logp_N.detach())
        return replace(update.facts, correction_U=OwnFunction(self.spec, "importance_correction")(tokens).detach())

    def weights(self, before_U: Tensor, facts: TokenFacts) -> Tensor:
        if facts.correction_U is None:
            raise ValueError("call `over_update` first: a user's correction needs the whole update")
        return facts.correction_U


class OwnLoss(Algorithm):
    """Mixin that replaces an algorithm's loss with a user's function. KL, entropy and importance correction stay the same."""

    couples_calls: ClassVar[bool] = False

    @property
    def rewards_alone(self) -> bool:
        """False: a user's loss may train tokens that have no advantage, so all tokens are trained."""
        return False

    @property
    def of_updates(self) -> bool:
        return True

    def over_update(self, update: Update) -> TokenFacts:
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
            raise ValueError("call `over_update` first: a user's loss needs the whole update")
        return facts.price_U + facts.slope_U * (logp_U - logp_U.detach())

    def clipped(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        """Return False for every use: a user's function does not report clipping."""
        return nothing_clipped(logp_U)


def with_own_loss(kind: type[Algorithm]) -> type[Algorithm]:
    """Return a subclass of the algorithm whose loss is a user's function."""
    return type(f"{kind.__name__}WithOwnLoss", (OwnLoss, kind), {})


def over_numbers(
    algorithm: Algorithm,
    facts: Mapping[str, Sequence[float]],
    calls: Sequence[tuple[str, int]],
    episodes: Episodes,
) -> dict[str, list[float]]:
    """See `swarm.engine.algorithms.over_numbers`."""
    columns = {name: torch.tensor(list(values), dtype=torch.float64) for name, values in facts.items()}
    logp_N = columns.pop("logp_N")
    update = Update(logp_N=logp_N, facts=TokenFacts(**columns), calls=calls, episodes=episodes)
    said = told_of(algorithm.over_update(update))
    return {name: value_N.tolist() for name, value_N in said.items()}


def told_of(facts: TokenFacts) -> dict[str, Tensor]:
    """Return the results of users' functions that these facts hold, by fact name."""
    said = {"correction_U": facts.correction_U, "price_U": facts.price_U, "slope_U": facts.slope_U}
    return {name: value_N for name, value_N in said.items() if value_N is not None}


def _tokens(trajectories: Sequence[Trajectory], spec: AlgorithmSpec) -> Tokens:
    """Return all tokens of a batch, as the argument of a user's function."""
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
