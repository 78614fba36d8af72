"""How much memory the children of an engine take, estimated from the model's files before anything is started.

Reads headers and configuration only, never torch. Rough on purpose: it refuses what cannot fit, and tells a person what to expect.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.machine import available_memory, total_memory
from swarm.engine.seam import EngineDown, EngineError
from swarm.protocol.runspec import ComputeType

GIB = 1 << 30
_WEIGHT_BYTES = 4
_STEP_BYTES = {"bfloat16": 4 + 8 + 2, "float32": 4 + 8}
"""Per parameter while it is trained, beside the weight in float32: gradient, AdamW's two moments, the copy in bfloat16."""
_MOMENTS_BYTES = 8
"""Per parameter, of AdamW."""
_START_BYTES = {"bfloat16": 0, "float32": 4}
"""Per parameter while the KL to the start is measured: the start weights as they are multiplied, where that is not a layer at a time."""
_LOGITS_BYTES = 3 * (64 << 20)
"""Logits are made a few at a time; three buffers of them at the peak."""
_ACTIVATIONS_SHARE = 6
_LEAST_ACTIVATIONS, _MOST_ACTIVATIONS, _MOST_ON_GPU = 2 * GIB, 16 * GIB, 32 * GIB
"""What the trainer keeps for its backward pass: so much of the machine's memory, within these bounds. Of all memory, not of
what is free, so that a step that is made again after a crash is cut into the same pieces and gives the same bits."""
_FEWEST_TOKENS, _MOST_TOKENS, _MOST_TOKENS_ON_GPU = 256, 8192, 32768
"""How many tokens that may be, whatever the model. A GPU is busy only with many at once."""
_WEIGHT_SLOTS = 2
"""Weights on their way to inference lie in memory twice: those served, and those being written."""
_HEADER_LIMIT = 100 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Bytes that training a model takes, beside its process. start: the first weights, kept to measure the KL to them.

    step: what the first step makes and the others keep.
    """

    start: int
    weights: int
    step: int
    activations: int
    exchange: int

    @property
    def standing(self) -> int:
        """What is there whatever a step is made of."""
        return self.start + self.weights + self.step + self.exchange

    @property
    def total(self) -> int:
        """At the peak of a step."""
        return self.standing + self.activations

    @property
    def fresh(self) -> int:
        """What a step as most of them are takes beyond what is there once the model is loaded: half of the activations at most."""
        return self.step + self.activations // 2


def trainer_memory(model_dir: Path, config: Mapping[str, Any], dtype: ComputeType) -> TrainerMemory:
    """dtype: what is multiplied in. Raises: EngineError for weights that are no safetensors."""
    stored, count = weight_bytes(model_dir), parameters(model_dir)
    return TrainerMemory(
        start=stored,
        weights=_WEIGHT_BYTES * count,
        step=_STEP_BYTES[dtype] * count,
        activations=activation_bytes(config, segment_tokens(config)) + _LOGITS_BYTES + _START_BYTES[dtype] * count,
        exchange=_WEIGHT_SLOTS * served_bytes(model_dir, dtype),
    )


def memory_beside_gpu(model_dir: Path, dtype: ComputeType, *, offload_optimizer: bool) -> TrainerMemory:
    """The same of the machine's memory where the model is trained on a GPU: what is loaded passes through it, what is exchanged
    lies in it. offload_optimizer: moments wait there between steps. Raises: EngineError.
    """
    return TrainerMemory(
        start=weight_bytes(model_dir),
        weights=0,
        step=_MOMENTS_BYTES * parameters(model_dir) if offload_optimizer else 0,
        activations=0,
        exchange=_WEIGHT_SLOTS * served_bytes(model_dir, dtype),
    )


def segment_tokens(config: Mapping[str, Any], total: int | None = None) -> int:
    """How many tokens of this model the trainer computes at once, unless one context alone has more (`swarm.engine.tree.cut`).

    config: the model's config.json, of its text. total: bytes of a GPU's memory; None: it computes in the machine's.
    """
    high, most = (_MOST_ACTIVATIONS, _MOST_TOKENS) if total is None else (_MOST_ON_GPU, _MOST_TOKENS_ON_GPU)
    total = total_memory() if total is None else total
    share = min(max((total or 0) // _ACTIVATIONS_SHARE, _LEAST_ACTIVATIONS), high)
    rounded = share // _token_bytes(config) // _FEWEST_TOKENS * _FEWEST_TOKENS
    return min(max(rounded, _FEWEST_TOKENS), most)


def activation_bytes(config: Mapping[str, Any], tokens: int) -> int:
    """What is kept of so many tokens, computed at once, for the backward pass."""
    return tokens * _token_bytes(config)


def weight_bytes(model_dir: Path) -> int:
    """Of the weights as they are stored."""
    return sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))


def served_bytes(model_dir: Path, dtype: ComputeType) -> int:
    """Of the weights as inference takes them: as they are stored, but whole where it multiplies in float32. Raises: EngineError."""
    stored = weight_bytes(model_dir)
    return max(stored, _WEIGHT_BYTES * parameters(model_dir)) if dtype == "float32" else stored


def parameters(model_dir: Path) -> int:
    """How many numbers the weights are. Raises: EngineError."""
    return sum(_parameters_in(file) for file in model_dir.glob("*.safetensors"))


def check(name: str, needed: int) -> None:
    """Raises: EngineDown when the machine has less memory left than is needed."""
    available = available_memory()
    if available is not None and needed > available:
        raise EngineDown(
            f"{name} needs about {needed / GIB:.1f} GiB of memory to boot, {available / GIB:.1f} GiB are free: "
            "end other programs, or choose a smaller model or max_model_len"
        )


def _parameters_in(file: Path) -> int:
    with file.open("rb") as stream:
        start = stream.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else _HEADER_LIMIT + 1
        if size > _HEADER_LIMIT:
            raise EngineError(f"{file} is no safetensors file")
        header = json.loads(stream.read(size))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _token_bytes(config: Mapping[str, Any]) -> int:
    """Activations of one token in all layers, as the trainer counts them."""
    hidden = int(config.get("hidden_size", 4096))
    inner = int(config.get("intermediate_size") or 4 * hidden)
    return int(config.get("num_hidden_layers", 32)) * (60 * hidden + 18 * inner)
