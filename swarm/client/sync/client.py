"""One server, for plain scripts and threads: the synchronous twin of `swarm.client.SwarmClient`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sized
from types import TracebackType
from typing import Any, Self

from swarm.client import client as asynchronous
from swarm.client import episode as episodes
from swarm.client.crew import CrewReport
from swarm.client.sync.episode import Episode
from swarm.client.sync.loop import LoopThread
from swarm.client.sync.threads import DaemonThread, begin_in_thread
from swarm.client.tasks import Outcome, Rollout, Task
from swarm.client.wire import Patience
from swarm.protocol.episodes import (
    Cause,
    DropReason,
    EpisodeClaim,
    EpisodeGrant,
    EpisodeKind,
    EpisodeReceipt,
    EpisodeResult,
    EpisodeState,
    EpisodeTrace,
    LedgerEntry,
    LedgerPage,
    TaskProgress,
)
from swarm.protocol.runspec import RunSpec
from swarm.protocol.status import CheckpointRef, RunReport, ServerStatus
from swarm.protocol.summary import LedgerSummary
from swarm.protocol.teams import EpisodePreparation, EpisodeResolution, TeamReceipt

SyncRollout = Callable[["Episode", Task], Outcome | float | None]


class SwarmClient:
    """One server, as one client. Use as a context manager; see `swarm.client.SwarmClient`."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        client_id: str | None = None,
        client_version: str = "0",
        patience: Patience | None = None,
    ) -> None:
        self.thread = LoopThread.enter()
        self._open = True

        async def make() -> asynchronous.SwarmClient:
            return asynchronous.SwarmClient(
                url, token, client_id=client_id, client_version=client_version, patience=patience
            )

        try:
            self.inner = self.thread.call(make())
        except BaseException:
            self.thread.leave()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Once or more often."""
        if not self._open:
            return
        self._open = False
        if not self.thread.inherited:
            self.thread.leave(self.inner.close)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def client_id(self) -> str:
        return self.inner.client_id

    def status(self, since: int | None = None, wait_s: float = 30.0) -> ServerStatus:
        return self.thread.call(self.inner.status(since, wait_s))

    def statuses(self, wait_s: float = 30.0) -> Iterator[ServerStatus]:
        status = self.status()
        while True:
            yield status
            status = self.status(since=status.revision, wait_s=wait_s)

    def start_run(self, spec: RunSpec, idempotency_key: str | None = None) -> RunReport:
        return self.thread.call(self.inner.start_run(spec, idempotency_key))

    def run(self, run_id: str, since_step: int = 0) -> RunReport:
        return self.thread.call(self.inner.run(run_id, since_step))

    def patch_run(self, run_id: str, patch: dict[str, Any], config_version: int | None = None) -> RunReport:
        return self.thread.call(self.inner.patch_run(run_id, patch, config_version))

    def stop_run(self, run_id: str) -> RunReport:
        return self.thread.call(self.inner.stop_run(run_id))

    def checkpoint(self, run_id: str) -> CheckpointRef:
        return self.thread.call(self.inner.checkpoint(run_id))

    def restore(self, run_id: str, step: int, idempotency_key: str | None = None) -> RunReport:
        return self.thread.call(self.inner.restore(run_id, step, idempotency_key))

    def quarantine(self, run_id: str, client_version: str, *, reason: str = "", quarantined: bool = True) -> RunReport:
        wish = self.inner.quarantine(run_id, client_version, reason=reason, quarantined=quarantined)
        return self.thread.call(wish)

    def current_run_id(self) -> str:
        return self.thread.call(self.inner.current_run_id())

    def ledger(
        self,
        *,
        run_id: str | None = None,
        step: int | None = None,
        client_id: str | None = None,
        task_id: str | None = None,
        kind: EpisodeKind | None = None,
        reason: DropReason | None = None,
        state: EpisodeState | None = None,
        cause: Cause | None = None,
        after: str | None = None,
    ) -> Iterator[LedgerEntry]:
        pages = self.inner.ledger(
            run_id=run_id,
            step=step,
            client_id=client_id,
            task_id=task_id,
            kind=kind,
            reason=reason,
            state=state,
            cause=cause,
            after=after,
        )

        async def following() -> LedgerEntry | None:
            return await anext(pages, None)

        while (entry := self.thread.call(following())) is not None:
            yield entry

    def ledger_page(
        self,
        *,
        run_id: str | None = None,
        step: int | None = None,
        client_id: str | None = None,
        task_id: str | None = None,
        kind: EpisodeKind | None = None,
        reason: DropReason | None = None,
        state: EpisodeState | None = None,
        cause: Cause | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> LedgerPage:
        return self.thread.call(
            self.inner.ledger_page(
                run_id=run_id,
                step=step,
                client_id=client_id,
                task_id=task_id,
                kind=kind,
                reason=reason,
                state=state,
                cause=cause,
                after=after,
                limit=limit,
            )
        )

    def entry(self, episode_id: str, patience: Patience | None = None) -> LedgerEntry:
        return self.thread.call(self.inner.entry(episode_id, patience))

    def summary(
        self,
        *,
        run_id: str | None = None,
        step: int | None = None,
        client_id: str | None = None,
        task_id: str | None = None,
        kind: EpisodeKind | None = None,
        reason: DropReason | None = None,
        state: EpisodeState | None = None,
        cause: Cause | None = None,
    ) -> LedgerSummary:
        return self.thread.call(
            self.inner.summary(
                run_id=run_id,
                step=step,
                client_id=client_id,
                task_id=task_id,
                kind=kind,
                reason=reason,
                state=state,
                cause=cause,
            )
        )

    def trace(self, episode_id: str, *, text: bool = False) -> EpisodeTrace:
        return self.thread.call(self.inner.trace(episode_id, text=text))

    def tasks(
        self, *, run_id: str | None = None, client_id: str | None = None, mix: str | None = None
    ) -> list[TaskProgress]:
        return self.thread.call(self.inner.tasks(run_id=run_id, client_id=client_id, mix=mix))

    def claim(self, claim: EpisodeClaim) -> EpisodeGrant:
        return self.thread.call(self.inner.claim(claim))

    def end(self, episode_id: str, result: EpisodeResult) -> EpisodeReceipt:
        return self.thread.call(self.inner.end(episode_id, result))

    def abort(self, episode_id: str, lease: str, reason: str, cause: Cause | None = None) -> LedgerEntry:
        return self.thread.call(self.inner.abort(episode_id, lease, reason, cause))

    def prepare(self, episode_id: str, preparation: EpisodePreparation) -> TeamReceipt:
        return self.thread.call(self.inner.prepare(episode_id, preparation))

    def meet(self, connect_s: float) -> None:
        self.thread.call(self.inner.meet(connect_s))

    def commit(self, episode_id: str, lease: str, patience: Patience | None = None) -> TeamReceipt:
        return self.thread.call(self.inner.commit(episode_id, lease, patience))

    def resolve(self, episode_id: str, resolution: EpisodeResolution) -> TeamReceipt:
        return self.thread.call(self.inner.resolve(episode_id, resolution))

    def renew(self, episode_id: str, lease: str) -> float:
        return self.thread.call(self.inner.renew(episode_id, lease))

    def episode(
        self,
        *,
        task_id: str,
        run_id: str | None = None,
        mix: str | None = None,
        kind: EpisodeKind = "train",
        idle_limit_s: float = 240.0,
        max_episode_s: float | None = None,
        max_call_s: float | None = None,
        wait_s: float = 30.0,
        sampling: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> Episode:
        async def make() -> episodes.Episode:
            return self.inner.episode(
                task_id=task_id,
                run_id=run_id,
                mix=mix,
                kind=kind,
                idle_limit_s=idle_limit_s,
                max_episode_s=max_episode_s,
                max_call_s=max_call_s,
                wait_s=wait_s,
                sampling=sampling,
                idempotency_key=idempotency_key,
            )

        return Episode(self.thread.call(make()), self.thread)

    def run_tasks(
        self,
        tasks: Iterable[Task],
        rollout: SyncRollout,
        *,
        concurrency: int = 16,
        retries: int = 2,
        kind: EpisodeKind = "train",
        episodes_per_task: int | None = None,
        run_id: str | None = None,
        mix: str | None = None,
        idle_limit_s: float = 240.0,
        max_episode_s: float | None = None,
        max_call_s: float | None = None,
        sampling: Mapping[str, Any] | None = None,
        progress: bool | None = None,
    ) -> CrewReport:
        """As the asynchronous one; `rollout` is a plain function, and each attempt has a thread of its own.

        No thread can be cancelled: that of an attempt whose lease was lost, or of a crew that was interrupted, runs on unheard.
        `tasks` are drawn in one more, which is waited for as little: a stream may take its time, and may ask this client.
        """
        with contextlib.closing(DaemonThread("the stream of tasks")) as drawing:
            return self.thread.call(
                self.inner.run_tasks(
                    _SizedStream(tasks, drawing) if isinstance(tasks, Sized) else _Stream(tasks, drawing),
                    _in_threads(rollout, self.thread),
                    concurrency=concurrency,
                    retries=retries,
                    kind=kind,
                    episodes_per_task=episodes_per_task,
                    run_id=run_id,
                    mix=mix,
                    idle_limit_s=idle_limit_s,
                    max_episode_s=max_episode_s,
                    max_call_s=max_call_s,
                    sampling=sampling,
                    progress=progress,
                )
            )


class _Stream(AsyncIterable[Task]):
    """Tasks of a plain iterable, each drawn in a thread, so that leases are renewed meanwhile."""

    def __init__(self, tasks: Iterable[Task], thread: DaemonThread) -> None:
        self._tasks = tasks
        self._thread = thread

    async def __aiter__(self) -> AsyncIterator[Task]:
        drawn = await asyncio.wrap_future(self._thread.begin(functools.partial(iter, self._tasks)))
        following = functools.partial(next, drawn, self)  # which is no task
        while (task := await asyncio.wrap_future(self._thread.begin(following))) is not self:
            yield task


class _SizedStream(_Stream):
    """With its length, for the progress bar."""

    def __len__(self) -> int:
        assert isinstance(self._tasks, Sized)
        return len(self._tasks)


def _in_threads(rollout: SyncRollout, thread: LoopThread) -> Rollout:
    async def play(inner: episodes.Episode, task: Task) -> Outcome | float | None:
        playing = begin_in_thread(functools.partial(rollout, Episode(inner, thread), task), "the rollout")
        return await asyncio.wrap_future(playing)

    return play
