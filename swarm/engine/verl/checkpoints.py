"""Checkpoints of a run on many ranks: verl writes one file per rank and kind, in a folder of `training.checkpoints`.

Every node must see the run's directory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foundation.paths import synchronise
from swarm.engine.seam import EngineError
from swarm.engine.training import checkpoints
from swarm.engine.training.checkpoints import RANK_KINDS, Checkpoint, TrainerState, rank_file
from swarm.models.folder import sha256_of


def write(
    directory: Path,
    state: TrainerState,
    save: Callable[[Path], None],
    *,
    ranks: int,
    keep: int,
    best: int | None = None,
) -> None:
    """Write a checkpoint; see `training.checkpoints.write`. `save` writes the ranks' files into the given folder. Raises: OSError,
    EngineError."""

    def fill(folder: Path) -> None:
        save(folder)
        names = [rank_file(kind, ranks, rank) for kind in RANK_KINDS for rank in range(ranks)]
        if lacking := [name for name in names if not (folder / name).is_file()]:
            raise EngineError(
                f"{', '.join(lacking)} are missing from {directory}; put the state directory on a file system "
                "that every node of the Ray cluster mounts under the same path"
            )
        for name in names:
            synchronise(folder / name)
        checkpoints.seal(folder, state, {name: sha256_of(folder / name) for name in names})

    checkpoints.write(directory, state.step, fill, keep=keep, best=best)


def read(directory: Path, step: int) -> Checkpoint:
    """Check every file against the manifest; the ranks themselves read what they need.

    Raises: EngineError if there is no checkpoint of this step; BrokenCheckpoint if it is not what was written.
    """
    return checkpoints.opened(directory, step, lambda folder, manifest, state: Checkpoint(state=state))
