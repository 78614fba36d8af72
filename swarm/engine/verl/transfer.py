"""The private socket over which a rank sends weights to its part of a replica."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

_SCHEME = "ipc://"


class Sender(Protocol):
    """verl's sender on a rank; it reads `zmq_handle` when it sends weights."""

    zmq_handle: str


def of_this_change(handle: str, word: str) -> str:
    """Return verl's handle (`ipc:///tmp/NAME.sock`), moved into the directory for this change of weights."""
    named = Path(handle.removeprefix(_SCHEME))
    return f"{_SCHEME}{named.with_name(f'swarm-{word}-{named.stem}') / 's'}"


@contextmanager
def meeting(sender: Sender, word: str) -> Iterator[None]:
    """Within the block, the rank sends over a socket in a directory that only its own user may enter; afterwards the directory is
    removed.

    Raises: FileExistsError if the directory already exists.
    """
    usual = sender.zmq_handle
    sender.zmq_handle = of_this_change(usual, word)
    folder = Path(sender.zmq_handle.removeprefix(_SCHEME)).parent
    try:
        folder.mkdir(mode=0o700)
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        sender.zmq_handle = usual
