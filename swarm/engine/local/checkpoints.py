"""Checkpoints of a run: weights, optimiser, random state, step and spec; whole or not there at all.

One folder per step. It is written under a temporary name, synchronised, then renamed; a manifest with the hash of each
file is checked before anything is loaded. Folders that were never finished are removed, never read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ValidationError
from safetensors.torch import load_file
from torch import Tensor

from foundation.paths import synchronise, write_atomically
from swarm.engine.local.device import Device
from swarm.engine.local.manifest import (
    HASHES,
    MANIFEST,
    PREFIX,
    REPLACED,
    UNFINISHED,
    BrokenCheckpoint,
    folder_of,
    replaced,
    unchanged,
)
from swarm.engine.local.tensor_file import write_tensors
from swarm.engine.seam import EngineError
from swarm.protocol.runspec import RunSpec

_LOG = logging.getLogger(__name__)
_WEIGHTS, _MOMENTS, _STATE = "weights.safetensors", "optimizer.safetensors", "state.json"


class TrainerState(BaseModel):
    """What a checkpoint holds besides tensors. fingerprint: of the hosted model that the run began with."""

    run_id: str
    branch: int
    step: int
    fingerprint: str
    spec: RunSpec
    random_state: str
    """torch's generator, in hexadecimal."""
    device: Device | None = None
    """What computed the weights; None: an older checkpoint, or one of the verl engine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    state: TrainerState
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


def write(directory: Path, checkpoint: Checkpoint, *, keep: int, best: int | None = None) -> None:
    """Write it durably, in the place of one of the same step if there is one; remove all but the newest `keep` and `best`.

    Raises: OSError, with the older checkpoints untouched.
    """
    step = checkpoint.state.step
    put_back(directory)
    _remove_unfinished(directory)
    unfinished = directory / f"{UNFINISHED}{step}"
    try:
        unfinished.mkdir(parents=True)
        _write_files(unfinished, checkpoint)
        take_name(unfinished, step)
        synchronise(directory)
        _remove_unfinished(directory)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    for old in steps(directory)[:-keep]:
        if old != best:
            _remove(directory, old)


def take_name(unfinished: Path, step: int) -> None:
    """Give a folder that is whole the name of its step's checkpoint. Raises: OSError, with one that has the name in its place."""
    directory = unfinished.parent
    final = folder_of(directory, step)
    if final.exists():
        final.rename(directory / f"{REPLACED}{step}")
    try:
        unfinished.rename(final)
    except OSError:
        put_back(directory)
        raise


def put_back(directory: Path) -> None:
    """A checkpoint that was being replaced when its writer failed or was killed gets its name again, unless another has it by now.

    Raises: OSError.
    """
    for step, path in replaced(directory).items():
        final = folder_of(directory, step)
        if final.exists():
            shutil.rmtree(path)
        else:
            path.rename(final)


def steps(directory: Path) -> list[int]:
    """Steps of the finished checkpoints, oldest first."""
    names = (path.name.removeprefix(PREFIX) for path in directory.glob(f"{PREFIX}*"))
    return sorted(int(name) for name in names if name.isdigit())


def newest(directory: Path) -> Checkpoint | None:
    """The newest whole checkpoint; broken ones are passed over. None: there is none."""
    for step in reversed(steps(directory)):
        try:
            return read(directory, step)
        except BrokenCheckpoint as error:
            _LOG.error("%s; the one before it is tried", error)
    return None


def read(directory: Path, step: int) -> Checkpoint:
    """Raises: EngineError when there is none of this step, BrokenCheckpoint when it is not what was written."""
    folder = folder_of(directory, step)
    if not folder.is_dir():
        raise EngineError(f"no checkpoint of step {step} in {directory}; there are {steps(directory)}")
    try:
        _refuse_ranks(unchanged(folder), folder)
        return Checkpoint(
            state=TrainerState.model_validate_json((folder / _STATE).read_bytes()),
            weights=load_file(folder / _WEIGHTS),
            moments=load_file(folder / _MOMENTS),
        )
    except (OSError, ValueError) as error:  # pydantic's are ValueErrors
        raise BrokenCheckpoint(f"checkpoint {folder} cannot be read: {error}") from error


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


def device_of(directory: Path, step: int) -> Device | None:
    """What computed the weights of this step's checkpoint; None when it does not say, or there is none. Raises: BrokenCheckpoint."""
    file = folder_of(directory, step) / _STATE
    try:
        return TrainerState.model_validate_json(file.read_bytes()).device
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise BrokenCheckpoint(f"{file} cannot be read: {error}") from error


def forget_other_future(directory: Path, branch: int, step: int) -> None:
    """A run goes on from `step` on a new branch: what older branches made after it does not count any more."""
    for later in [other for other in steps(directory) if other > step]:
        try:
            state = TrainerState.model_validate_json((folder_of(directory, later) / _STATE).read_bytes())
        except (OSError, ValidationError):
            continue  # broken: passed over when it is met
        if state.branch < branch:
            _remove(directory, later)


def _refuse_ranks(manifest: dict[str, str], folder: Path) -> None:
    if _WEIGHTS not in manifest:
        raise EngineError(
            f"the checkpoint {folder} was written by ranks of the verl engine, in parts; only `swarm serve --engine verl` "
            "reads it"
        )


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    manifest = {
        name: write_tensors(folder / name, tensors, {key: tensor.dtype for key, tensor in tensors.items()})
        for name, tensors in ((_WEIGHTS, checkpoint.weights), (_MOMENTS, checkpoint.moments))
    }
    state = checkpoint.state.model_dump_json().encode()
    manifest[_STATE] = hashlib.sha256(state).hexdigest()
    write_atomically(folder / _STATE, state)
    write_atomically(folder / MANIFEST, json.dumps(manifest).encode())


def _remove(directory: Path, step: int) -> None:
    """Out of sight first, so that a folder that is half removed is never taken for a checkpoint."""
    doomed = directory / f"{UNFINISHED}removed-{step}"
    folder_of(directory, step).rename(doomed)
    shutil.rmtree(doomed)


def _remove_unfinished(directory: Path) -> None:
    for path in directory.glob(f"{UNFINISHED}*"):
        shutil.rmtree(path)


def random_state() -> str:
    return bytes(torch.get_rng_state().tolist()).hex()


def restore_random_state(text: str) -> None:
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8))
