"""The loss as verl's ranks call it: one of our algorithms over the trained tokens of a micro-batch. Runs in Ray's actors.

Tensor suffixes: U trained tokens of a micro-batch, C calls in it. A call is in one row, and so in one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from swarm.engine.algorithms import algorithm_of
from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.facts import TokenFacts, old
from swarm.engine.seam import EngineError
from swarm.protocol.algorithms import ALGORITHMS, AlgorithmSpec

_TOLD = ("correction", "price", "slope")
"""Results of users' functions, which the driver computes: ranks execute none of them."""


def refuse_unknown_terms(spec: AlgorithmSpec) -> None:
    """Refuse algorithms that need more facts about a token than the ranks have in a row. Raises: EngineError."""
    if (lacking := _lacking(spec)) is not None:
        others = ", ".join(name for name in ALGORITHMS if _lacking(AlgorithmSpec(name=name)) is None)
        raise EngineError(
            f"the verl engine {lacking}, which {spec.name} with these fields needs; choose one of {others} without them, or serve "
            "with --engine local"
        )


def _lacking(spec: AlgorithmSpec) -> str | None:
    algorithm = algorithm_of(spec)
    if algorithm.has_critic:
        return "trains no critic"
    if algorithm.penalises or (algorithm.credits_tokens and not algorithm.reads_tokens):
        return "applies no penalty or discount to the rewards of single tokens"
    return None


@dataclass(frozen=True)
class TokenLoss:
    """The loss of a micro-batch.

    Weights in a batch add up to one over all ranks; FSDP takes the mean of the ranks' gradients, hence the factor.
    """

    algorithm: AlgorithmSpec

    def __call__(
        self, *, model_output: dict[str, Tensor], data: Any, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        objective = algorithm_of(self.algorithm)
        mask = data["loss_mask"].values() > 0
        logp_U = model_output["log_probs"].values().float()[mask]
        if not len(logp_U):  # a rank without a trained token still takes part, because the others wait for it
            return model_output["log_probs"].values().sum() * 0.0, {"clipped": 0.0}
        facts = TokenFacts(
            advantage_U=data["advantage"].values()[mask],
            weight_U=data["weight"].values()[mask],
            recorded_U=data["recorded"].values()[mask],
            off_policy_U=data["off_policy"].values()[mask],
            old_U=data["old"].values()[mask] if "old" in data.keys() else None,  # noqa: SIM118  not a mapping
            start_U=data["start"].values()[mask] if "start" in data.keys() else None,  # noqa: SIM118
            **{f"{name}_U": data[name].values()[mask] for name in _TOLD if name in data.keys()},  # noqa: SIM118
        )
        facts = of_whole_calls(objective, facts, logp_U.detach(), data["call"].values()[mask])
        loss = objective.loss(logp_U, model_output["entropy"].values().float()[mask], facts)
        clipped = float(objective.clipped(logp_U.detach(), facts).sum())
        return loss * float(data["dp_size"]), {"clipped": clipped}


def of_whole_calls(algorithm: Algorithm, facts: TokenFacts, logp_U: Tensor, call_U: Tensor) -> TokenFacts:
    """Add to the facts the log-ratios of whole calls that the algorithm needs. `call_U` is the index of the call that sampled each
    token."""
    if algorithm.couples_calls and facts.old_U is not None:
        facts = replace(facts, call_gap_U=_over_calls(logp_U - facts.old_U, call_U, mean=True))
    if algorithm.correction.whole_calls:
        facts = replace(facts, rollout_gap_U=_over_calls(old(logp_U, facts) - facts.recorded_U, call_U, mean=False))
    return facts


def _over_calls(value_U: Tensor, call_U: Tensor, *, mean: bool) -> Tensor:
    """Return, for each token, the sum or the mean over the tokens of its call."""
    numbers_C, place_U, size_C = torch.unique(call_U, return_inverse=True, return_counts=True)
    sum_C = torch.zeros(len(numbers_C), dtype=value_U.dtype, device=value_U.device).index_add_(0, place_U, value_U)
    return (sum_C / size_C if mean else sum_C)[place_U]
