"""Additions to asyncio: time limits by our clock, and orderly shutdown on signals."""

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
    """Within the block, SIGINT and SIGTERM only call `act` in the running loop. Works only in the main thread."""
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)


def take_exception(future: asyncio.Future[Any]) -> None:
    """Done callback that retrieves a future's exception, so that asyncio does not warn that nobody retrieved it."""
    if not future.cancelled():
        future.exception()


async def within(clock: Clock, seconds: float | None, wanted: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> bool:
    """Return whether `wanted` finishes within `seconds` by the clock (None: no limit); cancel it if it does not."""
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
