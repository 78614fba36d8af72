"""Answers to requests that are on their way when nobody waits for them any more: what they grant is to be given back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from foundation.clock import Clock

GIVE_BACK_S = 2.0
"""How long a client that is told to stop waits for the answer to a request that is on its way."""

Answer = TypeVar("Answer")


async def to_its_answer(request: Coroutine[Any, Any, Answer], clock: Clock) -> Answer:
    """Its answer. When nobody waits for it any more, one that is on its way has GIVE_BACK_S to arrive all the same."""
    sent = asyncio.create_task(request)
    try:
        return await asyncio.shield(sent)
    except asyncio.CancelledError:
        enough = asyncio.ensure_future(clock.sleep(GIVE_BACK_S))
        await asyncio.wait((sent, enough), return_when=asyncio.FIRST_COMPLETED)
        enough.cancel()
        if not sent.cancel() and not sent.cancelled():
            sent.exception()  # seen: nobody is there to be told
        raise
