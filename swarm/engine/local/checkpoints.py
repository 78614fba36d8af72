"""Checkpoints of the local engine: safetensors files, hashed while they are written.

Also reads checkpoints that verl's ranks wrote in parts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from swarm.engine.training import checkpoints
from swarm.engine.training.checkpoints import HASHES, MANIFEST, BrokenCheckpoint, TrainerState, folder_of, ranks_in
from swarm.engine.training.shards import Parts

_WEIGHTS, _MOMENTS = "weights.safetensors", "optimizer.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(checkpoints.Checkpoint):
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


def write(directory: Path, checkpoint: Checkpoint, *, keep: int, best: int | None = None) -> None:
    """Write a checkpoint; see `training.checkpoints.write`. Raises: OSError."""

    def fill(folder: Path) -> None:
        hashes = {
            name: write_tensors(folder / name, tensors, {key: tensor.dtype for key, tensor in tensors.items()})
            for name, tensors in ((_WEIGHTS, checkpoint.weights), (_MOMENTS, checkpoint.moments))
        }
        checkpoints.seal(folder, checkpoint.state, hashes)

    checkpoints.write(directory, checkpoint.state.step, fill, keep=keep, best=best)


def read(directory: Path, step: int) -> Checkpoint:
    """Read this step's checkpoint. Raises: EngineError if there is none, BrokenCheckpoint if its files have changed."""
    return checkpoints.opened(directory, step, _load)


def fingerprint(directory: Path, step: int) -> str | None:
    """Return the SHA-256 of this step's weights from the checkpoint's manifest, or None if there is no checkpoint.

    For a checkpoint that verl's ranks wrote in parts, this is the hash of the file that one process would have written.
    Raises: EngineError, or BrokenCheckpoint if it cannot be read.
    """
    folder = folder_of(directory, step)
    try:
        manifest = HASHES.validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"checkpoint {folder} cannot be read: {error}") from error
    return hash_tensors(read(directory, step).weights) if ranks_in(manifest) else manifest[_WEIGHTS]


def _load(folder: Path, manifest: Mapping[str, str], state: TrainerState) -> Checkpoint:
    if not ranks_in(manifest):
        return Checkpoint(state=state, weights=load_file(folder / _WEIGHTS), moments=load_file(folder / _MOMENTS))
    parts = stored(folder, manifest)
    moments = {f"{name}/{kind}": value for name in parts.names for kind, value in parts.moments(name).items()}
    return Checkpoint(state=state, weights={name: parts.weight(name) for name in parts.names}, moments=moments)


class Stored(Protocol):
    """A checkpoint's content, read one tensor at a time."""

    @property
    def names(self) -> list[str]:
        """Names of the trained weights."""
        ...

    def weight(self, name: str) -> Tensor: ...

    def moments(self, name: str) -> dict[str, Tensor]:
        """Return the weight's moments by kind; empty before the first step."""
        ...


def stored(folder: Path, manifest: Mapping[str, str] | None = None) -> Stored:
    """Open the content of a complete checkpoint, whichever engine wrote it. Raises: OSError, ValueError."""
    found = HASHES.validate_json((folder / MANIFEST).read_bytes()) if manifest is None else manifest
    ranks = ranks_in(found)
    return Parts(folder, ranks) if ranks else _Whole(folder)


class _Whole:
    """A checkpoint that one process wrote."""

    def __init__(self, folder: Path) -> None:
        self._weights: Any = safe_open(folder / _WEIGHTS, framework="pt")
        self._moments: Any = safe_open(folder / _MOMENTS, framework="pt")
        self._kinds: dict[str, list[str]] = {}
        for key in self._moments.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118  (not a dictionary)
            name, _, kind = key.rpartition("/")
            self._kinds.setdefault(name, []).append(kind)

    @property
    def names(self) -> list[str]:
        return list(self._weights.keys())

    def weight(self, name: str) -> Tensor:
        weight: Tensor = self._weights.get_tensor(name)
        return weight

    def moments(self, name: str) -> dict[str, Tensor]:
        return {kind: self._moments.get_tensor(f"{name}/{kind}") for kind in self._kinds.get(name, [])}


class Hash(Protocol):
    """A hash with hashlib's interface."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


NewHash = Callable[[], Hash]

_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
}


def wider(stored: torch.dtype, computed: torch.dtype) -> torch.dtype:
    """Return the dtype in which a weight leaves the trainer: the hosted weight's dtype, or the compute dtype if that is wider."""
    return max(stored, computed, key=lambda each: each.itemsize)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], hashed_by: NewHash = hashlib.sha256
) -> str:
    """Write each tensor in its dtype from `dtypes`; return the file's hash, SHA-256 by default.

    Overwrites an existing file in place, because reused memory is much faster than fresh memory. For an atomic write, write to a new
    name and rename the file. Raises: OSError.
    """
    digest = hashed_by()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as file:
        with ThreadPoolExecutor(1) as hashing:
            for chunk in _chunks(tensors, dtypes):
                hashed = hashing.submit(digest.update, chunk)
                _write_all(file.fileno(), chunk)
                hashed.result()
        file.truncate(file.tell())
        os.fsync(file.fileno())
    return digest.hexdigest()


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the file that `write_tensors` would write for these tensors in their own dtypes."""
    digest = hashlib.sha256()
    for chunk in _chunks(tensors, {name: tensor.dtype for name, tensor in tensors.items()}):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> Iterable[memoryview]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * dtypes[name].itemsize
        header[name] = {
            "dtype": _NAMES[dtypes[name]],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name, tensor in tensors.items():
        raw = tensor.detach().to("cpu", dtypes[name]).contiguous().reshape(-1)
        if raw.numel():
            yield memoryview(raw.view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer


def _write_all(descriptor: int, chunk: memoryview) -> None:
    while len(chunk):
        chunk = chunk[os.write(descriptor, chunk) :]
