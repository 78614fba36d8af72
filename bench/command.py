"""A bench as a command of the shell. A signal ends it in order: its servers stop, and its temporary folder goes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


def run(main: Callable[[], int | None]) -> int:
    """The exit code of `main`; of a signal's, when one ends it. `with` blocks and `finally` are gone through either way."""
    signal.signal(signal.SIGTERM, _exit)
    try:
        return main() or 0
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED


def _exit(number: int, frame: FrameType | None) -> None:
    sys.stderr.write("terminated\n")
    raise SystemExit(TERMINATED)
