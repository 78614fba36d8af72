"""Checkpoints of a run as folders: whole or not there at all, never read unless each file is what was written.

One folder per step. It is written under a temporary name, synchronised, then renamed; its manifest has the hash of each file.
Folders that were never finished are removed, never read. What is in them beside the state is the engine's. Imports no torch.
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
"""What each rank of verl writes into a file of its own."""
HASHES = TypeAdapter(dict[str, str])
"""SHA-256 of each file, by name."""
Found = TypeVar("Found")


class BrokenCheckpoint(EngineError):
    """A checkpoint's files are not the ones that were written."""


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
    threads: int | None = None
    """Of the CPU that computed them; None: another device did, or an older checkpoint."""
    reproducible_sums: bool = False
    """Whether MKL gave the same bits each time (`REPRODUCIBLE_SUMS`); False: an older checkpoint, or another device's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was found whole."""

    state: TrainerState


def folder_of(directory: Path, step: int) -> Path:
    return directory / f"{_PREFIX}{step:08d}"


def steps(directory: Path) -> list[int]:
    """Steps of the finished checkpoints, oldest first."""
    names = (path.name.removeprefix(_PREFIX) for path in directory.glob(f"{_PREFIX}*"))
    return sorted(int(name) for name in names if name.isdigit())


# -- writing --------------------------------------------------------------------------------------------------------------


def write(directory: Path, step: int, fill: Callable[[Path], None], *, keep: int, best: int | None = None) -> None:
    """Write it durably, in the place of one of the same step if there is one; remove all but the newest `keep` and `best`.

    fill: writes the files into the folder that it is given, and seals them.
    Raises: OSError, and what `fill` raises, with the older checkpoints untouched.
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
    """Write the state and the manifest, once the files with these hashes lie in the folder. Raises: OSError."""
    text = state.model_dump_json().encode()
    write_atomically(folder / STATE, text)
    manifest = {**hashes, STATE: hashlib.sha256(text).hexdigest()}
    write_atomically(folder / MANIFEST, json.dumps(manifest).encode())


def _take_name(unfinished: Path, step: int) -> None:
    """Give a whole folder the name of its step's checkpoint. Raises: OSError, with one that has the name in its place."""
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
    """A checkpoint that was being replaced when its writer failed or was killed gets its name again, unless another has it by now.

    Raises: OSError.
    """
    for step, path in _replaced(directory).items():
        final = folder_of(directory, step)
        if final.exists():
            shutil.rmtree(path)
        else:
            path.rename(final)


def forget_other_future(directory: Path, branch: int, step: int) -> None:
    """A run goes on from `step` on a new branch: what older branches made after it does not count any more."""
    for later in [other for other in steps(directory) if other > step]:
        try:
            state = TrainerState.model_validate_json((folder_of(directory, later) / STATE).read_bytes())
        except (OSError, ValidationError):
            continue  # broken: passed over when it is met
        if state.branch < branch:
            _remove(directory, later)


def _replaced(directory: Path) -> dict[int, Path]:
    """By step, the checkpoints in whose place another was being put when its writer was killed."""
    return {int(path.name.rpartition("-")[2]): path for path in directory.glob(f"{_REPLACED}*")}


def _remove(directory: Path, step: int) -> None:
    """Renamed first, so that a folder that is half removed is never taken for a checkpoint."""
    doomed = directory / f"{_UNFINISHED}removed-{step}"
    folder_of(directory, step).rename(doomed)
    shutil.rmtree(doomed)


def _remove_unfinished(directory: Path) -> None:
    for path in directory.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path)


# -- reading --------------------------------------------------------------------------------------------------------------


def newest(directory: Path, read: Callable[[Path, int], Found]) -> Found | None:
    """The newest whole checkpoint; broken ones are passed over. None: there is none."""
    for step in reversed(steps(directory)):
        try:
            return read(directory, step)
        except BrokenCheckpoint as error:
            _LOG.error("%s; the one before it is tried", error)
    return None


def opened(directory: Path, step: int, load: Callable[[Path, Mapping[str, str], TrainerState], Found]) -> Found:
    """What `load` makes of the folder, the manifest and the state of this step's checkpoint.

    Raises: EngineError when there is none of this step, BrokenCheckpoint when it is not what was written; what `load` raises.
    """
    folder = folder_of(directory, step)
    if not folder.is_dir():
        raise EngineError(f"no checkpoint of step {step} in {directory}; there are {steps(directory)}")
    try:
        manifest = _unchanged(folder)
        return load(folder, manifest, TrainerState.model_validate_json((folder / STATE).read_bytes()))
    except (OSError, ValueError) as error:  # pydantic's are ValueErrors
        raise BrokenCheckpoint(f"checkpoint {folder} cannot be read: {error}") from error


def require_whole(directory: Path, step: int) -> None:
    """Raises: BrokenCheckpoint when there is no checkpoint of this step, or it is not what was written."""
    folder = folder_of(directory, step)
    if not folder.exists():  # what a killed writer was replacing gets its name again when the run is opened
        folder = _replaced(directory).get(step, folder)
    try:
        _unchanged(folder)
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"checkpoint {folder} cannot be read: {error}") from error


def state_of(directory: Path, step: int) -> TrainerState | None:
    """What this step's checkpoint holds besides tensors; None when there is none. Raises: BrokenCheckpoint."""
    file = folder_of(directory, step) / STATE
    try:
        return TrainerState.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise BrokenCheckpoint(f"{file} cannot be read: {error}") from error


def ranks_of(directory: Path, step: int) -> int:
    """How many verl ranks wrote this step's checkpoint in parts; 0: one process did, or there is none. Raises: BrokenCheckpoint."""
    file = folder_of(directory, step) / MANIFEST
    try:
        return ranks_in(HASHES.validate_json(file.read_bytes()))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{file} cannot be read: {error}") from error


def ranks_in(manifest: Mapping[str, str]) -> int:
    """The same, of a manifest."""
    return sum(name.startswith(f"{RANK_KINDS[0]}_world_size_") for name in manifest)


def rank_file(kind: str, ranks: int, rank: int) -> str:
    """What verl calls a rank's file."""
    return f"{kind}_world_size_{ranks}_rank_{rank}.pt"


def _unchanged(folder: Path) -> dict[str, str]:
    """The manifest of a checkpoint whose files are all as it has them.

    Raises: BrokenCheckpoint for one that is not; OSError, ValueError where one cannot be read.
    """
    manifest = HASHES.validate_json((folder / MANIFEST).read_bytes())
    for name, expected in manifest.items():
        if sha256_of(folder / name) != expected:
            raise BrokenCheckpoint(f"checkpoint {folder}: {name} has changed since it was written")
    return manifest
