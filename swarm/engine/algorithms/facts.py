"""The facts about a token that determine its loss, and functions for ratios.

Tensor suffix U: uses, i.e. sampled tokens of trained calls.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


_MAX_GAP = 30.0
"""Upper limit for log-ratios, so that their exponentials do not overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFacts:
    """The constants in a token's loss. Log-probabilities are after temperature. A fact is None if it was not computed or does not
    exist.

    place: index of the use among the sampled tokens of all calls of the minibatch, concatenated.
    recorded: log-probability recorded by the sampler.
    old: log-probability computed by the trainer before the step; None stands for the current one, so that the ratio is one.
    start: log-probability under the run's first weights.
    value: the critic's value before the step; `target` is the value it should have given.
    call_gap: mean of current - old over the call's tokens, under the weights about to be trained.
    rollout_gap: sum of old - recorded over the call's tokens.
    off_policy: 1 where the token was sampled from a distribution other than the one trained (`sampling.train` is policy), else 0.
    entropy: entropy of the token's distribution before the step.
    correction, price, slope: results of a user's functions over the whole update: the token's importance weight, its loss, and the
        derivative of the update's loss with respect to the token's log-probability, divided by the token's weight in that loss.
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
    """Estimate KL(current, start) with k3 from tokens sampled with the current weights; never negative.

    Source: Schulman 2020, "Approximating KL divergence".
    """
    gap_U = (start_U - logp_U).clamp(max=_MAX_GAP)
    return gap_U.expm1() - gap_U


def ratio(logp_U: Tensor, before_U: Tensor) -> Tensor:
    return exponential(logp_U - before_U)


def nothing_clipped(logp_U: Tensor) -> Tensor:
    """Return False for every use. Serves as `Algorithm.clipped` of algorithms without a clip range."""
    return logp_U.exp() < 0.0  # a comparison also works in the echo engine, which has no tensors


def excess(logp_U: Tensor, before_U: Tensor) -> Tensor:
    """Return the ratio minus one."""
    return (logp_U - before_U).clamp(max=_MAX_GAP).expm1()


def exponential(gap_U: Tensor) -> Tensor:
    return gap_U.clamp(max=_MAX_GAP).exp()
