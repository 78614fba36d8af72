"""The event loop that does the work of the synchronous clients, in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")

LEAVING_S = 10.0
"""How long an interrupted caller waits until what it began has been given back (Episode takes about twice GIVE_BACK_S)."""


class LoopThread:
    """One event loop for all synchronous clients of the process: it runs while any of them is open.

    One, because the members of a team are clients of different servers that act together.
    """

    _running: ClassVar[LoopThread | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._users = 0
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="swarm-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._leaving:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # raised to its caller; the others' work goes on
                self._loop.run_forever()

    @classmethod
    def enter(cls) -> LoopThread:
        """The loop, for one more user. Each `leave`s it once."""
        with cls._lock:
            if cls._running is None:
                cls._running = cls()
            cls._running._users += 1
            return cls._running

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Interrupting the caller cancels it, and waits until it has given back what it held."""
        begun: concurrent.futures.Future[asyncio.Task[T]] = concurrent.futures.Future()
        ended = threading.Event()

        def begin() -> None:
            try:
                task = self._loop.create_task(work)
                task.add_done_callback(lambda _: ended.set())
                begun.set_result(task)
            except BaseException as error:  # noqa: BLE001 - raised to the caller, who would wait for ever
                begun.set_exception(error)
                ended.set()

        self._refuse_own_thread(work)
        self._loop.call_soon_threadsafe(begin)
        try:
            ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(begun.result().cancel)
            ended.wait(LEAVING_S)
            raise
        return begun.result().result()

    def _refuse_own_thread(self, work: Coroutine[Any, Any, T]) -> None:
        """Raises: RuntimeError where waiting would be for ever."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a synchronous client cannot be used inside the event loop that does its work")

    def leave(self) -> None:
        with LoopThread._lock:
            self._users -= 1
            if self._users:
                return
            LoopThread._running = None
        self._leaving = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
