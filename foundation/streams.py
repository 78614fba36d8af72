"""Safe output: to readers that may stop early, as `head` does, and to terminals that must not execute control characters."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


def one_line(text: str) -> str:
    """Untrusted text on one line: each run of white space or control characters becomes one space."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def printable(text: str) -> str:
    """Untrusted text with its line breaks kept and control characters escaped: `\\x1b`."""
    return "".join(each if each == "\n" or each.isprintable() else repr(each)[1:-1] for each in text)


def silence(stream: TextIO) -> None:
    """Discard everything that is still written to a stream, including what Python flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextmanager
def read_or_not() -> Iterator[None]:
    """Within the block, ignore a reader that has gone away; the exit code stays the same."""
    try:
        yield
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)
