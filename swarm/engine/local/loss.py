"""What every algorithm's loss is made of: what is known of each trained token, and the terms that they share.

Suffix of tensors: U uses (sampled tokens of trained calls).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarm.engine.tree import Branch, Segment

_MAX_GAP = 30.0
"""Log-ratios beyond this are cut, so that no exponential overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFacts:
    """Constants of the loss, per use. Log-probabilities are after temperature.

    recorded: by the sampler. old: by the trainer, before the step; None: the current ones, so that the ratio is one.
    start: under the run's first weights; None where it was not computed.
    """

    advantage_U: Tensor
    weight_U: Tensor
    recorded_U: Tensor
    old_U: Tensor | None = None
    start_U: Tensor | None = None

    def part(self, uses: slice) -> TokenFacts:
        return TokenFacts(
            advantage_U=self.advantage_U[uses],
            weight_U=self.weight_U[uses],
            recorded_U=self.recorded_U[uses],
            old_U=None if self.old_U is None else self.old_U[uses],
            start_U=None if self.start_U is None else self.start_U[uses],
        )


class Objective(Protocol):
    """One algorithm."""

    def loss(self, logp_U: Tensor, entropy_U: Tensor, facts: TokenFacts) -> Tensor:
        """The quantity minimised: a scalar, the weighted sum over these uses."""

    def clipped(self, logp_U: Tensor, facts: TokenFacts) -> Tensor:
        """Which uses got no gradient because their ratio left the clip range."""


def facts_of(segment: Segment, branches: Sequence[Branch]) -> TokenFacts:
    """What is recorded of the segment's uses, in order."""
    uses = [(branches[branch], at) for branch, at in zip(segment.use_branch, segment.use_position, strict=True)]
    return TokenFacts(
        advantage_U=torch.tensor([branch.advantage for branch, _ in uses]),
        weight_U=torch.tensor([branch.weight for branch, _ in uses]),
        recorded_U=torch.tensor([branch.call.logprobs[at] for branch, at in uses]),
    )


def kl_to_start(logp_U: Tensor, start_U: Tensor) -> Tensor:
    """The k3 estimate of KL(current, start) from tokens of the current weights; never negative.

    Source: Schulman 2020, "Approximating KL divergence".
    """
    gap_U = (start_U - logp_U).clamp(max=_MAX_GAP)
    return gap_U.expm1() - gap_U


def ratio(logp_U: Tensor, before_U: Tensor) -> Tensor:
    return (logp_U - before_U).clamp(max=_MAX_GAP).exp()
