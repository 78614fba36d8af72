"""A private directory in memory through which trained weights reach inference: one slot is served while the other is written."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

import xxhash

from foundation.locks import locked
from foundation.paths import memory_dir
from swarm.engine.seam import EngineError

_LOG = logging.getLogger(__name__)
_SLOTS = ("a", "b")
_PREFIX = "swarm-weights"


class WeightSlots:
    """The two slots and their directory. It is locked while open; the next server removes unlocked ones, which killed servers left.

    `path` is the directory while it is open, else None.
    """

    FILE = "model.safetensors"
    ADAPTER, ADAPTER_FILE = "adapter", "adapter_model.safetensors"

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self.path: Path | None = None
        self._lock: int | None = None
        self._served: Path | None = None

    def open(self) -> None:
        """Create the directory, with the model's config in each slot. Does nothing if it is already open. Raises: OSError."""
        if self.path is not None:
            return
        self.path, self._lock = self._made()

    def restore(self) -> None:
        """Recreate slots that were removed; inference keeps serving its weights from memory. Raises: OSError; may be retried."""
        path, lock = self.path, self._lock
        if path is None or lock is None or not (missing := [slot for slot in _SLOTS if not (path / slot).is_dir()]):
            return
        _LOG.warning(
            "recreating %s, which was removed; systemd removes it when its user logs out for the last time, unless "
            "logind.conf has RemoveIPC=no",
            path,
        )
        if path.is_dir():
            for slot in missing:
                self._furnish(path / slot)
            return
        self.path, self._lock = self._made()
        self._served = None
        os.close(lock)

    def reserve(self, size: int) -> None:
        """Allocate `size` bytes for the weights of each slot, before the first weights are written.

        This is only a hint: if there is no room, the later write reports it.
        """
        path = self.path
        if path is None or not hasattr(os, "posix_fallocate"):
            return
        try:
            for slot in _SLOTS:
                _take(path / slot / self.FILE, size)
        except OSError as error:
            _LOG.warning("no room for weights in %s: %s", path, error)

    def close(self) -> None:
        """Remove the directory."""
        path, lock = self.path, self._lock
        self.path = self._lock = self._served = None
        if path is not None and lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)

    def free_slot(self) -> Path:
        """Return the slot that is not served; after a crash, inference may need the served one again."""
        if self.path is None:
            raise EngineError("the engine is not booted")
        return next(self.path / slot for slot in _SLOTS if self.path / slot != self._served)

    def serves(self, slot: Path) -> None:
        """Note that inference now serves the weights in this slot."""
        self._served = slot

    def _made(self) -> tuple[Path, int]:
        """Remove directories of killed servers, then create and lock a new one. Raises: OSError, leaving nothing behind."""
        for left in memory_dir().glob(f"{_PREFIX}-{os.getuid()}-*"):
            _remove_if_free(left)
        path, lock = _made_and_locked()
        try:
            for slot in _SLOTS:
                self._furnish(path / slot)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            raise
        return path, lock

    def _furnish(self, slot: Path) -> None:
        """Create a slot, with the model's configuration. Raises: OSError, leaving no slot behind."""
        slot.mkdir(mode=0o700)
        try:
            for file in self._model_dir.iterdir():
                if file.is_file() and file.suffix in (".json", ".jinja", ".txt") and "safetensors" not in file.name:
                    shutil.copyfile(file, slot / file.name)
        except OSError:
            shutil.rmtree(slot, ignore_errors=True)
            raise


def new_checksum() -> xxhash.xxh3_128:
    """Return a checksum for weights in a slot. It only guards against accidents, because no other user can enter the directory."""
    return xxhash.xxh3_128()


def checksum_of(file: Path) -> str:
    """Return the checksum of a file. Raises: OSError."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, new_checksum).hexdigest()


def _take(file: Path, size: int) -> None:
    """Create a file of this size, or an empty one if there is no room. Raises: OSError."""
    with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as opened:
        try:
            os.posix_fallocate(opened.fileno(), 0, size)
        except OSError:
            opened.truncate(0)
            raise


def _made_and_locked() -> tuple[Path, int]:
    """Create a directory and lock it. Retry if another server removed it before the lock, mistaking it for a dead server's."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getuid()}-", dir=memory_dir()))
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        locked(lock, path)
        if path.exists():
            return path, lock
        os.close(lock)


def _remove_if_free(path: Path) -> None:
    """Remove a directory that no running process has locked."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if locked(lock, path, wait=False):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
