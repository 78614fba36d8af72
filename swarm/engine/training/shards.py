"""Checkpoints that verl's ranks wrote in parts, put together by one process: as if it had written them itself.

Needs torch alone: no verl, no group of ranks, no GPU. Weights and moments are float32, under the names of the model without its adapters'
wrapper.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from swarm.engine.seam import EngineError
from swarm.engine.training.checkpoints import rank_file

_OF_MESHES = logging.getLogger("torch.distributed.device_mesh")
WRAPPER = "base_model.model."
"""What peft puts before the names of an adapted model."""


class Parts:
    """A checkpoint that was found whole, put together a tensor at a time; files are read as far as they are asked for.

    names: of the trained weights. Raises: EngineError for parts that do not make up a model, OSError.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self._models, self._optimizers = (
            [_loaded(folder / rank_file(kind, ranks, rank)) for rank in range(ranks)] for kind in ("model", "optim")
        )
        own = _own_names(self._models[0])
        self._stored = {name.removeprefix(WRAPPER): name for name in own}
        self._index = _indices(list(self._stored), self._optimizers[0], folder)

    @property
    def names(self) -> list[str]:
        return list(self._stored)

    def weight(self, name: str) -> Tensor:
        return _whole([model[self._stored[name]] for model in self._models])

    def moments(self, name: str) -> dict[str, Tensor]:
        """By kind; none before the first step."""
        if name not in self._index:
            return {}
        states = [optimizer["state"][self._index[name]] for optimizer in self._optimizers]
        return {kind: _whole([state[kind] for state in states]) for kind in states[0]}


def _loaded(file: Path) -> dict[str, Any]:
    """Nothing but tensors and plain values is taken from a file."""
    level = _OF_MESHES.level
    _OF_MESHES.setLevel(logging.ERROR)  # it warns of groups of ranks that come later, and here there are none
    try:
        found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    finally:
        _OF_MESHES.setLevel(level)
    return found


def _own_names(model: Mapping[str, Any]) -> list[str]:
    """Names of the parameters, each once: of tied ones the first, as the optimiser counts them."""
    seen: set[int] = set()
    names = []
    for name, weight in model.items():
        if isinstance(weight, DTensor) and (place := _part(weight).data_ptr()) not in seen:
            seen.add(place)
            names.append(name)
    return names


def _indices(names: Sequence[str], optimizer: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """Under which numbers the optimiser keeps their moments: it counts frozen weights too, whose files the ranks do not write."""
    kept = sorted(index for index, state in optimizer["state"].items() if state)  # verl's offloading makes empty ones
    if len(names) == sum(len(group["params"]) for group in optimizer["param_groups"]):
        return {name: index for index, name in enumerate(names) if index in kept}
    if kept and len(kept) != len(names):
        raise EngineError(f"the optimiser's parts in {folder} are of {len(kept)} weights, the model's of {len(names)}")
    return dict(zip(names, kept, strict=False))


def _whole(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    (placement,) = first.placements
    if not isinstance(placement, Shard):
        return _part(first)
    whole = torch.cat([_part(part) for part in parts], placement.dim)
    if whole.shape != first.shape:
        raise EngineError(f"parts of a weight make up {tuple(whole.shape)} and not {tuple(first.shape)}")
    return whole


def _part(weight: Tensor) -> Tensor:
    """What one rank holds of it."""
    part: Tensor = getattr(weight, "_local_tensor", weight)
    return part
