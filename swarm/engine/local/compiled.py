"""A model's layers compiled, for GPUs: what stands between two matrix products is one kernel instead of ten, and Python is not in its way.

One layer is compiled for all layers of its kind, and for all sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def compile_layers(model: PreTrainedModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Where the model says what its layers are; else it is computed as it stands."""
    torch._dynamo.config.specialize_float = True  # a layer's epsilon and the scale of its scores never change
    kinds: dict[type, Callable[..., Any]] = {}
    for layer in model.base_model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            kind = type(layer)
            if kind not in kinds:
                kinds[kind] = torch.compile(kind.forward, dynamic=True, backend=backend)
            layer.forward = MethodType(kinds[kind], layer)
