"""Output: to a reader who may go away before its end, as `head` does; on a terminal that must not obey what it shows."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


def one_line(text: str) -> str:
    """Text of others as a line: runs of white space are a space, and so are control characters, which a terminal would obey."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def printable(text: str) -> str:
    """Text of others over as many lines as it has, with what a terminal would obey written out: `\\x1b`."""
    return "".join(each if each == "\n" or each.isprintable() else repr(each)[1:-1] for each in text)


def silence(stream: TextIO) -> None:
    """Send what is still written to a stream nowhere, also what Python flushes at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextmanager
def read_or_not() -> Iterator[None]:
    """Print inside what nobody has to read: the exit code says all the same how it ended."""
    try:
        yield
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)
