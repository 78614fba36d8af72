"""A model as a folder of files: its name, its fingerprint, and whether its files have changed.

This module does not know where models come from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from foundation.paths import write_atomically
from swarm.protocol.errors import SwarmError

MANIFEST = "swarm-manifest.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class CorruptModel(SwarmError):
    """Some of a model's files are missing, or have changed since they were fetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A checkpoint that transformers and vLLM can load. `fingerprint` is a SHA-256 over its weight files."""

    path: Path
    name: str
    fingerprint: str


class FileRecord(BaseModel):
    """A file's size, modification time and hash when the manifest was written."""

    size: int
    mtime_ns: int
    sha256: str


class Manifest(BaseModel):
    """The files of a fetched model, and where the model came from."""

    name: str
    source: str
    fingerprint: str
    files: dict[str, FileRecord]


def is_checkpoint(path: Path) -> bool:
    """True if `path` is a folder that contains a config and weights."""
    return (path / "config.json").is_file() and bool(weight_files(path))


def has_tokenizer(path: Path) -> bool:
    """True if the folder `path` contains a tokenizer."""
    return any((path / name).is_file() for name in TOKENIZERS)


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files in `path`, sorted by name. We read no other kind of weight file."""
    return sorted(file for file in path.glob("*.safetensors") if file.is_file())


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint_of(hashes: dict[str, str]) -> str:
    """Return a single SHA-256 over the names and hashes of the weight files."""
    lines = "".join(f"{name} {sha256}\n" for name, sha256 in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def write_manifest(path: Path, *, name: str, source: str) -> Manifest:
    """Hash every file in `path` and write the manifest next to them."""
    records = {
        file.relative_to(path).as_posix(): _record(file)
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    }
    weights = {file.name for file in weight_files(path)}
    fingerprint = fingerprint_of({file: record.sha256 for file, record in records.items() if file in weights})
    manifest = Manifest(name=name, source=source, fingerprint=fingerprint, files=records)
    write_atomically(path / MANIFEST, manifest.model_dump_json(indent=1).encode())
    return manifest


def read_manifest(file: Path) -> Manifest | None:
    """Return the manifest in `file`, or None if it is missing or invalid."""
    try:
        return Manifest.model_validate_json(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError, json.JSONDecodeError):
        return None


def verify(path: Path) -> ModelFolder:
    """Check the files in `path` against the manifest, by size and time. If only the time differs, compare the content.

    Raises: CorruptModel that names the files that changed.
    """
    manifest = read_manifest(path / MANIFEST)
    if manifest is None:
        raise CorruptModel(f"{path} has no readable manifest; delete the folder and fetch the model again")
    bad = [name for name, record in manifest.files.items() if not _unchanged(path / name, record)]
    if bad:
        raise CorruptModel(
            f"{', '.join(bad)} in {path} changed since the model was fetched; delete the folder and fetch it again"
        )
    return ModelFolder(path=path, name=manifest.name, fingerprint=manifest.fingerprint)


def fingerprint_folder(path: Path, memory: Path) -> ModelFolder:
    """Fingerprint a user's own folder.

    The file `memory` caches the fingerprint until a weight file changes. If it cannot be written, the folder is hashed every time.
    """
    known = None
    with contextlib.suppress(OSError):
        known = read_manifest(memory)
    weights = weight_files(path)
    if known is not None and {file.name for file in weights} == set(known.files):
        stats = {file.name: file.stat() for file in weights}
        if all((stats[n].st_size, stats[n].st_mtime_ns) == (r.size, r.mtime_ns) for n, r in known.files.items()):
            return ModelFolder(path=path, name=path.name, fingerprint=known.fingerprint)
    records = {file.name: _record(file) for file in weights}
    fingerprint = fingerprint_of({name: record.sha256 for name, record in records.items()})
    manifest = Manifest(name=path.name, source=str(path), fingerprint=fingerprint, files=records)
    with contextlib.suppress(OSError):
        write_atomically(memory, manifest.model_dump_json(indent=1).encode())
    return ModelFolder(path=path, name=path.name, fingerprint=fingerprint)


def _record(file: Path) -> FileRecord:
    stat = file.stat()
    return FileRecord(size=stat.st_size, mtime_ns=stat.st_mtime_ns, sha256=sha256_of(file))


def _unchanged(file: Path, record: FileRecord) -> bool:
    try:
        stat = file.stat()
    except FileNotFoundError:
        return False
    if (stat.st_size, stat.st_mtime_ns) == (record.size, record.mtime_ns):
        return True
    return stat.st_size == record.size and sha256_of(file) == record.sha256
