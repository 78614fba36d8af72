"""Locks on open files. A lock ends when its process ends."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO


class NoLocks(OSError):
    """The file system has no locks. The message is one line that says what to do."""

    def __init__(self, path: Path, error: OSError) -> None:
        why = error.strerror or type(error).__name__
        advice = "put its directory on a file system that keeps locks, such as a disk of this machine"
        super().__init__(error.errno, f"{path} cannot be locked ({why}): {advice}")

    def __str__(self) -> str:
        return str(self.strerror)


def locked(file: int | IO[str], path: Path, *, shared: bool = False, wait: bool = True) -> bool:
    """Lock an open file until it is closed, across processes; False if another process holds the lock and wait is False.

    path: the file's path, for the error text. shared: allow other shared locks.
    Raises: NoLocks.
    """
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError as error:
        raise NoLocks(path, error) from error
    return True
