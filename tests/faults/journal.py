"""What one client wrote down for itself: an append-only file of JSON lines, each on disk before the client goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

Note = Literal["claimed", "ending", "acknowledged", "leak", "committed", "aborted", "undecided"]


class Journal:
    """One file, opened for appending. Survives a SIGKILL of its writer."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, note: Note, episode_id: str, **fields: Any) -> None:
        line = json.dumps({"note": note, "episode_id": episode_id, "pid": os.getpid(), **fields})
        os.write(self._file, line.encode() + b"\n")
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal; a torn last one was never acted upon."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]
