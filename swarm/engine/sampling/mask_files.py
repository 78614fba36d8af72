"""Among which tokens vLLM drew: its worker writes a file per request, from which this process reads as the answer comes.

A file is named as the engine names the request, and lies in a folder that both know. It holds records: the number of the token within the
answer, the length of its row (both uint32, little-endian), and the row (`swarm.protocol.sampling_mask`). A token that is written again counts
as written last: a prompt that is computed in parts draws a first token at the end of each. Imports neither torch nor vllm.
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
"""Environment variable of the worker: where it writes."""
FLAG: Final = "swarm_masks"
"""Extension argument of a request whose masks are wanted (`vllm_xargs`)."""
HEAD: Final = struct.Struct("<II")
"""Number of the token, length of its row."""


def mask_folder(socket: Path) -> Path:
    """Beside the server's socket: it goes with it."""
    return socket.parent / "masks"


@dataclass(slots=True)
class _Rows:
    """What was read of one choice's file."""

    path: Path
    read: int = 0
    of_token: dict[int, bytes] = field(default_factory=dict)


class MaskFiles:
    """The files of one request."""

    def __init__(self, folder: Path, request_id: str) -> None:
        self._folder = folder
        self._request_id = request_id
        self._choices: dict[int, _Rows] = {}
        self._same: dict[bytes, bytes] = {}
        """Equal rows are held once."""

    def rows(self, choice: int, start: int, end: int) -> list[bytes]:
        """Of the tokens [start, end) of a choice; empty where one of them is not known."""
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
        """The request is over: remove its files, and what vLLM wrote of others after they were broken off. in_flight: the requests that go on."""
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
        """What came since. A record that is not whole yet waits."""
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
    """In the place of `MaskFiles.rows`, where no masks are wanted."""
    return []
