"""Checkpoints of the local engine: weights and moments as safetensors in a folder of `training.checkpoints`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from swarm.engine.local.tensor_file import write_tensors
from swarm.engine.seam import EngineError
from swarm.engine.training import checkpoints
from swarm.engine.training.checkpoints import HASHES, MANIFEST, BrokenCheckpoint, TrainerState, folder_of

_WEIGHTS, _MOMENTS = "weights.safetensors", "optimizer.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(checkpoints.Checkpoint):
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


def write(directory: Path, checkpoint: Checkpoint, *, keep: int, best: int | None = None) -> None:
    """See `training.checkpoints.write`. Raises: OSError."""

    def fill(folder: Path) -> None:
        hashes = {
            name: write_tensors(folder / name, tensors, {key: tensor.dtype for key, tensor in tensors.items()})
            for name, tensors in ((_WEIGHTS, checkpoint.weights), (_MOMENTS, checkpoint.moments))
        }
        checkpoints.seal(folder, checkpoint.state, hashes)

    checkpoints.write(directory, checkpoint.state.step, fill, keep=keep, best=best)


def read(directory: Path, step: int) -> Checkpoint:
    """Raises: EngineError when there is none of this step, BrokenCheckpoint when it is not what was written."""
    return checkpoints.opened(directory, step, _load)


def fingerprint(directory: Path, step: int) -> str | None:
    """The SHA-256 of the weights of this step's checkpoint, as its manifest has it; None when there is no checkpoint.

    Raises: EngineError when ranks of the verl engine wrote it, BrokenCheckpoint when its manifest cannot be read.
    """
    folder = folder_of(directory, step)
    try:
        manifest = HASHES.validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"checkpoint {folder} cannot be read: {error}") from error
    _refuse_ranks(manifest, folder)
    return manifest[_WEIGHTS]


def _load(folder: Path, manifest: Mapping[str, str], state: TrainerState) -> Checkpoint:
    _refuse_ranks(manifest, folder)
    return Checkpoint(state=state, weights=load_file(folder / _WEIGHTS), moments=load_file(folder / _MOMENTS))


def _refuse_ranks(manifest: Mapping[str, str], folder: Path) -> None:
    if _WEIGHTS not in manifest:
        raise EngineError(
            f"the checkpoint {folder} was written by ranks of the verl engine, in parts; only `swarm serve --engine verl` "
            "reads it"
        )
