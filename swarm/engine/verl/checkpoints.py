"""Checkpoints of a run on many ranks: one file per rank and kind, by verl; whole or not there at all, by us.

Folders are named and manifests are kept as the local engine does it. Every node must see the run's directory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from foundation.paths import synchronise, write_atomically
from swarm.engine.local.checkpoints import TrainerState, put_back, steps, take_name
from swarm.engine.local.manifest import MANIFEST, BrokenCheckpoint, unchanged
from swarm.engine.seam import EngineError
from swarm.models.folder import sha256_of

_LOG = logging.getLogger(__name__)
_UNFINISHED = ".unfinished-"
_STATE = "state.json"
_KINDS = ("model", "optim", "extra_state")


def folder(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def write(
    directory: Path,
    state: TrainerState,
    save: Callable[[Path], None],
    *,
    ranks: int,
    keep: int,
    best: int | None = None,
) -> None:
    """`save` writes the ranks' files into the folder it is given. Only a folder that is complete gets its name.

    Older ones are removed, except for the newest `keep` and that of step `best`.

    Raises: OSError, EngineError, with the older checkpoints untouched.
    """
    put_back(directory)
    for left in directory.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left)
    unfinished = directory / f"{_UNFINISHED}{state.step}"
    try:
        unfinished.mkdir(parents=True)
        save(unfinished)
        _seal(unfinished, state, ranks)
        take_name(unfinished, state.step)
        synchronise(directory)
    finally:
        for left in directory.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
    for old in [step for step in steps(directory)[:-keep] if step != best]:
        doomed = directory / f"{_UNFINISHED}removed-{old}"
        folder(directory, old).rename(doomed)
        shutil.rmtree(doomed)


def newest(directory: Path, ranks: int) -> TrainerState | None:
    """State of the newest whole checkpoint; broken ones are passed over. None: there is none."""
    for step in reversed(steps(directory)):
        try:
            return verified(directory, step, ranks)
        except BrokenCheckpoint as error:
            _LOG.error("%s; the one before it is tried", error)
    return None


def verified(directory: Path, step: int, ranks: int) -> TrainerState:
    """Check every file against the manifest.

    Raises: EngineError when there is none of this step or it is of another number of ranks, BrokenCheckpoint when it is not
    what was written.
    """
    where = folder(directory, step)
    if not where.is_dir():
        raise EngineError(f"no checkpoint of step {step} in {directory}; there are {steps(directory)}")
    try:
        manifest = unchanged(where)
        state = TrainerState.model_validate_json((where / _STATE).read_bytes())
    except (OSError, ValueError) as error:  # pydantic's are ValueErrors
        raise BrokenCheckpoint(f"checkpoint {where} cannot be read: {error}") from error
    written = sum(name.startswith("model_world_size_") for name in manifest)
    if not written:
        raise EngineError(
            f"the checkpoint {where} is of no verl rank; serve with the engine that wrote it (--engine local)"
        )
    if written != ranks:
        raise EngineError(
            f"the checkpoint {where} is of {written} verl ranks and cannot be loaded by {ranks}; "
            f"serve with as many ranks as wrote it"
        )
    return state


def _seal(unfinished: Path, state: TrainerState, ranks: int) -> None:
    """Name and hash what a rank must have written, and make all of it durable."""
    expected = [f"{kind}_world_size_{ranks}_rank_{rank}.pt" for kind in _KINDS for rank in range(ranks)]
    lacking = [name for name in expected if not (unfinished / name).is_file()]
    if lacking:
        raise EngineError(
            f"{', '.join(lacking)} did not arrive in {unfinished.parent}; put the state directory on a file system "
            "that every node of the Ray cluster mounts under the same path"
        )
    for name in expected:
        synchronise(unfinished / name)
    manifest = {name: sha256_of(unfinished / name) for name in expected}
    text = state.model_dump_json().encode()
    manifest[_STATE] = hashlib.sha256(text).hexdigest()
    write_atomically(unfinished / _STATE, text)
    write_atomically(unfinished / MANIFEST, json.dumps(manifest).encode())
