"""Measurements during a step, and the step's metrics (docs/reference/metrics.md).

Tensor suffix U: uses, i.e. sampled tokens of trained calls.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from foundation.ids import derived_seed
from swarm.engine.algorithms.facts import TokenFacts, kl_to_start
from swarm.engine.seam import TrainBatch, TrainingRefused
from swarm.engine.training.repetition import repetition_metrics
from swarm.engine.training.selection import reward_metrics, token_metrics
from swarm.protocol.runspec import RunSpec

KL_SAMPLE = 64
"""With kl = 0 the KL to the initial weights is only a metric, measured on at least this many tokens of neighbouring calls."""
Item = TypeVar("Item")


@dataclass(slots=True)
class WeightsChange:
    """Squared norms, in double precision: `before` of the weights before the step, `moved` of their change, summed over the step's
    updates even if these cancel one another."""

    moved: float = 0.0
    before: float = 0.0

    def add(self, other: WeightsChange) -> None:
        self.moved += other.moved
        self.before = self.before or other.before

    @property
    def relative(self) -> float:
        return math.sqrt(self.moved / self.before) if self.before else 0.0


@dataclass(slots=True)
class StepMetrics:
    """Accumulates a step's measurements. Tokens are measured before the step moves the weights."""

    loss: float = 0.0
    grad_norm: float = 0.0
    tokens: int = 0
    computed: int = 0
    off_policy: int = 0
    priced: int = 0
    clipped: float = 0.0
    value_loss: float | None = None
    """None if there is no critic."""
    value_explained: float = 0.0
    change: WeightsChange = field(default_factory=WeightsChange)
    kls: list[Tensor] = field(default_factory=list)
    _entropies: list[Tensor] = field(default_factory=list)
    _mismatches: list[Tensor] = field(default_factory=list)

    def add_tokens(self, logp_U: Tensor, entropy_U: Tensor, facts: TokenFacts) -> None:
        """Add tokens' entropies and their mismatch between trainer and sampler; off-policy tokens do not count for the mismatch."""
        self._entropies.append(entropy_U)
        gap_U = (logp_U - facts.recorded_U).abs()
        self._mismatches.append(gap_U if facts.off_policy_U is None else gap_U[facts.off_policy_U == 0])

    def add_trained(self, logp_U: Tensor, entropy_U: Tensor, facts: TokenFacts) -> None:
        """Add trained tokens, once per step."""
        self.tokens += len(logp_U)
        self.add_tokens(logp_U, entropy_U, facts)
        if facts.off_policy_U is not None:
            self.off_policy += int(facts.off_policy_U.sum())
        if facts.start_U is not None:
            self.kls.append(kl_to_start(logp_U, facts.start_U))

    def add_pass(self, tokens: int, clipped: float) -> None:
        """Add the number of tokens whose loss a pass computed, and how many of them were clipped; call it for each pass."""
        self.priced += tokens
        self.clipped += clipped

    def judge_critic(self, facts: Sequence[TokenFacts]) -> None:
        """Measure the critic's explained variance: 1 - Var(target - value) / Var(target)."""
        value = torch.cat([each.value_U for each in facts if each.value_U is not None]).double()
        target = torch.cat([each.target_U for each in facts if each.target_U is not None]).double()
        spread = float(target.var(unbiased=False))
        self.value_explained = 1.0 - float((target - value).var(unbiased=False)) / spread if spread else 0.0

    def of_step(self, batch: TrainBatch, learning_rate: float) -> dict[str, float]:
        """Return all metrics of the step.

        Raises: TrainingRefused if a metric is not finite, or if a gradient and a learning rate above 0 did not change the weights.
        """
        of_batch = reward_metrics(batch) | token_metrics(batch) | repetition_metrics(batch)
        metrics = of_batch | self._own() | {"learning_rate": learning_rate}
        if wrong := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
            raise TrainingRefused(f"step {batch.step} has metrics that are not finite: {', '.join(wrong)}")
        if learning_rate > 0 and self.grad_norm > 0 and not self.change.moved:
            raise TrainingRefused(f"step {batch.step} did not change the weights; raise optimizer.learning_rate")
        return metrics

    def _own(self) -> dict[str, float]:
        mismatch = torch.cat(self._mismatches) if self._mismatches else torch.zeros(0)
        critic = (
            {} if self.value_loss is None else {"value_loss": self.value_loss, "value_explained": self.value_explained}
        )
        return critic | {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "clip_share": self.clipped / self.priced if self.priced else 0.0,
            "weights_change": self.change.relative,
            "tokens_computed": float(self.computed),
            "tokens_trained": float(self.tokens),
            "tokens_off_policy": float(self.off_policy),
            "entropy": _mean(self._entropies),
            "kl_to_start": _mean(self.kls),
            "logprob_mismatch_mean": float(mismatch.mean()) if len(mismatch) else 0.0,
            "logprob_mismatch_max": float(mismatch.max()) if len(mismatch) else 0.0,
        }


def kl_sample(items: Sequence[Item], tokens: Callable[[Item], int], spec: RunSpec, step: int) -> list[Item]:
    """Return neighbouring items with at least KL_SAMPLE tokens (or all), from a start that is random at each step.

    Neighbours are cheap, because they share prompts.
    """
    first = random.Random(derived_seed(spec.seed, "kl", step)).randrange(len(items) or 1)
    chosen: list[Item] = []
    count = 0
    for item in [*items[first:], *items[:first]]:
        chosen.append(item)
        count += tokens(item)
        if count >= KL_SAMPLE:
            break
    return chosen


def _mean(parts: Sequence[Tensor]) -> float:
    values = torch.cat(list(parts)) if parts else torch.zeros(0)
    return float(values.double().mean()) if len(values) else 0.0
