"""Group commit: many writers, one fsync. Whoever writes while the disk is busy is in the next commit."""

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
    """Writes changes in the order of `submit`. Used from one event loop.

    Rows are applied on the loop, where they cost little; only the commit, which waits for the disk, runs in a thread. (Many short
    statements in a thread would each have to win the interpreter lock back from a busy loop.)

    on_commit is called with the episodes whose ends are on disk, before any writer hears of it. on_failure is called, also
    before any writer hears of it, when a commit failed: nothing submitted and unanswered is on disk then.
    What it raises is the end of all writing, since nobody knows any more what is on disk: see `broken`.
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
        """Why nothing can be written any more; None while it can. Whatever is submitted then fails with it."""

    def submit(self, changes: Sequence[Change], closed: Sequence[str] = ()) -> asyncio.Future[None]:
        """A future that is done when the changes, and all before them, are on disk; or fails, and none of them is.

        closed: episodes whose ends are among the changes. Await it through `asyncio.shield` where the waiter may be cancelled.
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
        """Done when everything submitted so far is on disk."""
        if self.broken is not None:
            return self.submit(())
        if self._last is None:
            self._last = asyncio.get_running_loop().create_future()
            self._last.set_result(None)
        return self._last

    async def close(self) -> None:
        """Finish what was submitted, then stop the thread."""
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
                    self._fail(batch, error)  # a fault of ours: nobody may wait for an answer that never comes
                    raise
                else:
                    for write in batch:
                        if not write.done.done():
                            write.done.set_result(None)
        finally:
            self._draining = None

    def _fail(self, batch: list[_Write], error: BaseException) -> None:
        # What was queued meanwhile was decided on top of the batch that is lost, so it is lost too.
        lost, self._queue = batch + self._queue, []
        self._last = None
        try:
            self._store.rollback()
            self._on_failure(error)
        except Exception as worse:  # noqa: BLE001 - whatever it is, everyone who writes or waits gets it
            self.broken = worse
        finally:
            for write in lost:
                if not write.done.done():
                    write.done.set_exception(error)
