"""Importance corrections: weights for tokens whose sampled probability differs from the one that the trainer computes.

The ratio is the trainer's probability before the step divided by the recorded one, for a token or for its whole call (the
product over its tokens). Weights are constants: no gradient flows through them. Tensor suffix U: uses, i.e. sampled tokens of
trained calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from swarm.engine.algorithms.facts import TokenFacts, exponential, ratio
from swarm.protocol.algorithms import AlgorithmSpec

if TYPE_CHECKING:
    from torch import Tensor

    from swarm.engine.algorithms.functions import Update


class Correction(ABC):
    """One correction with its bounds.

    whole_calls: the correction needs `rollout_gap_U`.
    of_updates: the correction needs `over_update` before each update.
    """

    whole_calls: ClassVar[bool] = False
    of_updates: ClassVar[bool] = False

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.spec = spec

    @abstractmethod
    def weights(self, before_U: Tensor, facts: TokenFacts) -> Tensor | None:
        """Return the factor on each token's gain, or None for no correction. `before_U` has the log-probabilities before the step."""

    def over_update(self, update: Update) -> TokenFacts:
        """Return the update's facts, plus those that `weights` needs about the whole update."""
        return update.facts

    def ratio(self, before_U: Tensor, facts: TokenFacts) -> Tensor:
        """Return the trainer's probability divided by the sampler's."""
        if not self.whole_calls:
            return ratio(before_U, facts.recorded_U)
        if facts.rollout_gap_U is None:
            raise ValueError("a correction of whole calls needs rollout_gap_U, their log-ratios")
        return exponential(facts.rollout_gap_U)


class Uncorrected(Correction):
    """Weight 1 for every token, except those sampled from a distribution other than the one trained: these always get min(ratio,
    limit)."""

    def weights(self, before_U: Tensor, facts: TokenFacts) -> Tensor | None:
        if facts.off_policy_U is None:
            return None
        cut_U = self.ratio(before_U, facts).clamp(max=self.spec.importance_limit)
        return 1.0 + (cut_U - 1.0) * facts.off_policy_U


class Truncated(Correction):
    """w = min(ratio, limit). Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"."""

    def weights(self, before_U: Tensor, facts: TokenFacts) -> Tensor:
        return self.ratio(before_U, facts).clamp(max=self.spec.importance_limit)


class TruncatedCall(Truncated):
    """Like `Truncated`, but with the ratio of the whole call. Source: Liu et al. 2025, "When Speed Kills Stability" (Seq-TIS)."""

    whole_calls = True


class Masked(Correction):
    """w = ratio where floor <= ratio <= limit, else 0: tokens that differ too much are not trained.

    With a floor, this is IcePop's M(k) = k if alpha <= k <= beta else 0 (Zhao et al. 2025, "Small Leak Can Sink a Great Ship"; Ling
    Team 2025, arXiv 2510.18855). Without one, it is masked importance sampling of tokens (Liu et al. 2025, "When Speed Kills
    Stability": Token-MIS). verl: `rollout_is_threshold: "0.5_5.0"`; TRL: `vllm_importance_sampling_mode: token_mask`.
    """

    def weights(self, before_U: Tensor, facts: TokenFacts) -> Tensor:
        ratio_U = self.ratio(before_U, facts)
        return ratio_U * (ratio_U >= self.spec.importance_floor) * (ratio_U <= self.spec.importance_limit)


class MaskedCall(Masked):
    """Like `Masked`, but with the ratio of the whole call (Seq-MIS; TRL: `sequence_mask`): a call is trained completely or not at
    all."""

    whole_calls = True


_CORRECTIONS: Mapping[str, type[Correction]] = {
    "none": Uncorrected,
    "truncated": Truncated,
    "truncated_call": TruncatedCall,
    "masked": Masked,
    "masked_call": MaskedCall,
}
"""Corrections under the names registered in `swarm.protocol.algorithms.CORRECTIONS`."""


def correction_of(spec: AlgorithmSpec) -> Correction:
    """Return the correction that the spec names, with its bounds."""
    if "importance_correction" in spec.own_functions:
        found: Correction = import_module("swarm.engine.algorithms.own").OwnCorrection(spec)
        return found
    return _CORRECTIONS[spec.importance_correction](spec)
