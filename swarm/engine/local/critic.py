"""The critic: what reward is to be expected from here, read off the policy's own last hidden states by one linear map.

Suffixes of tensors: H heads, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import AdamW

_PREFIX = "critic/"
_STATE = ("step", "exp_avg", "exp_avg_sq")


class Critic:
    """V = w h / |h| + b, from zero. Its weights and moments belong to the run's checkpoint (docs/decisions/0011)."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._weights = {"weight": torch.zeros(width, device=device), "bias": torch.zeros(1, device=device)}
        for weight in self._weights.values():
            weight.requires_grad_()
        self._optimizer = AdamW(self._weights.values())
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        with torch.no_grad():
            for weight in self._weights.values():
                weight.zero_()
        self._optimizer = AdamW(self._weights.values(), weight_decay=0.0, fused=False, foreach=False)

    def values(self, hidden_HD: Tensor) -> Tensor:
        """[H], in float32, with gradients to the hidden states and the critic's weights."""
        unit_HD = torch.nn.functional.normalize(hidden_HD.float(), dim=-1)
        return unit_HD @ self._weights["weight"] + self._weights["bias"]

    def begin(self) -> None:
        self._optimizer.zero_grad()

    def step(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Weights and moments as `critic/weight`, `critic/weight/exp_avg`, …; empty before the first step."""
        found: dict[str, Tensor] = {}
        for name, weight in self._weights.items():
            if moments := self._optimizer.state.get(weight):
                found[f"{_PREFIX}{name}"] = weight.detach()
                found |= {f"{_PREFIX}{name}/{key}": moments[key] for key in _STATE}
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave; other entries are passed over."""
        self.forget()
        with torch.no_grad():
            for name, weight in self._weights.items():
                if (saved := state.get(f"{_PREFIX}{name}")) is not None:
                    weight.copy_(saved)
                    self._optimizer.state[weight] = {
                        key: state[f"{_PREFIX}{name}/{key}"].to("cpu" if key == "step" else weight.device, copy=True)
                        for key in _STATE
                    }


def without_critic(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if not name.startswith(_PREFIX)}
