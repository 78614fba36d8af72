"""Activation checkpointing: each layer keeps only its input, and is computed once more when its gradient is due.

The second pass comes after the model's forward pass is over, so each layer carries the weights that it was called with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from swarm.engine.seam import EngineError


class _Bare(nn.Module):
    """A layer without what was put in the place of its forward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return type(self.layer).forward(self.layer, *inputs, **named)


@contextmanager
def recomputed_layers(body: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the body's layers keep no activations. weights: what stands in for its parameters, by name.

    Raises: EngineError when the model does not say what its layers are.
    """
    layers = [(name, one) for name, one in body.named_modules() if isinstance(one, GradientCheckpointingLayer)]
    if not layers:
        raise EngineError("activation_checkpointing: this model's layers cannot be computed again; leave it out")
    for name, layer in layers:
        prefix = f"{name}."
        own = {f"layer.{key.removeprefix(prefix)}": one for key, one in weights.items() if key.startswith(prefix)}
        layer.forward = partial(_forward, _Bare(layer), own)
    try:
        yield
    finally:
        for _, layer in layers:
            del layer.forward


def _forward(bare: _Bare, weights: dict[str, Tensor], *inputs: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return functional_call(bare, weights, inputs, named)
    call = partial(functional_call, bare, weights)
    return checkpoint(lambda *given: call(given, named), *inputs, use_reentrant=False, preserve_rng_state=False)
