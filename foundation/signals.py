"""Being told to end, for programs that run an event loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TO_END = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def told_to_end(act: Callable[[], object]) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM call `act` in the running loop, and do nothing else. In the main thread."""
    loop = asyncio.get_running_loop()
    for number in _TO_END:
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in _TO_END:
            loop.remove_signal_handler(number)
