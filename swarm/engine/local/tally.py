"""What is seen while a step goes on, and the metrics that come of it (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarm.engine.algorithms.facts import TokenFacts, kl_to_start
from swarm.engine.local.optimizer import WeightsChange


@dataclass(slots=True)
class Tally:
    """Tokens are looked at before the step moves the weights."""

    loss: float = 0.0
    grad_norm: float = 0.0
    tokens: int = 0
    computed: int = 0
    priced: int = 0
    clipped: int = 0
    value_loss: float | None = None
    """None: there is no critic."""
    value_explained: float = 0.0
    change: WeightsChange = field(default_factory=WeightsChange)
    kls: list[Tensor] = field(default_factory=list)
    _entropies: list[Tensor] = field(default_factory=list)
    _mismatches: list[Tensor] = field(default_factory=list)

    def look(self, logp_U: Tensor, entropy_U: Tensor, recorded_U: Tensor) -> None:
        """Some tokens."""
        self._entropies.append(entropy_U)
        self._mismatches.append((logp_U - recorded_U).abs())

    def meet(self, logp_U: Tensor, entropy_U: Tensor, facts: TokenFacts) -> None:
        """Tokens that are trained, once."""
        self.tokens += len(logp_U)
        self.look(logp_U, entropy_U, facts.recorded_U)
        if facts.start_U is not None:
            self.kls.append(kl_to_start(logp_U, facts.start_U))

    def count(self, clipped_U: Tensor) -> None:
        """Tokens whenever they are priced."""
        self.priced += len(clipped_U)
        self.clipped += int(clipped_U.sum())

    def judge(self, facts: Sequence[TokenFacts]) -> None:
        """How well the critic foresaw its targets: 1 - Var(target - value) / Var(target)."""
        value = torch.cat([each.value_U for each in facts if each.value_U is not None]).double()
        target = torch.cat([each.target_U for each in facts if each.target_U is not None]).double()
        spread = float(target.var(unbiased=False))
        self.value_explained = 1.0 - float((target - value).var(unbiased=False)) / spread if spread else 0.0

    def metrics(self) -> dict[str, float]:
        mismatch = torch.cat(self._mismatches) if self._mismatches else torch.zeros(1)
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
            "entropy": _mean(self._entropies),
            "kl_to_start": _mean(self.kls),
            "logprob_mismatch_mean": float(mismatch.mean()),
            "logprob_mismatch_max": float(mismatch.max()),
        }


def _mean(parts: Sequence[Tensor]) -> float:
    values = torch.cat(list(parts)) if parts else torch.zeros(0)
    return float(values.double().mean()) if len(values) else 0.0
