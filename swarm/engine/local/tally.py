"""What is seen while a step goes on, and the metrics that come of it (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarm.engine.local.optimizer import WeightsChange


@dataclass(slots=True)
class Tally:
    """Tokens are looked at when they are met first, before the step has moved the weights."""

    loss: float = 0.0
    grad_norm: float = 0.0
    tokens: int = 0
    computed: int = 0
    priced: int = 0
    clipped: int = 0
    change: WeightsChange = field(default_factory=WeightsChange)
    kls: list[Tensor] = field(default_factory=list)
    _entropies: list[Tensor] = field(default_factory=list)
    _mismatches: list[Tensor] = field(default_factory=list)

    def look(self, logp_U: Tensor, entropy_U: Tensor, recorded_U: Tensor) -> None:
        """Some tokens, met first."""
        self._entropies.append(entropy_U)
        self._mismatches.append((logp_U - recorded_U).abs())

    def metrics(self) -> dict[str, float]:
        mismatch = torch.cat(self._mismatches) if self._mismatches else torch.zeros(1)
        return {
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
