"""Which layers adapters may be put on. Reads headers, never torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from foundation.nearest import nearest
from swarm.engine.machine import stored_shapes
from swarm.engine.seam import EngineError

_WEIGHT = "weight"


def linear_layers(model_dir: Path) -> set[str]:
    """Names of the linear layers in the body of a model, as its files name their weights. Raises: EngineError."""
    found: set[str] = set()
    for name, shape in stored_shapes(model_dir).items():
        *path, layer, kind = name.split(".")
        if kind == _WEIGHT and len(shape) == 2 and any(part.isdecimal() for part in path):
            found.add(layer)
    return found


def require_layers(targets: Collection[str], known: Collection[str]) -> None:
    """Raises: EngineError when a target is none of the linear layers that are known."""
    for target in targets:
        if target not in known:
            guess = nearest(target, known)
            hint = f"did you mean {guess!r}?" if guess else f"there are {', '.join(sorted(known))}"
            raise EngineError(f"parameters.targets: the model has no linear layer {target!r} ({hint})")
