"""Which layers adapters can be put on. Reads only the headers of weight files, and never imports torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from foundation.nearest import nearest
from swarm.engine.memory.model import stored_shapes
from swarm.engine.seam import EngineError
from swarm.protocol.runspec import LoraSpec

_WEIGHT = ".weight"


def layer_shapes(model_dir: Path) -> dict[str, tuple[int, int]]:
    """Return [out, in] of each linear layer in the body of a model, by its name in the model's files. Raises: EngineError."""
    found: dict[str, tuple[int, int]] = {}
    for name, shape in stored_shapes(model_dir).items():
        in_body = any(part.isdecimal() for part in name.split("."))
        if in_body and name.endswith(_WEIGHT) and len(shape) == 2:
            found[name.removesuffix(_WEIGHT)] = (shape[0], shape[1])
    return found


def linear_layers(model_dir: Path) -> frozenset[str]:
    """Return the distinct names of the linear layers without their paths, such as `q_proj`. Raises: EngineError."""
    return frozenset(name.rpartition(".")[2] for name in layer_shapes(model_dir))


def adapters_shape(parameters: str | LoraSpec | None) -> tuple[int, frozenset[str]] | None:
    """Return the adapters' rank and targets, which determine the names and shapes of trained weights. None: all weights are trained."""
    return (parameters.rank, frozenset(parameters.targets)) if isinstance(parameters, LoraSpec) else None


def require_layers(targets: Collection[str], known: Collection[str]) -> None:
    """Check that every target is a known linear layer. Raises: EngineError."""
    for target in targets:
        if target not in known:
            guess = nearest(target, known)
            hint = f"did you mean {guess!r}?" if guess else f"it has {', '.join(sorted(known))}"
            raise EngineError(f"parameters.targets: the model has no linear layer {target!r} ({hint})")
