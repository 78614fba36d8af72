"""Runs a bench as a shell command. A signal shuts it down cleanly: its servers stop and its temporary folder is deleted."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


def run(main: Callable[[], int | None]) -> int:
    """The exit code of `main`, or of the signal that ended it. `with` and `finally` blocks run in either case."""
    signal.signal(signal.SIGTERM, _exit)
    try:
        return main() or 0
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED


def _exit(number: int, frame: FrameType | None) -> None:
    sys.stderr.write("terminated\n")
    raise SystemExit(TERMINATED)
