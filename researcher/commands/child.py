"""A process that a command starts and waits for, and that never outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

_GRACE_S = 15.0


@contextmanager
def child(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """The process, in a group of its own, which ends with all that it started when the block is left.

    SIGTERM leaves the block too, by SystemExit with the code that a shell gives it. Use it in the main thread.
    """
    told: list[int] = []

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    # Until the process is known, a signal is only remembered: else nobody would be there to end it.
    earlier = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        started = begin(command, environ)
        try:
            signal.signal(signal.SIGTERM, leave)
            if told:
                leave(told[0], None)
            yield started
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end(started)
    finally:
        signal.signal(signal.SIGTERM, earlier)


def begin(command: Sequence[str], environ: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """The process, in a group of its own. Whoever begins it ends it. environ: what it is told beside our own."""
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **(environ or {})},
    )


def end(started: subprocess.Popen[bytes]) -> None:
    """The whole group, whether or not its first process lives: by SIGTERM, and what stays by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(started.pid, number)
        with suppress(subprocess.TimeoutExpired):
            started.wait(_GRACE_S)
