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


def replaced_of(directory: Path, step: int) -> Path:
    """Where a step's checkpoint lies while another takes its place."""
    return directory / f"{REPLACED}{step}"


def require_whole(directory: Path, step: int) -> None:
    """Raises: BrokenCheckpoint when there is no checkpoint of this step, or it is not what was written."""
    folder = folder_of(directory, step)
    if not folder.exists() and (replaced := replaced_of(directory, step)).exists():
        folder = replaced  # of a writer that was killed: it gets its name again when the run is opened
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
