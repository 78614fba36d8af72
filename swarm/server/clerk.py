"""Behind the service: keeps the book and the pool in step, lets waiting claims in, watches limits, tells whoever must know.

Every change goes through `carry_out` or `turn`: decided in memory, written in order, and lost from both when the write fails.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from foundation.clock import Clock
from foundation.event_loop import take_exception, within
from foundation.ids import Ids
from swarm.engine.seam import EngineHealth, EngineInfo
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.status import CheckpointRef, Failure, Hang, Phase, ServerStatus
from swarm.server.events import Feed, Throughput
from swarm.server.state.book import Book
from swarm.server.state.episodes import GrantedLease
from swarm.server.state.leases import LeaseClock, LiveEpisode
from swarm.server.state.rows import LIVED_AT, PutMeta
from swarm.server.state.runs import refused_now
from swarm.server.state.standstill import LOOK_EVERY_S, stirs, waiting_for
from swarm.server.state.state import Restoration, Situation
from swarm.server.state.waiting import Waiter, Waiting
from swarm.server.storage.commit import GroupCommit
from swarm.server.storage.reader import PoolReader
from swarm.server.storage.reading import ReadThread
from swarm.server.storage.store import PoolStore

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
PAUSE_AFTER_FAILED_WRITE_S = 1.0
RECORD_LIMIT_S = 2.0
"""So long an episode's end waits for the records of calls that it broke off."""
UNNOTICED_S = 600.0
"""No hang of the engine stays unnoticed so long after a client gave up on it."""
POOL = "the pool"
"""What there may be no room for."""


