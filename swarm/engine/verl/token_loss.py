"""The loss as verl's ranks call it: one of our algorithms over the trained tokens of a micro-batch. Runs in Ray's actors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swarm.engine.algorithms import algorithm_of
from swarm.engine.algorithms.base import TokenFacts
from swarm.engine.seam import EngineError
from swarm.protocol.algorithms import ALGORITHMS, AlgorithmSpec


def refuse_unknown_terms(spec: AlgorithmSpec) -> None:
    """Raises: EngineError when the algorithm needs more of a token than the ranks have in a row."""
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
    if algorithm.credits_tokens:
        return "takes no penalty or discount from the rewards of single tokens"
    if algorithm.couples_calls or spec.importance_correction == "truncated_call":
        return "computes no ratios of whole calls"
    return None


@dataclass(frozen=True)
class TokenLoss:
    """Weights in a batch add up to one over all ranks; FSDP takes the mean of the ranks' gradients, hence the factor."""

    algorithm: AlgorithmSpec

    def __call__(
        self, *, model_output: dict[str, Tensor], data: Any, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        objective = algorithm_of(self.algorithm)
        mask = data["loss_mask"].values() > 0
        logp_U = model_output["log_probs"].values().float()[mask]
        if not len(logp_U):  # a rank without a trained token takes part all the same: the others wait for it
            return model_output["log_probs"].values().sum() * 0.0, {"clipped": 0.0}
        facts = TokenFacts(
            advantage_U=data["advantage"].values()[mask],
            weight_U=data["weight"].values()[mask],
            recorded_U=data["recorded"].values()[mask],
            off_policy_U=data["off_policy"].values()[mask],
            old_U=data["old"].values()[mask] if "old" in data.keys() else None,  # noqa: SIM118  not a mapping
            start_U=data["start"].values()[mask] if "start" in data.keys() else None,  # noqa: SIM118
        )
        loss = objective.loss(logp_U, model_output["entropy"].values().float()[mask], facts)
        clipped = float(objective.clipped(logp_U.detach(), facts).sum())
        return loss * float(data["dp_size"]), {"clipped": clipped}
