"""The optimisers, a part of the weights at a time: clip, step, measure the change.

On the CPU a part is one weight, which is in the cache meanwhile; on a GPU it is many, which one kernel takes together.
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

    resting: their moments lie in the machine's memory. host: where, once they were there.
    """

    weights: dict[str, nn.Parameter]
    optimizer: AdamW | Adafactor
    resting: bool = False
    host: dict[str, Tensor] = field(default_factory=dict)

    @property
    def grads(self) -> list[Tensor]:
        grads = [weight.grad for weight in self.weights.values() if weight.grad is not None]
        if len(grads) < len(self.weights):
            raise ValueError("gradients are made by `begin`")
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
        """Move the moments to the machine's memory."""
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
        """Move them to the device."""
        if self.resting:
            self.take({path: _brought(value, self._device) for path, value in self.host.items()})
            self.resting = False

    def pieces(self) -> Iterator[_Part]:
        """The same while it rests: a weight that is larger than what is stepped together, by rows."""
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
    """Moments live as long as the run does; `take` and `forget` begin anew, and so does a step of another optimiser.

    offload: they lie in the machine's memory, but for the part that is stepped.
    Gradients are kept and zeroed instead of freed: giving half a gigabyte back at each step costs more than a step.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], *, offload: bool = False) -> None:
        self._weights: dict[str, nn.Parameter] = {}
        self._parts: list[_Part] = []
        self._name: OptimizerName = "adamw"
        self._offload = offload
        self.take(weights)

    def take(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Optimise these from here on."""
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
        """Zero the gradients, for a step of the optimiser of this name.

        What outlives the step is made before anything of the step: made in between, it would lie where the activations of the
        next step could have gone, and the first steps would each take fresh memory.
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
            else:  # they rest after `rest` and `restore`
                part.wake()

    def rest(self) -> None:
        """Until `begin`, hold no memory of the device: moments move to the machine's, gradients are given up."""
        for part in self._parts:
            for weight in part.weights.values():
                weight.grad = None
            part.rest()

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
            for piece in part.pieces() if self._offload else (part,):
                piece.wake()
                before, moved = _stepped(piece)
                before_W += before
                moved_W += moved
                if self._offload:
                    piece.rest()
        return norm, WeightsChange(moved=_squared(moved_W), before=_squared(before_W))

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts as `name/exp_avg`, …; empty before the first step."""
        return {path: value for part in self._parts for path, value in part.moments.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The moments stay in the machine's memory until `begin`. They themselves say whose they are: a spec may name an optimiser
        that has not made a step yet.

        Raises: KeyError when a weight's moments are missing, unless there are none at all.
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
    """The value on the device; on the CPU it is there."""
    return value.to(device)


def _stepped(part: _Part) -> tuple[list[Tensor], list[Tensor]]:
    """Step the part. Returns the norm of each of its weights before, and of what it moved by."""
    before = [weight.detach().clone() for weight in part.weights.values()]
    before_W = [*torch._foreach_norm(before)]
    part.optimizer.step()
    for weight in part.weights.values():
        increment_version(weight)  # fused steps do not, and copies in another type must hear of it
    torch._foreach_sub_(before, list[Tensor](part.weights.values()))
    return before_W, [*torch._foreach_norm(before)]


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
