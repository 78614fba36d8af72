"""The event loop that does the work of the synchronous clients, in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from swarm.client.answers import GIVE_BACK_S

T = TypeVar("T")

LEAVING_S = 10.0
"""How long an interrupted caller waits until what it began has been given back (Episode takes about twice GIVE_BACK_S)."""

CLOSED = "this client is closed"


class LoopThread:
    """One event loop for all synchronous clients of the process: it runs while any of them is open.

    One, because the members of a team are clients of different servers that act together. A process that was forked begins
    with none: the thread is its parent's.
    """

    _running: ClassVar[LoopThread | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _forks_known: ClassVar[bool] = False

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._users = 0
        self._process = os.getpid()
        self._leaving = False
        self._stopped = False
        self._closing: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._failure: BaseException | None = None
        """What went wrong while the last client was closed."""
        self._calls: dict[asyncio.Task[Any], threading.Event] = {}
        """What threads wait for, with the event that wakes each."""
        self._thread = threading.Thread(target=self._run, name="swarm-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # raised to its caller; the others' work goes on
                self._loop.run_forever()
        last = self._loop.create_task(self._wind_up())
        try:
            while not last.done():
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self._loop.run_until_complete(last)
        finally:
            self._loop.close()
            for ended in self._calls.values():
                ended.set()

    def _stop(self) -> None:
        self._stopped = True
        self._loop.stop()

    async def _wind_up(self) -> None:
        """What threads wait for is cancelled, and gives back what it held; then what is left; then the last client is closed."""
        try:
            await _cancel(set(self._calls), LEAVING_S)
            await _cancel(asyncio.all_tasks() - {asyncio.current_task()}, GIVE_BACK_S)
            await self._loop.shutdown_asyncgens()
            if self._closing is not None:
                await self._closing()
        except BaseException as error:  # noqa: BLE001 - raised to the thread that closes
            self._failure = error

    @classmethod
    def enter(cls) -> LoopThread:
        """The loop, for one more user. Each `leave`s it once."""
        with cls._lock:
            if not cls._forks_known:
                os.register_at_fork(after_in_child=cls._begin_anew)
                cls._forks_known = True
            if cls._running is None:
                cls._running = cls()
            cls._running._users += 1
            return cls._running

    @classmethod
    def _begin_anew(cls) -> None:
        cls._running, cls._lock = None, threading.Lock()

    @property
    def inherited(self) -> bool:
        """Whether this is the copy that a forked process has of its parent's."""
        return self._process != os.getpid()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Interrupting the caller cancels it, and waits until it has given back what it held."""
        begun: concurrent.futures.Future[asyncio.Task[T]] = concurrent.futures.Future()
        ended = threading.Event()

        def begin() -> None:
            try:
                task = self._loop.create_task(work)
                self._calls[task] = ended
                task.add_done_callback(lambda task: self._calls.pop(task).set())
                begun.set_result(task)
            except BaseException as error:  # noqa: BLE001 - raised to the caller, who would wait for ever
                begun.set_exception(error)
                ended.set()

        self._refuse_waiting_for_ever(work)
        with LoopThread._lock:
            if self._leaving:
                work.close()
                raise RuntimeError(CLOSED)
            self._loop.call_soon_threadsafe(begin)
        try:
            ended.wait()
        except BaseException:
            # closed is the loop where another thread closed the last client meanwhile
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(begun.result().cancel)
            ended.wait(LEAVING_S)
            raise
        task = begun.result()
        if not task.done():
            raise RuntimeError(CLOSED)
        try:
            return task.result()
        except asyncio.CancelledError:
            if self._leaving:
                raise RuntimeError(CLOSED) from None
            raise

    def _refuse_waiting_for_ever(self, work: Coroutine[Any, Any, T]) -> None:
        """Raises: RuntimeError where nobody would do the work."""
        if self.inherited:
            work.close()
            raise RuntimeError(
                "this client is of the process that forked this one, which has to make a client of its own"
            )
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a synchronous client cannot be used inside the event loop that does its work")

    def leave(self, closing: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """closing: what the user closes, once nothing of the loop's work needs it any more. Raises: what closing raises."""
        with LoopThread._lock:
            last = self._users == 1
            if last or closing is None:
                self._users -= 1
            if last:
                LoopThread._running = None
                self._leaving, self._closing = True, closing
                self._loop.call_soon_threadsafe(self._stop)
        if last:
            self._thread.join()
            if self._failure is not None:
                raise self._failure
        elif closing is not None:
            try:
                self.call(closing())
            finally:
                self.leave()


async def _cancel(tasks: set[asyncio.Task[Any]], within_s: float) -> None:
    """Cancel them and wait until they have ended, for `within_s` at most."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=within_s)
