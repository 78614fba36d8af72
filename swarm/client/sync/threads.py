"""Plain functions in threads, waited for in an event loop. Knows no swarm."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

from swarm.client.tasks import plain

T = TypeVar("T")


def heard(work: Callable[[], T], whose: str) -> T:
    """`work`, so that what it raises reaches whoever waits in an event loop. whose: what it is called in an error."""
    try:
        return work()
    except StopIteration as error:
        raise plain(error, whose) from None


def in_its_own(work: Callable[[], T], whose: str) -> asyncio.Future[T]:
    """`work` in a new thread, which nobody waits for once the future is cancelled, and which keeps no process from ending."""
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            answer.set_result(heard(work, whose))
        except BaseException as error:  # noqa: BLE001 - it is raised to whoever waits
            answer.set_exception(error)

    awaited = asyncio.wrap_future(answer)
    threading.Thread(target=run, name=whose, daemon=True).start()
    return awaited
