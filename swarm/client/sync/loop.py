"""The event loop that does the work of the synchronous clients, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


class LoopThread:
    """One event loop for all synchronous clients of the process: it runs while any of them is open.

    One, because the members of a team are clients of different servers that act together.
    """

    _running: ClassVar[LoopThread | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._users = 0
        self._thread = threading.Thread(target=self._loop.run_forever, name="swarm-client", daemon=True)
        self._thread.start()

    @classmethod
    def enter(cls) -> LoopThread:
        """The loop, for one more user. Each `leave`s it once."""
        with cls._lock:
            if cls._running is None:
                cls._running = cls()
            cls._running._users += 1
            return cls._running

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; interrupting the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def leave(self) -> None:
        with LoopThread._lock:
            self._users -= 1
            if self._users:
                return
            LoopThread._running = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