class Clerk:
    """One per server, made with the running event loop."""

    def __init__(self, store: PoolStore, info: EngineInfo, *, clock: Clock, ids: Ids) -> None:
        self.store = store
        self.clock = clock
        self.waiting = Waiting()
        self.throughput = Throughput(clock)
        self.failed_calls: Counter[str] = Counter()
        """Calls that failed on the server's side since it started, by reason."""
        self.feed = Feed(clock, lambda: self.status().model_dump(mode="json"))
        self.situation = Situation(lease_clock=LeaseClock(clock))
        self._ids = ids
        self._info = info
        self._book, self.server_id = self._first_load()
        self._commit = GroupCommit(store, self._reload)
        self._reads = ReadThread(store.path, "pool-read")
        self._searches = ReadThread(store.path, "pool-search")
        self.doubt = asyncio.Event()
        """Set when a prepared episode must ask its decider."""
        self.call_closed = asyncio.Event()
        """Set at the end of each call."""
        self._work = asyncio.Event()
        self._rearm = asyncio.Event()
        self._armed_for: float | None = None
        self._watch: asyncio.Task[None] | None = None
        self._quiet: asyncio.Task[None] | None = None
        self._checkpoints_wanted: list[tuple[str, int, asyncio.Future[CheckpointRef]]] = []
        self._restored: asyncio.Future[None] | None = None
        self._shown: tuple[Any, ...] = ()

    @property
    def book(self) -> Book:
        """The book as it is now. Another object after a failed write: do not keep it over an await."""
        return self._book

    def _first_load(self) -> tuple[Book, str]:
        """The book after a start of the process: what was open is closed, on disk too, before anyone asks."""
        snapshot = self.store.read.snapshot()
        book = Book.load(snapshot, info=self._info, clock=self.clock, ids=self._ids, situation=self.situation)
        run = book.state.run
        if run is not None and not run.row.released and (why := refused_now(run)) is not None:
            _LOG.warning("%s", why)
        self.situation.lived_at = self.store.read.lived_at()
        for row in self.store.read.suspected(self.situation.lived_at):
            calls = self.store.read.calls(row.seq) or []
            book.episodes.fail_unsettled(row, calls, self.situation.lived_at)
        server_id = snapshot.server_id or self._ids.new("srv")
        self.store.write([*book.state.take_changes(), PutMeta("server_id", server_id)])
        book.state.closing.clear()
        book.state.take_closed()
        return book, server_id

    def _reload(self, error: BaseException) -> None:
        """A write failed: the book goes back to what is on disk. Open leases and their calls are carried over."""
        self._work.set()  # whoever waits for work looks at the book anew, or hears that there is none
        state = self._book.state
        self._book = Book.load(
            self.store.read.snapshot(),
            info=self._info,
            clock=self.clock,
            ids=self._ids,
            situation=self.situation,
            live={**state.closing, **state.live},
        )
        if isinstance(error, Refusal) and error.code is ErrorCode.STORAGE_FULL:
            self.storage(POOL, error.detail)

    def start(self) -> None:
        """Begin to watch limits, and what the run stands still for."""
        self._watch = asyncio.create_task(self._watch_limits(), name="limits")
        self._watch.add_done_callback(lambda _: self._work.set())
        self._quiet = asyncio.create_task(self._watch_quiet(), name="quiet")
        self._quiet.add_done_callback(lambda _: self._work.set())

    async def close(self) -> None:
        """Stop the timers, finish the writes under way, close the pool. Waiting claims get not_rolling."""
        self.waiting.dismiss(Refusal(ErrorCode.NOT_ROLLING, "the server is shutting down", retry_after_s=5.0))
        self._settle_checkpoints(closing=True)
        if self.situation.restoration is not None:
            self.restored(Refusal(ErrorCode.NOT_ROLLING, "the server is shutting down", retry_after_s=5.0))
        for watch in (self._watch, self._quiet):
            if watch is not None:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
        await self.feed.close()
        await self._commit.close()
        self._reads.close()
        self._searches.close()
        self.store.close()

    def status(self) -> ServerStatus:
        return self._book.status(self.server_id, revision=self.feed.revision, tokens_per_s=self.throughput.per_s())

    async def settled(self) -> None:
        """Return when everything decided so far is on disk. Codes: storage_full."""
        await asyncio.shield(self._commit.last())

    async def break_off_calls(self, episode_id: str, lease: str) -> None:
        """Stop the open calls of an episode that is about to end, and wait until they are recorded. Codes: lease_lost."""
        live = self._book.state.live.get(episode_id)
        if live is None or not live.open_since:
            return
        calls = set(live.open_since)
        try:
            self._book.episodes.break_off(episode_id, lease)
        finally:
            self.turn()
        await within(self.clock, RECORD_LIMIT_S, self._until_closed(live, calls))

    async def _until_closed(self, live: LiveEpisode, calls: set[int]) -> None:
        while not calls.isdisjoint(live.open_since):
            self.call_closed.clear()
            await self.call_closed.wait()

    def want_checkpoint(self, run_id: str) -> asyncio.Future[CheckpointRef]:
        """Ask the training loop for a checkpoint of the current run's newest step."""
        run = self._book.state.run
        assert run is not None
        answer: asyncio.Future[CheckpointRef] = asyncio.get_running_loop().create_future()
        self._checkpoints_wanted.append((run_id, run.step, answer))
        self.situation.checkpoint_wanted = run.step > run.kept_step
        self._book.state.stirred = True
        self.turn()
        return answer

    def want_restoration(self, wish: Restoration) -> asyncio.Future[None]:
        """Ask the training loop to go back to a checkpoint; done when it has. Codes: server_busy, and those of the restoration."""
        known = self.situation.restoration
        if known is not None and (known != wish or self._restored is None):
            detail = f"run {known.run_id} is being restored to step {known.step} already; wait until it is"
            raise Refusal(ErrorCode.SERVER_BUSY, detail, run_id=known.run_id, holder=known.by)
        if known is None or self._restored is None:
            self.situation.restoration = wish
            self._restored = asyncio.get_running_loop().create_future()
            self._restored.add_done_callback(take_exception)
        self._book.state.stirred = True
        self.turn()
        return self._restored

    def restored(self, refusal: Refusal | None) -> None:
        """The wish was carried out, or cannot be."""
        answer, self._restored, self.situation.restoration = self._restored, None, None
        if answer is not None and not answer.done():
            if refusal is None:
                answer.set_result(None)
            else:
                answer.set_exception(refusal)

    # -- the training loop's ----------------------------------------------------------------------------------------------

    async def carry_out(self, action: Callable[[Book], T]) -> T:
        """Do something to the book; returns when it is on disk. Codes: the action's own, storage_full."""
        try:
            result = action(self._book)
        finally:
            written = self.turn()
        await asyncio.shield(written)
        return result

    async def read(self, query: Callable[[PoolReader], T]) -> T:
        """A query of the training loop's or about a run's steps, off the event loop."""
        return await self._reads.ask(query)

    async def search(self, query: Callable[[PoolReader], T]) -> T:
        """A query that may look at every episode, which takes seconds where there are a million: no other waits for it."""
        return await self._searches.ask(query)

    async def wait_for_work(self, until: float) -> None:
        """Return when something happened that the training loop should look at, or at `until` (Unix time, may be infinite).

        Raises: what ended a watch, which must never end by itself; what broke the pool.
        """
        if self._commit.broken is not None:
            raise self._commit.broken
        for watch in (self._watch, self._quiet):
            if watch is not None and watch.done():
                watch.result()
        left_s = until - self.clock.now()
        await within(self.clock, None if left_s == math.inf else left_s, self._work.wait())
        self._work.clear()

    def storage(self, what: str, problem: str | None) -> None:
        """Word from whoever writes `what`: why there is no room for it, or None when there was. Watchers hear of a change."""
        known = self.situation.no_room
        if problem is None:
            known.pop(what, None)
        elif what not in known:
            known[what] = Failure(reason=problem, since=self.clock.now())
        self._publish()

    def set_phase(self, phase: Phase) -> None:
        self.situation.phase = phase
        self.turn()

    def engine_opened(self, run_id: str | None, directory: Path | None = None) -> None:
        """The engine serves this run's weights at its newest step; None: those of no run."""
        situation = self.situation
        if run_id != situation.opened_run:
            situation.collecting_since = self.clock.monotonic()
        self._stirred()
        situation.opened_run = run_id
        situation.run_directory = str(directory or "")
        situation.serve_again = False
        self._book.state.turned = self._book.state.stirred = True
        self.turn()

    def engine_health(self, health: EngineHealth) -> None:
        """The engine's word on itself. While it is not ready, leases stand still."""
        situation = self.situation
        situation.engine_failures = health.failures
        self._note_hang(health)
        if health.ready:
            situation.lease_clock.go()
            situation.engine_failed = None
        else:
            situation.lease_clock.stop()
            situation.serve_again = situation.opened_run is not None
            if health.failed_for_good:
                reason = health.reason or "the engine gave no reason"
                situation.engine_failed = Failure(reason=reason, since=self.clock.now())
                if situation.restoration is not None:
                    self.restored(Refusal(ErrorCode.ENGINE_FAILED, f"the engine failed for good: {reason}"))
        situation.engine_ready = health.ready
        self._book.state.turned = self._book.state.stirred = True
        self._rearm.set()
        self.turn()

    def engine_lived(self, at: float) -> None:
        """It lived at that Unix time. Written only where somebody gave up on it before, and seldom."""
        situation = self.situation
        if situation.lived_at < situation.suspected_at <= at:
            situation.lived_at = at
            self._book.state.changes.append(PutMeta(LIVED_AT, repr(at)))
            self.turn()

    def _note_hang(self, health: EngineHealth) -> None:
        situation, known = self.situation, self.situation.hang
        if health.hung_since is not None and (known is None or known.since != health.hung_since):
            reason = health.reason or "a process of the engine hangs"
            phase, now = situation.shown_phase, self.clock.now()
            situation.hang = Hang(reason=reason, phase=phase, since=health.hung_since, found_at=now)
        elif health.ready and known is not None and known.over_at is None:
            situation.hang = known.model_copy(update={"over_at": self.clock.now()})

    # -- after every change -------------------------------------------------------------------------------------------

    def turn(self) -> asyncio.Future[None]:
        """Give what was decided to the pool, let waiting claims in, tell whoever must know. Returns when all of it is on disk."""
        state = self._book.state
        granted: list[tuple[Waiter, GrantedLease]] = []
        while state.turned:
            state.turned = False
            state.stirred = True
            granted += self.waiting.admit(self._book.episodes.claim)
        written = self._submit()
        for waiter, lease in granted:
            written.add_done_callback(partial(_answer, waiter, lease))
        if state.stirred:
            state.stirred = False
            self._work.set()
            self._settle_checkpoints()
        if state.doubted:
            state.doubted = False
            self.doubt.set()
        soonest = state.next_deadline
        earlier = soonest is not None and (self._armed_for is None or soonest < self._armed_for)
        if earlier and self.situation.lease_clock.runs:
            self._rearm.set()
        self._publish()
        return written

    def _submit(self) -> asyncio.Future[None]:
        state = self._book.state
        changes = state.take_changes()
        if not changes:
            return self._commit.last()
        if stirs(changes):
            self._stirred()
        written = self._commit.submit(changes)
        if POOL in self.situation.no_room:
            written.add_done_callback(self._room_again)
        closed = state.take_closed()
        if closed:
            written.add_done_callback(partial(_forget, state.closing, closed))
        self.feed.changed(at_once=False)
        return written

    def _stirred(self) -> None:
        """The run does not stand still."""
        self.situation.quiet_since, self.situation.waiting_for = self.clock.now(), None

    def _room_again(self, written: asyncio.Future[None]) -> None:
        if not written.cancelled() and written.exception() is None:
            self.storage(POOL, None)

    def _publish(self) -> None:
        state = self._book.state
        run = state.run
        shown = (
            state.passed(),
            self.situation.shown_phase,
            self.situation.engine_ready,
            self.situation.engine_failures,
            self.situation.hang,
            self.situation.waiting_for,
            self.situation.opened_run,
            state.serving,
            tuple(self.situation.no_room),
            run
            and (
                run.run_id,
                run.row.branch,
                run.step,
                run.config_version,
                run.row.status,
                run.row.released,
                run.kept_step,
            ),
        )
        if shown != self._shown:
            self._shown = shown
            self.feed.changed(at_once=True)
        lines, state.log = state.log, []
        for line in lines:
            self.feed.log(line)

    def _settle_checkpoints(self, *, closing: bool = False) -> None:
        """Answer those who wait for a checkpoint, once it is written or cannot come."""
        run = self._book.state.run
        still: list[tuple[str, int, asyncio.Future[CheckpointRef]]] = []
        for run_id, step, answer in self._checkpoints_wanted:
            if answer.done():
                continue
            known = run if run is not None and run.run_id == run_id else None
            if known is not None and known.kept_step >= step and self.situation.opened_run == run_id:
                answer.set_result(CheckpointRef(step=known.kept_step, path=self.situation.run_directory))
            elif closing or known is None or known.row.released or known.step < step or self.situation.engine_failed:
                what = f"run {run_id} ended or was restored, or the engine failed"
                detail = f"{what}, before the checkpoint of step {step} was written"
                answer.set_exception(Refusal(ErrorCode.ENGINE_FAILED, detail))
            else:
                still.append((run_id, step, answer))
        self._checkpoints_wanted = still

    async def _watch_quiet(self) -> None:
        """See from time to time whether the run stands still, and for what."""
        while True:
            await self.clock.sleep(LOOK_EVERY_S)
            situation = self.situation
            found = waiting_for(self._book.state, situation.quiet_since)
            if found is not None and situation.waiting_for is None:
                who = f"client {found.client_id}" if found.client_id is not None else "a client: its slots are free"
                self.feed.log(f"the run waits for {who}, task {found.task_id!r}")
            situation.waiting_for = found
            if situation.engine_ready and situation.suspected_at <= self.clock.now() - UNNOTICED_S:
                self.engine_lived(situation.suspected_at)
            self._publish()

    async def _watch_limits(self) -> None:
        """Close what runs out, when it runs out."""
        while True:
            self._rearm.clear()
            state = self._book.state
            self._armed_for = state.next_deadline if self.situation.lease_clock.runs else None
            wait_s = None if self._armed_for is None else self._armed_for - state.lease_time
            await within(self.clock, wait_s, self._rearm.wait())
            try:
                await self.carry_out(lambda book: book.expire())
            except Refusal:  # the disk is full: everything is as before, and will be due again
                await self.clock.sleep(PAUSE_AFTER_FAILED_WRITE_S)


def _answer(waiter: Waiter, lease: GrantedLease, written: asyncio.Future[None]) -> None:
    """A waiting claim is answered once it is on disk."""
    if waiter.answer.done():
        return
    error = written.exception()
    if error is None:
        waiter.answer.set_result(lease)
    else:
        waiter.answer.set_exception(error)


def _forget(closing: dict[str, Any], closed: Sequence[str], written: asyncio.Future[None]) -> None:
    """What is on disk need not be in memory."""
    if not written.cancelled() and written.exception() is None:
        for episode_id in closed:
            closing.pop(episode_id, None)
