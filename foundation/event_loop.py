"""What asyncio lacks: a time limit by our clock, and an orderly end on signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from foundation.clock import Clock

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def on_stop_signals(act: Callable[[], object]) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM call `act` in the running loop, and do nothing else. Only in the main thread."""
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)


def take_exception(future: asyncio.Future[Any]) -> None:
    """Use as a done callback: a future that nobody awaits does not warn about its exception."""
    if not future.cancelled():
        future.exception()


async def within(clock: Clock, seconds: float | None, wanted: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> bool:
    """Whether `wanted` finished within `seconds` of the clock (None: no limit). It is cancelled if it did not."""
    future = asyncio.ensure_future(wanted)
    racers: set[asyncio.Future[Any]] = {future}
    if seconds is not None:
        racers.add(asyncio.ensure_future(clock.sleep(max(0.0, seconds))))
    try:
        await asyncio.wait(racers, return_when=asyncio.FIRST_COMPLETED)
        if future.done() and not future.cancelled():
            future.exception()  # mark it as retrieved
        return future.done()
    finally:
        for racer in racers:
            racer.cancel()
