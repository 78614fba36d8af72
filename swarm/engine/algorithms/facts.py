"""Facts about a token that its loss depends on, and the arithmetic of ratios.

Suffix of tensors: U uses (sampled tokens of trained calls).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


_MAX_GAP = 30.0
"""Log-ratios are clipped to this, so that no exponential overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFacts:
    """Constants of the loss, per use. Log-probabilities are after temperature.

    place: the use's index among the sampled tokens of all calls of the minibatch, concatenated.
    recorded: by the sampler. old: by the trainer, before the step; None: the current ones, so that the ratio is one.
    start: under the run's first weights. value: by the critic, before the step. target: what its value should have been.
    call_gap: mean of current - old over the call's tokens, under the weights that are about to be trained.
    entropy: of the token's distribution, before the step. correction, price and slope: results of a user's own functions over the
    whole update: the token's importance weight, its loss, and the derivative of the update's loss by the token's log-probability,
    divided by its weight in that loss.
    rollout_gap: sum of old - recorded over the call's tokens. off_policy: 1 where the token was drawn from a different distribution
    than is trained (`sampling.train` is policy), else 0. A fact is None if it was not computed or does not exist.
    """

    advantage_U: Tensor
    weight_U: Tensor
    recorded_U: Tensor
    place_U: Tensor | None = None
    old_U: Tensor | None = None
    start_U: Tensor | None = None
    value_U: Tensor | None = None
    target_U: Tensor | None = None
    call_gap_U: Tensor | None = None
    rollout_gap_U: Tensor | None = None
    off_policy_U: Tensor | None = None
    entropy_U: Tensor | None = None
    correction_U: Tensor | None = None
    price_U: Tensor | None = None
    slope_U: Tensor | None = None

    def part(self, uses: slice) -> TokenFacts:
        known = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(self, **{name: fact[uses] for name, fact in known if fact is not None})


def old(logp_U: Tensor, facts: TokenFacts) -> Tensor:
    return logp_U.detach() if facts.old_U is None else facts.old_U


def kl_to_start(logp_U: Tensor, start_U: Tensor) -> Tensor:
    """The k3 estimate of KL(current, start) from tokens of the current weights; never negative.

    Source: Schulman 2020, "Approximating KL divergence".
    """
    gap_U = (start_U - logp_U).clamp(max=_MAX_GAP)
    return gap_U.expm1() - gap_U


def ratio(logp_U: Tensor, before_U: Tensor) -> Tensor:
    return exponential(logp_U - before_U)


def nothing_clipped(logp_U: Tensor) -> Tensor:
    """`Algorithm.clipped` where there is no clip range."""
    return logp_U.exp() < 0.0  # a comparison, as the echo engine has no tensors


def excess(logp_U: Tensor, before_U: Tensor) -> Tensor:
    """How far the ratio is above one."""
    return (logp_U - before_U).clamp(max=_MAX_GAP).expm1()


def exponential(gap_U: Tensor) -> Tensor:
    return gap_U.clamp(max=_MAX_GAP).exp()
