"""Group commit: many writers share one fsync. Writes that arrive while the disk is busy go into the next commit."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from foundation.event_loop import take_exception
from swarm.protocol.errors import Refusal
from swarm.server.state.rows import Change
from swarm.server.storage.store import Store


class _Write(NamedTuple):
    changes: Sequence[Change]
    closed: Sequence[str]
    done: asyncio.Future[None]


class GroupCommit:
    """Writes changes in the order of `submit`. Use it from one event loop.

    Rows are applied on the loop, where they cost little; only the commit, which waits for the disk, runs in a thread. (If a thread
    ran the many short statements, it would have to win the interpreter lock back from a busy loop for each one.)

    `on_commit` is called with the episodes whose ends are on disk, before any writer is answered. `on_failure` is called when a
    commit has failed, also before any writer is answered: at that time no unanswered write is on disk. If `on_failure` raises, no
    more writes are accepted, because we do not know what is on disk: see `broken`.
    """

    def __init__(
        self, store: Store, on_commit: Callable[[list[str]], None], on_failure: Callable[[BaseException], None]
    ) -> None:
        self._store = store
        self._on_commit = on_commit
        self._on_failure = on_failure
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pool-commit")
        self._queue: list[_Write] = []
        self._draining: asyncio.Task[None] | None = None
        self._last: asyncio.Future[None] | None = None
        self.broken: Exception | None = None
        """The error that stopped all writing, and with which later writes fail; None while writing works."""

    def submit(self, changes: Sequence[Change], closed: Sequence[str] = ()) -> asyncio.Future[None]:
        """Submit changes. The future is done when they and all earlier changes are on disk; if it fails, none of these are on disk.

        `closed` lists the episodes whose ends are among the changes. If the waiter may be cancelled, await the future through
        `asyncio.shield`.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(take_exception)
        if self.broken is not None:
            future.set_exception(self.broken)
            return future
        self._queue.append(_Write(changes, closed, future))
        self._last = future
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(), name="pool-commit")
        return future

    def last(self) -> asyncio.Future[None]:
        """Return a future that is done when everything submitted so far is on disk."""
        if self.broken is not None:
            return self.submit(())
        if self._last is None:
            self._last = asyncio.get_running_loop().create_future()
            self._last.set_result(None)
        return self._last

    async def close(self) -> None:
        """Finish all submitted writes, then stop the thread."""
        while self._draining is not None:
            await asyncio.shield(self._draining)
        self._thread.shutdown()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._queue:
                batch, self._queue = self._queue, []
                try:
                    self._store.begin()
                    for write in batch:
                        self._store.apply(write.changes)
                    await loop.run_in_executor(self._thread, self._store.commit)
                    self._on_commit([episode_id for write in batch for episode_id in write.closed])
                except (Refusal, sqlite3.Error) as error:
                    self._fail(batch, error)
                except BaseException as error:
                    self._fail(batch, error)  # an internal error: fail the writers, or they would wait forever
                    raise
                else:
                    for write in batch:
                        if not write.done.done():
                            write.done.set_result(None)
        finally:
            self._draining = None

    def _fail(self, batch: list[_Write], error: BaseException) -> None:
        # Later writes in the queue were decided on top of the lost batch, so they are lost too.
        lost, self._queue = batch + self._queue, []
        self._last = None
        try:
            self._store.rollback()
            self._on_failure(error)
        except Exception as worse:  # noqa: BLE001 - whatever the error, all current and later writers get it
            self.broken = worse
        finally:
            for write in lost:
                if not write.done.done():
                    write.done.set_exception(error)
