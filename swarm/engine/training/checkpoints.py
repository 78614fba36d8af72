"""Checkpoints of a run as folders: written atomically, and read only if every file matches its hash.

One folder per step. It is written under a temporary name, synchronised, then renamed; its manifest has the hash of each file.
Unfinished folders are removed, never read. Engines define the files other than the state. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from foundation.paths import synchronise, write_atomically
from swarm.engine.machine import Device
from swarm.engine.seam import EngineError
from swarm.models.folder import sha256_of
from swarm.protocol.runspec import RunSpec

_LOG = logging.getLogger(__name__)
_PREFIX, MANIFEST, STATE = "step-", "manifest.json", "state.json"
_UNFINISHED = ".unfinished-"
_REPLACED = f"{_UNFINISHED}replaced-"
RANK_KINDS = ("model", "optim", "extra_state")
"""Kinds of files that each verl rank writes."""
HASHES = TypeAdapter(dict[str, str])
"""SHA-256 of each file, by name."""
Found = TypeVar("Found")


class BrokenCheckpoint(EngineError):
    """A checkpoint cannot be read, or its files have changed since it was written."""


class TrainerState(BaseModel):
    """What a checkpoint holds besides tensors. `fingerprint` identifies the hosted model that the run began with."""

    run_id: str
    branch: int
    step: int
    fingerprint: str
    spec: RunSpec
    random_state: str
    """State of torch's generator, in hexadecimal."""
    device: Device | None = None
    """Device that computed the weights; None in older checkpoints and in those of the verl engine."""
    threads: int | None = None
    """CPU threads that computed the weights; None for other devices and in older checkpoints."""
    reproducible_sums: bool = False
    """Whether MKL gave the same bits each time (`REPRODUCIBLE_SUMS`); False for other devices and in older checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint."""

    state: TrainerState


def folder_of(directory: Path, step: int) -> Path:
    return directory / f"{_PREFIX}{step:08d}"


def steps(directory: Path) -> list[int]:
    """Return the steps of the finished checkpoints, oldest first."""
    names = (path.name.removeprefix(_PREFIX) for path in directory.glob(f"{_PREFIX}*"))
    return sorted(int(name) for name in names if name.isdigit())


# -- writing --------------------------------------------------------------------------------------------------------------


def write(directory: Path, step: int, fill: Callable[[Path], None], *, keep: int, best: int | None = None) -> None:
    """Write a checkpoint durably, replacing one of the same step; then remove all but the newest `keep` checkpoints and that of step
    `best`.

    `fill` writes the files into the given folder and seals them.
    Raises: OSError, or what `fill` raises; then the older checkpoints are untouched.
    """
    put_back(directory)
    _remove_unfinished(directory)
    unfinished = directory / f"{_UNFINISHED}{step}"
    try:
        unfinished.mkdir(parents=True)
        fill(unfinished)
        _take_name(unfinished, step)
        synchronise(directory)
        _remove_unfinished(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    for old in steps(directory)[:-keep]:
        if old != best:
            _remove(directory, old)


def seal(folder: Path, state: TrainerState, hashes: Mapping[str, str]) -> None:
    """Write the state and the manifest, once the files with these hashes are in the folder. Raises: OSError."""
    text = state.model_dump_json().encode()
    write_atomically(folder / STATE, text)
    manifest = {**hashes, STATE: hashlib.sha256(text).hexdigest()}
    write_atomically(folder / MANIFEST, json.dumps(manifest).encode())


def _take_name(unfinished: Path, step: int) -> None:
    """Rename a complete folder to its step's name. Raises: OSError, after restoring any earlier checkpoint of the step."""
    directory = unfinished.parent
    final = folder_of(directory, step)
    if final.exists():
        final.rename(directory / f"{_REPLACED}{step}")
    try:
        unfinished.rename(final)
    except OSError:
        put_back(directory)
        raise


def put_back(directory: Path) -> None:
    """Restore checkpoints whose replacement failed or was killed, unless the new one is in place. Raises: OSError."""
    for step, path in _replaced(directory).items():
        final = folder_of(directory, step)
        if final.exists():
            shutil.rmtree(path)
        else:
            path.rename(final)


def forget_other_future(directory: Path, branch: int, step: int) -> None:
    """Remove later checkpoints of older branches, because the run continues from `step` on a new branch."""
    for later in [other for other in steps(directory) if other > step]:
        try:
            state = TrainerState.model_validate_json((folder_of(directory, later) / STATE).read_bytes())
        except (OSError, ValidationError):
            continue  # broken: skipped when it is read
        if state.branch < branch:
            _remove(directory, later)


def _replaced(directory: Path) -> dict[int, Path]:
    """Return, by step, the checkpoints that were being replaced when the writer was killed."""
    return {int(path.name.rpartition("-")[2]): path for path in directory.glob(f"{_REPLACED}*")}


def _remove(directory: Path, step: int) -> None:
    """Remove a checkpoint. Its folder is renamed first, so that a partly removed one is never taken for a checkpoint."""
    doomed = directory / f"{_UNFINISHED}removed-{step}"
    folder_of(directory, step).rename(doomed)
    shutil.rmtree(doomed)


def _remove_unfinished(directory: Path) -> None:
    for path in directory.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path)


