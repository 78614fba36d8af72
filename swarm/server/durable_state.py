"""Keeps the state in memory and on disk in step: a command is applied immediately, and its changes are committed before it is answered.

If changes cannot be written, the state goes back to what is on disk; open leases and their calls are kept.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from foundation.clock import Clock
from foundation.ids import Ids
from swarm.engine.seam import EngineInfo
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.status import ServerStatus
from swarm.server.events import Throughput, Watchers
from swarm.server.state import episodes, health
from swarm.server.state.machine import Command, Outcome, apply, expire, load
from swarm.server.state.rows import Change, PutMeta
from swarm.server.state.runs import refused_now
from swarm.server.state.server_state import LogLine, Moment, ServerState
from swarm.server.state.status import status as server_status
from swarm.server.state.status import watched
from swarm.server.storage.commit import GroupCommit
from swarm.server.storage.reader import Reader, ReadThread
from swarm.server.storage.store import Store
from swarm.server.timers import Timers

T = TypeVar("T")
POOL = "the pool"
"""Name under which full-disk reports mention the database."""


class DurableState:
    """One server's state, in memory and on disk. Create it in a running event loop.

    `wake` is called with each command's outcome and the future of its write; `on_failure` is called when a write or a timer
    fails. A command may raise a Refusal. After STORAGE_FULL, nothing has changed in memory or on disk.
    """

    def __init__(
        self,
        store: Store,
        info: EngineInfo,
        *,
        clock: Clock,
        ids: Ids,
        allow_algorithms: bool,
        wake: Callable[[Outcome[object], asyncio.Future[None]], None],
        on_failure: Callable[[], None],
    ) -> None:
        self.state = ServerState(info=info, ids=ids, allow_algorithms=allow_algorithms)
        """Read-only for callers; only commands change it."""
        self.watchers = Watchers(clock, lambda: self.current_status().model_dump(mode="json"))
        self.throughput = Throughput(clock)
        self.doubt = asyncio.Event()
        """Set when the decider of a prepared episode has to be asked for the outcome."""
        self.reader = store.read
        """Reads the disk in the event loop; only for cheap queries."""
        self._clock = clock
        self._store = store
        self._wake = wake
        self._on_failure = on_failure
        self._commits = GroupCommit(store, self._committed, self._reload)
        self._reads = ReadThread(store.path, "pool-read")
        self._searches = ReadThread(store.path, "pool-search")
        self._timers = Timers(
            clock,
            due=self._due,
            expire=lambda: self.carry_out(expire),
            look_around=self._look_around,
            on_end=on_failure,
        )
        self._unwritten: tuple[list[Change], list[str]] = ([], [])
        """Changes made by a reload, and the episodes that it closed. They are written along with the next command."""
        self._shown: tuple[object, ...] = ()
        self.server_id = self._first_load(ids)

    async def start(self) -> None:
        """Start both timers: one acts on whatever expires, the other checks every few seconds what the run waits for."""
        self._timers.start()

    def check(self) -> None:
        """Raise the error that ended a timer or broke the storage, if there is one."""
        if self._commits.broken is not None:
            raise self._commits.broken
        self._timers.check()

    async def close(self) -> None:
        """Stop the timers, finish pending writes, and close the storage."""
        await self._timers.close()
        await self.watchers.close()
        await self._commits.close()
        self._reads.close()
        self._searches.close()
        self._store.close()

    async def carry_out(self, command: Command[T]) -> T:
        """Apply a command, and return when its changes are on disk. Codes: the command's own, storage_full."""
        outcome, written = self.apply(command)
        reply = outcome.answer()
        await asyncio.shield(written)
        return reply

    def tell(self, command: Command[T]) -> T:
        """Apply a command and return its reply without waiting for the disk. Only for replies that do not promise durability."""
        return self.apply(command)[0].answer()

    async def settled(self) -> None:
        """Wait until everything decided so far is on disk. Codes: storage_full."""
        await asyncio.shield(self._commits.last())

    async def read(self, query: Callable[[Reader], T]) -> T:
        """Run a query in a thread. For the training loop, and for queries about a run's steps."""
        return await self._reads.ask(query)

    async def search(self, query: Callable[[Reader], T]) -> T:
        """Run a query that may scan every episode, in a separate thread so that `read` does not wait for it."""
        return await self._searches.ask(query)

    def _now(self) -> Moment:
        return Moment(self._clock.now(), self._clock.monotonic())

    def apply(self, command: Command[T]) -> tuple[Outcome[T], asyncio.Future[None]]:
        """Apply a command now and wake its waiters. The future is done when its changes, and all before them, are on disk."""
        outcome = apply(self.state, command, self._now())
        written = self._write(outcome.changes, outcome.closed)
        self._wake(outcome, written)
        self._timers.arm()
        self._publish(outcome.log)
        return outcome, written

    def _write(self, changes: list[Change], closed: list[str]) -> asyncio.Future[None]:
        if self._unwritten[0]:
            changes, closed = self._unwritten[0] + changes, self._unwritten[1] + closed
            self._unwritten = ([], [])
        if not changes:
            return self._commits.last()
        written = self._commits.submit(changes, closed)
        self.watchers.changed(at_once=False)
        return written

    def _committed(self, closed: list[str]) -> None:
        """Note that a write succeeded: the disk has room, and the ends of the episodes in `closed` are on disk."""
        if POOL in self.state.situation.no_room:
            self.tell(lambda t: health.storage(t, POOL, None))
        if closed:
            self.tell(lambda t: episodes.forget(t, closed))

    def _look_around(self) -> None:
        self.tell(health.look_around)
        self.watchers.sum_up()

    def _publish(self, lines: Sequence[LogLine]) -> None:
        shown = watched(self.state, self._now())
        if shown != self._shown:
            self._shown = shown
            self.watchers.changed(at_once=True)
        for line in lines:
            self.watchers.log(line.text, line.level, one_of=line.one_of)

    def _first_load(self, ids: Ids) -> str:
        """Load the state and close, also on disk, the episodes that the last process left open. Return the server's id."""
        snapshot = self.reader.snapshot()
        loaded = load(self.state, snapshot, self._now(), self.reader.suspected(snapshot.lived_at))
        run = self.state.run
        if run is not None and not run.row.released:
            closed = f"episodes closed as server_restarted: {len(loaded.closed)}"
            self.watchers.log(f"run {run.run_id} ({run.row.status}) goes on at step {run.step}; {closed}")
            if (why := refused_now(run)) is not None:
                self.watchers.log(why, "warning")
        server_id = snapshot.server_id or ids.new("srv")
        self._store.write([*loaded.changes, PutMeta("server_id", server_id)])
        apply(self.state, lambda t: episodes.forget(t, loaded.closed), self._now())
        return server_id

    def _reload(self, error: BaseException) -> None:
        """After a failed write, go back to the state on disk."""
        self._on_failure()  # the training loop then checks the state again, or ends if the storage is broken
        loaded = load(self.state, self.reader.snapshot(), self._now())
        self._unwritten = (loaded.changes, loaded.closed)
        if loaded.in_doubt:
            self.doubt.set()
        if isinstance(error, Refusal) and error.code is ErrorCode.STORAGE_FULL:
            health.storage(loaded, POOL, error.detail)
        self._publish(loaded.log)

    def _due(self) -> tuple[float, float]:
        lease_clock = self.state.situation.lease_clock
        deadline = math.inf if lease_clock.running_since is None else self.state.next_deadline
        return deadline, lease_clock.time(self._clock.monotonic())

    def current_status(self) -> ServerStatus:
        rate = self.throughput.per_s()
        return server_status(
            self.state, self._now(), self.server_id, revision=self.watchers.revision, tokens_per_s=rate
        )
