"""The optimisers, one weight at a time while it is in the cache: clip, step, measure the change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Adafactor, AdamW

from swarm.engine.seam import TrainingRefused
from swarm.protocol.runspec import OptimizerSpec

OptimizerName = Literal["adamw", "adafactor"]


@dataclass(slots=True)
class WeightsChange:
    """Squared norms, in double precision."""

    moved: float = 0.0
    before: float = 0.0

    def add(self, other: WeightsChange) -> None:
        self.moved += other.moved
        self.before = self.before or other.before

    @property
    def relative(self) -> float:
        return math.sqrt(self.moved / self.before) if self.before else 0.0


class Optimizer:
    """Moments live as long as the run does; `take` and `forget` begin anew, and so does a step of another optimiser.

    Gradients are kept and zeroed instead of freed: giving half a gigabyte back at each step costs more than a step.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self._weights: dict[str, nn.Parameter] = {}
        self._parts: dict[str, AdamW | Adafactor] = {}
        self._name: OptimizerName = "adamw"
        self.take(weights)

    def take(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Optimise these from here on."""
        self._weights = dict(weights)
        self.forget()

    def forget(self) -> None:
        self._parts = {
            name: AdamW([weight], fused=True) if self._name == "adamw" else Adafactor([weight], foreach=False)
            for name, weight in self._weights.items()
        }

    def begin(self, name: OptimizerName) -> None:
        """Zero the gradients, for a step of the optimiser of this name.

        What outlives the step is made before anything of the step: made in between, it would lie where the activations of the
        next step could have gone, and the first steps would each take fresh memory.
        """
        if name != self._name:
            self._name = name
            self.forget()
        for path, weight in self._weights.items():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            else:
                weight.grad.zero_()
            part = self._parts[path]
            state = part.state[weight]
            for key, value in state.items():  # in the machine's memory after `rest` and `restore`
                state[key] = value.to(weight.device)
            if isinstance(part, AdamW) and not state:
                state["step"] = torch.zeros((), device=weight.device)
                state["exp_avg"] = torch.zeros_like(weight)
                state["exp_avg_sq"] = torch.zeros_like(weight)

    def rest(self) -> None:
        """Until `begin`, hold no memory of the device: moments move to the machine's, gradients are given up."""
        for path, weight in self._weights.items():
            weight.grad = None
            state = self._parts[path].state[weight]
            for key, value in state.items():
                state[key] = value.cpu()

    def grad_norm(self) -> float:
        """Over all weights, before clipping."""
        return math.sqrt(_squared([torch.linalg.vector_norm(_grad(weight)) for weight in self._weights.values()]))

    @torch.no_grad()
    def step(self, spec: OptimizerSpec, learning_rate: float) -> tuple[float, WeightsChange]:
        """One update, after `begin`. Returns the gradient norm before clipping, and by how much the weights changed.

        Raises: TrainingRefused, with no weight touched, when the gradient is not finite.
        """
        norm = self.grad_norm()
        if not math.isfinite(norm):
            raise TrainingRefused(f"the gradient norm is {norm}; lower optimizer.learning_rate or look at the rewards")
        shrink = min(1.0, spec.max_grad_norm / (norm + 1e-6))
        before_W, moved_W = [], []
        for name, weight in self._weights.items():
            part = self._parts[name]
            part.param_groups[0]["lr"] = learning_rate
            part.param_groups[0]["weight_decay"] = spec.weight_decay
            if shrink < 1.0:
                _grad(weight).mul_(shrink)
            before = weight.detach().clone()
            before_W.append(torch.linalg.vector_norm(before))
            part.step()
            increment_version(weight)  # fused steps do not, and copies in another type must hear of it
            moved_W.append(torch.linalg.vector_norm(before.sub_(weight)))
        return norm, WeightsChange(moved=_squared(moved_W), before=_squared(before_W))

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts as `name/exp_avg`, …; empty before the first step."""
        return {
            f"{name}/{key}": value
            for name, part in self._parts.items()
            for key, value in part.state.get(self._weights[name], {}).items()
        }

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
        if not found:
            return
        for name, part in self._parts.items():
            part.state[self._weights[name]] = found[name]


def _squared(norms_W: Sequence[Tensor]) -> float:
    """The sum of their squares. A GPU is waited for once, not at each weight."""
    return float(torch.stack(list(norms_W)).double().square().sum())


def _grad(weight: nn.Parameter) -> Tensor:
    if weight.grad is None:
        raise ValueError("gradients are made by `begin`")
    return weight.grad
