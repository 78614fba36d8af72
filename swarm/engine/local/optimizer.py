"""The optimizers: clip, step and measure the change, one part of the weights at a time.

On the CPU a part is one weight, so that it stays in the cache; on a GPU it is many weights, which one kernel steps together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Adafactor, AdamW

from swarm.engine.local.pinned import pinned_copies
from swarm.engine.memory.training import OPTIMIZED_TOGETHER
from swarm.engine.seam import TrainingRefused
from swarm.engine.training.metrics import WeightsChange
from swarm.protocol.runspec import OptimizerSpec

OptimizerName = Literal["adamw", "adafactor"]


@dataclass(slots=True)
class _Part:
    """Weights that are stepped together.

    resting: whether their moments are in host memory.
    host: the host buffers, once allocated.
    """

    weights: dict[str, nn.Parameter]
    optimizer: AdamW | Adafactor
    resting: bool = False
    host: dict[str, Tensor] = field(default_factory=dict)

    @property
    def grads(self) -> list[Tensor]:
        grads = [weight.grad for weight in self.weights.values() if weight.grad is not None]
        if len(grads) < len(self.weights):
            raise ValueError("call `begin` before computing gradients")
        return grads

    @property
    def moments(self) -> dict[str, Tensor]:
        """Moments and step counts as `name/exp_avg`, …; empty before the first step."""
        states = self.optimizer.state
        return {
            f"{name}/{kind}": value for name, weight in self.weights.items() for kind, value in states[weight].items()
        }

    def take(self, moments: Mapping[str, Tensor]) -> None:
        for path, value in moments.items():
            name, _, kind = path.rpartition("/")
            self.optimizer.state[self.weights[name]][kind] = value

    def rest(self) -> None:
        """Move the moments to host memory."""
        if self.resting:
            return
        moments = self.moments
        if self.host.keys() != moments.keys():
            self.host = pinned_copies(moments, self._device)
        else:
            for path, value in moments.items():
                self.host[path].copy_(value)
        self.take(self.host)
        self.resting = True

    def wake(self) -> None:
        """Move the moments to the device."""
        if self.resting:
            self.take({path: _brought(value, self._device) for path, value in self.host.items()})
            self.resting = False

    def pieces(self) -> Iterator[_Part]:
        """Yield the parts to step one after another while moments are in host memory. With AdamW, a weight larger than
        `OPTIMIZED_TOGETHER` is split by rows."""
        (path, weight), *others = self.weights.items()
        if others or weight.numel() <= OPTIMIZED_TOGETHER or not isinstance(self.optimizer, AdamW):
            yield self
            return
        step, count = f"{path}/step", max(1, OPTIMIZED_TOGETHER // weight[0].numel())
        steps = self.host[step].clone()
        for first in range(0, len(weight), count):
            rows = slice(first, first + count)
            own = nn.Parameter(weight.detach()[rows])
            own.grad = None if weight.grad is None else weight.grad[rows]
            optimizer = AdamW([own], fused=True)
            optimizer.param_groups[0] |= {**self.optimizer.param_groups[0], "params": [own]}
            host = {kind: value[rows] for kind, value in self.host.items() if kind != step} | {step: steps.clone()}
            piece = _Part({path: own}, optimizer, resting=True, host=host)
            piece.take(host)
            yield piece
        self.host[step].copy_(piece.host[step])
        increment_version(weight)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.weights.values())).device


class Optimizer:
    """AdamW or Adafactor. Moments last for the whole run; `take`, `forget` and a step of the other optimizer reset them.

    `offload` keeps moments in host memory, except those of the part being stepped. Gradients are zeroed instead of freed: freeing half
    a gigabyte at each step would cost more than the step.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], *, offload: bool = False) -> None:
        self._weights: dict[str, nn.Parameter] = {}
        self._parts: list[_Part] = []
        self._name: OptimizerName = "adamw"
        self._offload = offload
        self.take(weights)

    def take(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Optimize these weights from now on, without earlier moments."""
        self._weights = dict(weights)
        self.forget()

    def forget(self) -> None:
        self._parts = []
        for names in _together(self._weights):
            weights = {name: self._weights[name] for name in names}
            made = [*weights.values()]
            optimizer = AdamW(made, fused=True) if self._name == "adamw" else Adafactor(made, foreach=False)
            self._parts.append(_Part(weights, optimizer))

    def begin(self, name: OptimizerName) -> None:
        """Zero the gradients before a step of the optimizer called `name`, and switch to it if necessary.

        Allocates long-lived tensors before those of the step: otherwise they would fragment the memory for the next step's
        activations, and each of the first steps would need fresh memory.
        """
        if name != self._name:
            self._name = name
            self.forget()
        for part in self._parts:
            for weight in part.weights.values():
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                else:
                    weight.grad.zero_()
            if self._name == "adamw" and not part.moments:
                for weight in part.weights.values():
                    state, device = part.optimizer.state[weight], "cpu" if self._offload else weight.device
                    state["step"] = torch.zeros((), device=device)
                    state["exp_avg"] = torch.zeros_like(weight, device=device)
                    state["exp_avg_sq"] = torch.zeros_like(weight, device=device)
            if self._offload:
                part.rest()
            else:  # moments are in host memory after `rest` and `restore`
                part.wake()

    def rest(self) -> None:
        """Use no device memory until `begin`: move moments to host memory and free gradients."""
        for part in self._parts:
            for weight in part.weights.values():
                weight.grad = None
            part.rest()

    def grad_norm(self) -> float:
        """Return the gradient norm over all weights, before clipping."""
        return math.sqrt(_squared([norm for part in self._parts for norm in torch._foreach_norm(part.grads)]))

    @torch.no_grad()
    def step(self, spec: OptimizerSpec, learning_rate: float) -> tuple[float, WeightsChange]:
        """Make one update, after `begin`. Returns the gradient norm before clipping, and how much the weights changed.

        Raises: TrainingRefused, before touching any weight, if the gradient is not finite.
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
            for piece in part.pieces() if self._offload else (part,):
                piece.wake()
                before, moved = _stepped(piece)
                before_W += before
                moved_W += moved
                if self._offload:
                    piece.rest()
        return norm, WeightsChange(moved=_squared(moved_W), before=_squared(before_W))

    def state(self) -> dict[str, Tensor]:
        """Return moments and step counts as `name/exp_avg`, …; empty before the first step."""
        return {path: value for part in self._parts for path, value in part.moments.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore moments; they stay in host memory until `begin`.

        The names of moments tell which optimizer made them; the spec may already name the other one.
        Raises: KeyError if a weight's moments are missing, unless there are no moments at all.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for path, value in state.items():
            found.setdefault(path.rpartition("/")[0], {})[path] = value
        if found:
            self._name = (
                "adamw" if all(f"{name}/exp_avg" in moments for name, moments in found.items()) else "adafactor"
            )
        self.forget()
        if found:
            for part in self._parts:
                part.take({path: value for name in part.weights for path, value in found[name].items()})
                part.rest()


def _brought(value: Tensor, device: torch.device) -> Tensor:
    """Copy the value to the device, if it is not there already."""
    return value.to(device)


def _stepped(part: _Part) -> tuple[list[Tensor], list[Tensor]]:
    """Step the part. Returns, for each weight, its norm before the step and the norm of its change."""
    before = [weight.detach().clone() for weight in part.weights.values()]
    before_W = [*torch._foreach_norm(before)]
    part.optimizer.step()
    for weight in part.weights.values():
        increment_version(weight)  # fused steps do not increment it, and casts of the weight rely on it
    torch._foreach_sub_(before, list[Tensor](part.weights.values()))
    return before_W, [*torch._foreach_norm(before)]


def _together(weights: Mapping[str, nn.Parameter]) -> Iterator[list[str]]:
    """Yield the names of each part's weights."""
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
    """Return the sum of the squared norms, with one GPU synchronisation instead of one per weight."""
    return float(torch.stack(norms_W).double().square().sum())
