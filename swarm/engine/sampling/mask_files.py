"""Sampling masks from vLLM: its worker writes a file per request, and this process reads it as the answer arrives.

The file is named by the engine's request id, in a shared folder. It holds records: the token's index within the answer, the
length of its row (both uint32, little-endian), and the row (`swarm.protocol.sampling_mask`). The last record of a token counts,
because for a prompt computed in parts a first token is sampled after each part. Imports neither torch nor vllm.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from swarm.engine.sampling.request_ids import own_id

FOLDER_VARIABLE: Final = "SWARM_SAMPLING_MASKS"
"""Environment variable that names the folder that the worker writes to."""
FLAG: Final = "swarm_masks"
"""Extension argument (`vllm_xargs`) of a request that wants masks."""
HEAD: Final = struct.Struct("<II")
"""Header of a record: index of the token, and length of its row."""


def mask_folder(socket: Path) -> Path:
    """Return the folder for masks, which is next to the server's socket and removed with it."""
    return socket.parent / "masks"


@dataclass(slots=True)
class _Rows:
    """The rows read so far from the file of one choice."""

    path: Path
    read: int = 0
    of_token: dict[int, bytes] = field(default_factory=dict)


class MaskFiles:
    """Reads the mask files of one request."""

    def __init__(self, folder: Path, request_id: str) -> None:
        self._folder = folder
        self._request_id = request_id
        self._choices: dict[int, _Rows] = {}
        self._same: dict[bytes, bytes] = {}
        """Each distinct row, so that equal rows share memory."""

    def rows(self, choice: int, start: int, end: int) -> list[bytes]:
        """Return the rows of the tokens [start, end) of a choice; empty if any of them is unknown."""
        if end <= start:
            return []
        if choice not in self._choices:
            self._find()
        found = self._choices.get(choice)
        if found is None:
            return []
        self._read(found)
        rows = [found.of_token.pop(number, b"") for number in range(start, end)]
        return rows if all(rows) else []

    def remove(self, in_flight: Collection[str]) -> None:
        """Remove the files of all requests that are not in `in_flight`: this one, which has finished, and cancelled ones whose files
        appeared late."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if own_id(path.name)[1] not in in_flight:
                    path.unlink(missing_ok=True)

    def _find(self) -> None:
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                choice, request_id = own_id(path.name)
                if request_id == self._request_id:
                    self._choices.setdefault(choice, _Rows(path))

    def _read(self, rows: _Rows) -> None:
        """Read new records. Leave an incomplete record for the next read."""
        try:
            with rows.path.open("rb") as file:
                file.seek(rows.read)
                data = file.read()
        except OSError:
            return
        at = 0
        while at + HEAD.size <= len(data):
            number, length = HEAD.unpack_from(data, at)
            end = at + HEAD.size + length
            if end > len(data):
                break
            row = data[at + HEAD.size : end]
            rows.of_token[number] = self._same.setdefault(row, row)
            at = end
        rows.read += at


def no_rows(choice: int, start: int, end: int) -> list[bytes]:
    """Stand in for `MaskFiles.rows` when no masks are wanted."""
    return []
