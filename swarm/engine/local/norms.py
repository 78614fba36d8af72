"""Root-mean-square norms with a third of the passes over memory that autograd makes of their modules in transformers.

Suffixes of tensors: T tokens, D width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_PROBE_ROWS = 4


def hasten(model: PreTrainedModel) -> None:
    """Compute the norms of a float32 model here, those of them that prove to be plain root-mean-square norms.

    Under autocast, what a layer has normalised is brought to the compute type once, not by each matrix that reads it; what
    the last norm says of all layers stays float32.
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
    """The epsilon of a module that gives each row, over the root of its mean square, times a weight; else None."""
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
            return None  # it takes more than its rows
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
    """x / sqrt(mean(x²) + epsilon) · weight, in float32, given in dtype. x: [..., D].

    With r = 1 / sqrt(mean(x²) + epsilon) and g the gradient by the result: by x it is r·(g·w − x·r²·mean(g·w·x)), by w the sum
    of r·g·x over the rows.
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
