"""Computation of layers: RMS norms in fewer passes over memory, activation checkpointing, loading weights one layer at a time.

Tensor suffixes: T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from swarm.engine.seam import EngineError

_PROBE_ROWS = 4


def hasten(model: PreTrainedModel) -> None:
    """Replace the norms of a float32 model with a faster version if they turn out to be plain RMS norms.

    Under autocast, a layer's normalised output is cast to the compute dtype once, not for each matrix that reads it; the output
    of the final norm stays float32.
    """
    layers = [part for part in model.base_model.children() if isinstance(part, nn.ModuleList)]
    inside = {module for layer in layers for module in layer.modules()}
    for module in model.base_model.modules():
        if not type(module).__name__.endswith("Norm"):
            continue
        if (epsilon := _plain(module)) is not None:
            module.forward = partial(_normalised, module, epsilon, module in inside)
        elif module in inside:
            module.register_forward_hook(_narrowed)


def _plain(module: nn.Module) -> float | None:
    """Return the epsilon of a plain RMS norm: each row divided by the root of its mean square, times a weight. None for other
    modules."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not isinstance(epsilon, float):
        return None
    generator = torch.Generator().manual_seed(0)
    rows_TD = torch.randn(_PROBE_ROWS, weight.shape[0], generator=generator).to(weight.device)
    with torch.no_grad():
        try:
            expected = module(rows_TD)
        except (RuntimeError, TypeError, ValueError):
            return None  # it needs more arguments than its rows
        ours: Tensor = _Normalised.apply(rows_TD, weight, epsilon, torch.float32)  # type: ignore[no-untyped-call]
    return epsilon if isinstance(expected, Tensor) and torch.allclose(expected, ours) else None


def _normalised(module: nn.Module, epsilon: float, narrow: bool, rows: Tensor) -> Tensor:
    device = rows.device.type
    dtype = torch.get_autocast_dtype(device) if narrow and torch.is_autocast_enabled(device) else torch.float32
    made: Tensor = _Normalised.apply(rows, module.weight, epsilon, dtype)  # type: ignore[no-untyped-call]
    return made


def _narrowed(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    device = output.device.type
    return output.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else output


class _Normalised(torch.autograd.Function):
    """x / sqrt(mean(x²) + epsilon) · weight, computed in float32 and returned in `dtype`. x: [..., D].

    With r = 1 / sqrt(mean(x²) + epsilon) and g the gradient of the result, the gradient of x is r·(g·w − x·r²·mean(g·w·x)), and that
    of w is the sum of r·g·x over the rows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight_D: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        wide = rows.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rate = norm.square_().div_(wide.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(rows, weight_D, rate)
        made: Tensor = (wide * rate).mul_(weight_D).to(dtype)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        rows, weight_D, rate = ctx.saved_tensors
        wide, width = rows.float(), rows.shape[-1]
        slope = grad.float()
        both_TD = (slope * wide).reshape(-1, width)
        with torch.autocast(rows.device.type, enabled=False):
            mean = (both_TD @ weight_D).reshape(rate.shape).div_(width)
            by_weight_D = rate.reshape(-1) @ both_TD if ctx.needs_input_grad[1] else None
        by_rows = (slope * weight_D).mul_(rate).addcmul_(wide, mean.mul_(rate**3), value=-1)
        return by_rows.to(rows.dtype), by_weight_D, None, None


class _Bare(nn.Module):
    """A layer with its original forward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return type(self.layer).forward(self.layer, *inputs, **named)


@contextmanager
def recomputed_layers(body: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the block, the body's layers recompute their activations for the backward pass instead of keeping them.
    `weights` are substitutes for its parameters, by name.

    Raises: EngineError when the model does not list its layers.
    """
    with _computed_by(body, _recomputed, weights) as layers:
        if not layers:
            raise EngineError("activation_checkpointing: cannot recompute this model's layers; leave it out")
        yield


@contextmanager
def layer_by_layer(
    body: nn.Module, weights: Mapping[str, Tensor], ready: Callable[[Tensor], Tensor], *, required: bool
) -> Iterator[dict[str, Tensor]]:
    """Within the block, these weights replace each layer's parameters: loaded just before the layer runs, dropped after it.

    Yields the loaded weights that belong to no layer. `required` is True if memory does not suffice for all weights together.
    Raises: EngineError if required and the model does not list its layers.
    """

    def forward(bare: _Bare, own: dict[str, Tensor], *inputs: Any, **named: Any) -> Any:
        return functional_call(bare, {name: ready(weight) for name, weight in own.items()}, inputs, named)

    with _computed_by(body, forward, weights) as layers:
        if required and not layers:
            raise EngineError(
                "offload: cannot load this model's initial weights layer by layer; serve with --no-offload"
            )
        within = tuple(f"{name}." for name in layers)
        yield {name: ready(weight) for name, weight in weights.items() if not name.startswith(within)}


@contextmanager
def _computed_by(
    body: nn.Module, forward: Callable[..., Any], weights: Mapping[str, Tensor]
) -> Iterator[dict[str, nn.Module]]:
    """Within the block, `forward` computes the body's layers from the bare layer and its weights. Yields the layers by name."""
    layers: dict[str, nn.Module] = {
        name: one for name, one in body.named_modules() if isinstance(one, GradientCheckpointingLayer)
    }
    for name, layer in layers.items():
        prefix = f"{name}."
        own = {f"layer.{key.removeprefix(prefix)}": one for key, one in weights.items() if key.startswith(prefix)}
        layer.forward = partial(forward, _Bare(layer), own)
    try:
        yield layers
    finally:
        for layer in layers.values():
            del layer.forward


def _recomputed(bare: _Bare, weights: dict[str, Tensor], *inputs: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return functional_call(bare, weights, inputs, named)
    call = partial(functional_call, bare, weights)
    return checkpoint(lambda *given: call(given, named), *inputs, use_reentrant=False, preserve_rng_state=False)
