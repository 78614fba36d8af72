"""Locks on open files. A lock ends when its process ends."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO


class NoLocks(OSError):
    """The file system does not support locks. The message is one line that says what to do."""

    def __init__(self, path: Path, error: OSError) -> None:
        why = error.strerror or type(error).__name__
        advice = "put its directory on a file system that supports locks, such as a local disk"
        super().__init__(error.errno, f"{path} cannot be locked ({why}): {advice}")

    def __str__(self) -> str:
        return str(self.strerror)


def locked(file: int | IO[str], path: Path, *, shared: bool = False, wait: bool = True) -> bool:
    """Lock an open file across processes until it is closed. Return False if `wait` is False and another process holds the lock.

    Args:
        file: the open file, or its descriptor.
        path: the file's path, for the error text.
        shared: allow other shared locks.
        wait: wait until the lock is free.

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
