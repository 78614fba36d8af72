"""The optimisers, a part of the weights at a time: clip, step, measure the change.

On the CPU a part is one weight, which is in the cache meanwhile; on a GPU it is many, which one kernel takes together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Adafactor, AdamW

from swarm.engine.memory.training import OPTIMIZED_TOGETHER
from swarm.engine.seam import TrainingRefused
from swarm.engine.training.metrics import WeightsChange
from swarm.protocol.runspec import OptimizerSpec

OptimizerName = Literal["adamw", "adafactor"]


@dataclass(frozen=True, slots=True)
class _Part:
    """Weights that are stepped together."""

    names: list[str]
    weights: list[nn.Parameter]
    optimizer: AdamW | Adafactor

    @property
    def grads(self) -> list[Tensor]:
        grads = [weight.grad for weight in self.weights if weight.grad is not None]
        if len(grads) < len(self.weights):
            raise ValueError("gradients are made by `begin`")
        return grads


class Optimizer:
    """Moments live as long as the run does; `take` and `forget` begin anew, and so does a step of another optimiser.

    Gradients are kept and zeroed instead of freed: giving half a gigabyte back at each step costs more than a step.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self._weights: dict[str, nn.Parameter] = {}
        self._parts: list[_Part] = []
        self._name: OptimizerName = "adamw"
        self.take(weights)

    def take(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Optimise these from here on."""
        self._weights = dict(weights)
        self.forget()

    def forget(self) -> None:
        self._parts = []
        for names in _together(self._weights):
            weights = [self._weights[name] for name in names]
            optimizer = AdamW(weights, fused=True) if self._name == "adamw" else Adafactor(weights, foreach=False)
            self._parts.append(_Part(names, weights, optimizer))

    def begin(self, name: OptimizerName) -> None:
        """Zero the gradients, for a step of the optimiser of this name.

        What outlives the step is made before anything of the step: made in between, it would lie where the activations of the
        next step could have gone, and the first steps would each take fresh memory.
        """
        if name != self._name:
            self._name = name
            self.forget()
        for _, weight, state in self._states():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            else:
                weight.grad.zero_()
            for key, value in state.items():  # in the machine's memory after `rest` and `restore`
                state[key] = value.to(weight.device)
            if self._name == "adamw" and not state:
                state["step"] = torch.zeros((), device=weight.device)
                state["exp_avg"] = torch.zeros_like(weight)
                state["exp_avg_sq"] = torch.zeros_like(weight)

    def rest(self) -> None:
        """Until `begin`, hold no memory of the device: moments move to the machine's, gradients are given up."""
        for _, weight, state in self._states():
            weight.grad = None
            for key, value in state.items():
                state[key] = value.cpu()

    def grad_norm(self) -> float:
        """Over all weights, before clipping."""
        return math.sqrt(_squared([norm for part in self._parts for norm in torch._foreach_norm(part.grads)]))

    @torch.no_grad()
    def step(self, spec: OptimizerSpec, learning_rate: float) -> tuple[float, WeightsChange]:
        """One update, after `begin`. Returns the gradient norm before clipping, and by how much the weights changed.

        Raises: TrainingRefused, with no weight touched, when the gradient is not finite.
        """
        norm = self.grad_norm()
        if not math.isfinite(norm):
            raise TrainingRefused(f"the gradient norm is {norm}; lower optimizer.learning_rate or look at the rewards")
        shrink = min(1.0, spec.max_grad_norm / (norm + 1e-6))
        before_W: list[Tensor] = []
        moved_W: list[Tensor] = []
        for part in self._parts:
            part.optimizer.param_groups[0]["lr"] = learning_rate
            part.optimizer.param_groups[0]["weight_decay"] = spec.weight_decay
            if shrink < 1.0:
                torch._foreach_mul_(part.grads, shrink)
            before = [weight.detach().clone() for weight in part.weights]
            before_W += torch._foreach_norm(before)
            part.optimizer.step()
            for weight in part.weights:
                increment_version(weight)  # fused steps do not, and copies in another type must hear of it
            torch._foreach_sub_(before, list[Tensor](part.weights))
            moved_W += torch._foreach_norm(before)
        return norm, WeightsChange(moved=_squared(moved_W), before=_squared(before_W))

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts as `name/exp_avg`, …; empty before the first step."""
        return {f"{name}/{key}": value for name, _, state in self._states() for key, value in state.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The moments stay in the machine's memory until `begin`. They themselves say whose they are: a spec may name an optimiser
        that has not made a step yet.

        Raises: KeyError when a weight's moments are missing, unless there are none at all.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for path, value in state.items():
            name, _, key = path.rpartition("/")
            found.setdefault(name, {})[key] = value.to("cpu", copy=True)
        if found:
            self._name = "adamw" if all("exp_avg" in moments for moments in found.values()) else "adafactor"
        self.forget()
        if found:
            for name, _, state in self._states():
                state.update(found[name])

    def _states(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Tensor]]]:
        """Each weight with its name and its moments, which may be changed in place."""
        for part in self._parts:
            for name, weight in zip(part.names, part.weights, strict=True):
                yield name, weight, part.optimizer.state[weight]


def _together(weights: Mapping[str, nn.Parameter]) -> Iterator[list[str]]:
    """Names of the weights of each part."""
    names: list[str] = []
    numbers = 0
    for name, weight in weights.items():
        if names and (weight.device.type == "cpu" or numbers + weight.numel() > OPTIMIZED_TOGETHER):
            yield names
            names, numbers = [], 0
        names.append(name)
        numbers += weight.numel()
    if names:
        yield names


def _squared(norms_W: list[Tensor]) -> float:
    """The sum of their squares. A GPU is waited for once, not at each weight."""
    return float(torch.stack(norms_W).double().square().sum())
