"""Checkpoints that verl's ranks wrote in parts, read as if one process had written them.

Needs only torch: no verl, no group of ranks, no GPU. Weights and moments are float32, under the model's names without the prefix
of its adapters.
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
"""Prefix that peft puts before the names of an adapted model."""


class Parts:
    """A verified checkpoint, assembled one tensor at a time; files are read only as far as needed.

    `names` has the names of the trained weights. Raises: EngineError for parts that do not make up a model, OSError.
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
        """Return the weight's moments by kind; empty before the first step."""
        if name not in self._index:
            return {}
        states = [optimizer["state"][self._index[name]] for optimizer in self._optimizers]
        return {kind: _whole([state[kind] for state in states]) for kind in states[0]}


def _loaded(file: Path) -> dict[str, Any]:
    """Load a file, taking only tensors and plain values from it."""
    level = _OF_MESHES.level
    _OF_MESHES.setLevel(logging.ERROR)  # it warns that process groups are created later, but here there are none
    try:
        found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    finally:
        _OF_MESHES.setLevel(level)
    return found


def _own_names(model: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters, each once: of tied parameters only the first, as the optimizer counts them."""
    seen: set[int] = set()
    names = []
    for name, weight in model.items():
        if isinstance(weight, DTensor) and (place := _part(weight).data_ptr()) not in seen:
            seen.add(place)
            names.append(name)
    return names


def _indices(names: Sequence[str], optimizer: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """Return the optimizer's index for each weight. The optimizer also counts frozen weights, which the ranks do not write."""
    # verl's offloading creates empty states.
    kept = sorted(index for index, state in optimizer["state"].items() if state)
    if len(names) == sum(len(group["params"]) for group in optimizer["param_groups"]):
        return {name: index for index, name in enumerate(names) if index in kept}
    if kept and len(kept) != len(names):
        raise EngineError(
            f"the optimizer's parts in {folder} cover {len(kept)} weights, but the model's cover {len(names)}"
        )
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
        raise EngineError(f"the parts of a weight add up to the shape {tuple(whole.shape)}, not {tuple(first.shape)}")
    return whole


def _part(weight: Tensor) -> Tensor:
    """Return the part of the weight that one rank holds."""
    part: Tensor = getattr(weight, "_local_tensor", weight)
    return part
