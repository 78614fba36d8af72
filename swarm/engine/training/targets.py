"""Which layers adapters are put on, and may be. Reads headers, never torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from foundation.nearest import nearest
from swarm.engine.memory.model import stored_shapes
from swarm.engine.seam import EngineError
from swarm.protocol.runspec import LoraSpec

_WEIGHT = ".weight"


def layer_shapes(model_dir: Path) -> dict[str, tuple[int, int]]:
    """[out, in] of each linear layer in the body of a model, by the name that its files have for it. Raises: EngineError."""
    found: dict[str, tuple[int, int]] = {}
    for name, shape in stored_shapes(model_dir).items():
        in_body = any(part.isdecimal() for part in name.split("."))
        if in_body and name.endswith(_WEIGHT) and len(shape) == 2:
            found[name.removesuffix(_WEIGHT)] = (shape[0], shape[1])
    return found


def linear_layers(model_dir: Path) -> frozenset[str]:
    """What these layers are called within their part of the model. Raises: EngineError."""
    return frozenset(name.rpartition(".")[2] for name in layer_shapes(model_dir))


def adapters_shape(parameters: str | LoraSpec | None) -> tuple[int, frozenset[str]] | None:
    """Rank and targets of the adapters, which name and shape what is trained and what a checkpoint holds; None: all weights."""
    return (parameters.rank, frozenset(parameters.targets)) if isinstance(parameters, LoraSpec) else None


def require_layers(targets: Collection[str], known: Collection[str]) -> None:
    """Raises: EngineError when a target is not among the known linear layers."""
    for target in targets:
        if target not in known:
            guess = nearest(target, known)
            hint = f"did you mean {guess!r}?" if guess else f"there are {', '.join(sorted(known))}"
            raise EngineError(f"parameters.targets: the model has no linear layer {target!r} ({hint})")
