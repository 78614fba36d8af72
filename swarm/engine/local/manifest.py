"""What the folders of checkpoints are called, and whether their files are those that were written. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter

from swarm.engine.seam import EngineError
from swarm.models.folder import sha256_of

PREFIX, MANIFEST = "step-", "manifest.json"
UNFINISHED = ".unfinished-"
REPLACED = f"{UNFINISHED}replaced-"
HASHES = TypeAdapter(dict[str, str])
"""SHA-256 of each file, by name."""


class BrokenCheckpoint(EngineError):
    """A checkpoint's files are not the ones that were written."""


def folder_of(directory: Path, step: int) -> Path:
    return directory / f"{PREFIX}{step:08d}"


def replaced(directory: Path) -> dict[int, Path]:
    """By step, the checkpoints in whose place another was being put when its writer was killed."""
    return {int(path.name.rpartition("-")[2]): path for path in directory.glob(f"{REPLACED}*")}


def require_whole(directory: Path, step: int) -> None:
    """Raises: BrokenCheckpoint when there is no checkpoint of this step, or it is not what was written."""
    folder = folder_of(directory, step)
    if not folder.exists():  # what a killed writer was replacing gets its name again when the run is opened
        folder = replaced(directory).get(step, folder)
    try:
        unchanged(folder)
    except (OSError, ValueError) as error:  # pydantic's are ValueErrors
        raise BrokenCheckpoint(f"checkpoint {folder} cannot be read: {error}") from error


def unchanged(folder: Path) -> dict[str, str]:
    """The manifest of a checkpoint whose files are all as it has them.

    Raises: BrokenCheckpoint for one that is not; OSError, ValueError where one cannot be read.
    """
    manifest = HASHES.validate_json((folder / MANIFEST).read_bytes())
    for name, expected in manifest.items():
        if sha256_of(folder / name) != expected:
            raise BrokenCheckpoint(f"checkpoint {folder}: {name} has changed since it was written")
    return manifest
