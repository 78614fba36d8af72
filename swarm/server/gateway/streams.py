"""Merges streams, runs work concurrently, and cancels it when an episode ends or a stream is abandoned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from swarm.server.state.calls import Ending

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Over(Exception):
    """The work was cancelled because one of the endings occurred."""


async def until_over(endings: Sequence[Ending], work: Callable[[], Awaitable[Answer]]) -> Answer:
    """Return the result of `work`, or cancel it when one of the endings occurs. Raises: Over."""
    if any(ending.over for ending in endings):
        raise Over
    task, cut = asyncio.current_task(), False
    assert task is not None
    others = task.cancelling()

    def cut_off() -> None:
        nonlocal cut
        if not cut:
            cut = True
            task.cancel()

    for ending in endings:
        ending.heard.add(cut_off)
    try:
        return await work()
    except asyncio.CancelledError as error:
        if cut and task.uncancel() <= others:
            raise Over from error
        raise
    finally:
        for ending in endings:
            ending.heard.discard(cut_off)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a stream. `error` says why it failed; None if it did not."""

    error: BaseException | None


async def merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Yield the items of all streams as they arrive. The first error ends the merged stream; closing it closes all streams."""
    items: asyncio.Queue[Item | _End] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[Item, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                items.put_nowait(item)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    for task in tasks:
        task.add_done_callback(lambda done: items.put_nowait(_End(None if done.cancelled() else done.exception())))
    try:
        running = len(tasks)
        while running:
            item = await items.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                running -= 1
    finally:
        await _ended(tasks)


async def together(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines concurrently. The first error cancels the others and is raised."""
    if len(work) == 1:
        await work[0]
        return
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _ended(tasks)


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def closing(events: AsyncIterator[Item]) -> AsyncGenerator[AsyncIterator[Item], None]:
    """Close the stream as soon as the block ends, so that sampling stops."""
    try:
        yield events
    finally:
        if isinstance(events, AsyncGenerator):
            await events.aclose()
