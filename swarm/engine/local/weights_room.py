"""A private directory in memory through which trained weights reach inference: two slots, one served, one written."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from foundation.paths import memory_dir, write_atomically
from swarm.engine.seam import EngineError

_SLOTS = ("a", "b")


class WeightsRoom:
    """note: a file that remembers where the room is, so that the next server removes what a killed one left."""

    FILE = "model.safetensors"

    def __init__(self, model_dir: Path, *, note: Path) -> None:
        self._model_dir = model_dir
        self._note = note
        self._path: Path | None = None
        self._served: Path | None = None

    def open(self) -> None:
        """Make the directory, with the model's configuration in each slot. Again: nothing. Raises: OSError."""
        if self._path is not None:
            return
        self._remove_remembered()
        path = Path(tempfile.mkdtemp(prefix=f"swarm-weights-{os.getuid()}-", dir=memory_dir()))
        write_atomically(self._note, str(path).encode())
        for slot in _SLOTS:
            (path / slot).mkdir(mode=0o700)
            for file in self._model_dir.iterdir():
                if file.is_file() and file.suffix in (".json", ".jinja", ".txt") and "safetensors" not in file.name:
                    shutil.copyfile(file, path / slot / file.name)
        self._path = path

    def close(self) -> None:
        """Remove it."""
        path, self._path, self._served = self._path, None, None
        if path is not None:
            shutil.rmtree(path)
            self._note.unlink(missing_ok=True)

    def free_slot(self) -> Path:
        """The slot that is not served: inference may need the other one again after a crash."""
        if self._path is None:
            raise EngineError("the engine is not booted")
        return next(self._path / slot for slot in _SLOTS if self._path / slot != self._served)

    def serves(self, slot: Path) -> None:
        """Inference has these weights now."""
        self._served = slot

    def _remove_remembered(self) -> None:
        """Only what looks like a room of ours is removed, whatever the note says."""
        try:
            path = Path(self._note.read_text())
        except FileNotFoundError:
            return
        if path.parent == memory_dir() and path.name.startswith(f"swarm-weights-{os.getuid()}-"):
            shutil.rmtree(path, ignore_errors=True)
        self._note.unlink()