# -- reading --------------------------------------------------------------------------------------------------------------


def newest(directory: Path, read: Callable[[Path, int], Found]) -> Found | None:
    """Return the newest valid checkpoint, skipping broken ones; None if there is none."""
    for step in reversed(steps(directory)):
        try:
            return read(directory, step)
        except BrokenCheckpoint as error:
            _LOG.error("%s; trying the one before it", error)
    return None


def opened(directory: Path, step: int, load: Callable[[Path, Mapping[str, str], TrainerState], Found]) -> Found:
    """Verify this step's checkpoint and pass its folder, manifest and state to `load`.

    Raises: EngineError if the step has no checkpoint; BrokenCheckpoint if its files have changed; whatever `load` raises.
    """
    folder = folder_of(directory, step)
    if not folder.is_dir():
        raise EngineError(f"no checkpoint of step {step} in {directory}; existing steps: {steps(directory)}")
    try:
        manifest = _unchanged(folder)
        return load(folder, manifest, TrainerState.model_validate_json((folder / STATE).read_bytes()))
    except (OSError, ValueError) as error:  # pydantic's are ValueErrors
        raise BrokenCheckpoint(f"checkpoint {folder} cannot be read: {error}") from error


def require_whole(directory: Path, step: int) -> None:
    """Check that this step's checkpoint is complete and unchanged. Raises: BrokenCheckpoint."""
    folder = folder_of(directory, step)
    if not folder.exists():  # opening the run restores a checkpoint that a killed writer was replacing
        folder = _replaced(directory).get(step, folder)
    try:
        _unchanged(folder)
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"checkpoint {folder} cannot be read: {error}") from error


def state_of(directory: Path, step: int) -> TrainerState | None:
    """Return what this step's checkpoint holds besides tensors, or None if there is no checkpoint. Raises: BrokenCheckpoint."""
    file = folder_of(directory, step) / STATE
    try:
        return TrainerState.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise BrokenCheckpoint(f"{file} cannot be read: {error}") from error


def ranks_of(directory: Path, step: int) -> int:
    """Return how many verl ranks wrote this step's checkpoint in parts; 0 if one process did, or there is none. Raises:
    BrokenCheckpoint."""
    file = folder_of(directory, step) / MANIFEST
    try:
        return ranks_in(HASHES.validate_json(file.read_bytes()))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{file} cannot be read: {error}") from error


def ranks_in(manifest: Mapping[str, str]) -> int:
    """Return how many verl ranks wrote the checkpoint with this manifest; 0 if one process did."""
    return sum(name.startswith(f"{RANK_KINDS[0]}_world_size_") for name in manifest)


def rank_file(kind: str, ranks: int, rank: int) -> str:
    """Return verl's name for a rank's file."""
    return f"{kind}_world_size_{ranks}_rank_{rank}.pt"


def _unchanged(folder: Path) -> dict[str, str]:
    """Check a checkpoint's files against its manifest and return the manifest.

    Raises: BrokenCheckpoint if a file differs; OSError, ValueError if one cannot be read.
    """
    manifest = HASHES.validate_json((folder / MANIFEST).read_bytes())
    for name, expected in manifest.items():
        if sha256_of(folder / name) != expected:
            raise BrokenCheckpoint(f"checkpoint {folder}: {name} has changed since it was written")
    return manifest
