"""Safe output: for readers that may stop early, as `head` does, and for terminals that must not see raw control characters."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


def one_line(text: str) -> str:
    """Put untrusted text on one line: each run of white space or control characters becomes one space."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def printable(text: str) -> str:
    """Escape control characters in untrusted text (`\\x1b`), but keep its line breaks."""
    return "".join(each if each == "\n" or each.isprintable() else repr(each)[1:-1] for each in text)


def silence(stream: TextIO) -> None:
    """Discard everything written to a stream from now on, including what Python flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextmanager
def read_or_not() -> Iterator[None]:
    """Ignore a reader that goes away during the block; the exit code stays the same."""
    try:
        yield
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)
