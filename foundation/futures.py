"""What asyncio's futures lack."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from foundation.clock import Clock


def take_exception(future: asyncio.Future[Any]) -> None:
    """As its done callback: a future that nobody waits for any more does not complain of its failure."""
    if not future.cancelled():
        future.exception()


async def within(clock: Clock, seconds: float | None, wanted: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> bool:
    """Whether `wanted` was done within `seconds` of the clock (None: no limit). It is cancelled when it was not."""
    future = asyncio.ensure_future(wanted)
    racers: set[asyncio.Future[Any]] = {future}
    if seconds is not None:
        racers.add(asyncio.ensure_future(clock.sleep(max(0.0, seconds))))
    try:
        await asyncio.wait(racers, return_when=asyncio.FIRST_COMPLETED)
        if future.done() and not future.cancelled():
            future.exception()  # seen: whoever shares it hears of it there
        return future.done()
    finally:
        for racer in racers:
            racer.cancel()
