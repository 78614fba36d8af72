"""The synchronous twin of `SwarmClient`, for plain scripts and threads. Same names, same errors.

An event loop in a thread of its own does the work, so that leases are renewed while a script computes.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from swarm.client import client as asynchronous
from swarm.client import episode as episodes
from swarm.client.crew import CrewReport
from swarm.client.tasks import Outcome, Rollout, Task
from swarm.client.wire import Patience
from swarm.protocol.episodes import (
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

T = TypeVar("T")
SyncRollout = Callable[["Episode", Task], Outcome | float | None]


class _LoopThread:
    """An event loop that runs until it is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="swarm-client", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; interrupting the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Episode:
    """An episode as a context manager: `base_url`, `api_key`, `end(reward=...)`. An exception aborts it."""

    def __init__(self, inner: episodes.Episode, thread: _LoopThread) -> None:
        self._inner = inner
        self._thread = thread

    def __enter__(self) -> Self:
        self._thread.call(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.call(self._inner.__aexit__(kind, error, trace))

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def grant(self) -> EpisodeGrant:
        return self._inner.grant

    @property
    def base_url(self) -> str:
        return self._inner.base_url

    @property
    def api_key(self) -> str:
        return self._inner.api_key

    @property
    def sampling(self) -> Mapping[str, Any]:
        return self._inner.sampling

    @property
    def receipt(self) -> EpisodeReceipt | None:
        return self._inner.receipt

    def end(
        self,
        *,
        reward: float,
        success: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        agent_rewards: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> EpisodeReceipt:
        """Hand the result in; when this returns, it is stored durably. Raises: LeaseLost."""

        async def send() -> EpisodeReceipt:
            return await self._inner.end(
                reward=reward, success=success, metrics=metrics, agent_rewards=agent_rewards, metadata=metadata
            )

        return self._thread.call(send())

    def abort(self, reason: str) -> None:
        """Give the episode up when the block is left."""
        self._inner.abort(reason)


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
        self._thread = _LoopThread()

        async def make() -> asynchronous.SwarmClient:
            return asynchronous.SwarmClient(
                url, token, client_id=client_id, client_version=client_version, patience=patience
            )

        try:
            self._inner = self._thread.call(make())
        except BaseException:
            self._thread.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._thread.call(self._inner.close())
        self._thread.close()

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def client_id(self) -> str:
        return self._inner.client_id

    def status(self, since: int | None = None, wait_s: float = 30.0) -> ServerStatus:
        return self._thread.call(self._inner.status(since, wait_s))

    def statuses(self, wait_s: float = 30.0) -> Iterator[ServerStatus]:
        status = self.status()
        while True:
            yield status
            status = self.status(since=status.revision, wait_s=wait_s)

    def start_run(self, spec: RunSpec, idempotency_key: str | None = None) -> RunReport:
        return self._thread.call(self._inner.start_run(spec, idempotency_key))

    def run(self, run_id: str, since_step: int = 0) -> RunReport:
        return self._thread.call(self._inner.run(run_id, since_step))

    def patch_run(self, run_id: str, patch: dict[str, Any], config_version: int | None = None) -> RunReport:
        return self._thread.call(self._inner.patch_run(run_id, patch, config_version))

    def stop_run(self, run_id: str) -> RunReport:
        return self._thread.call(self._inner.stop_run(run_id))

    def checkpoint(self, run_id: str) -> CheckpointRef:
        return self._thread.call(self._inner.checkpoint(run_id))

    def restore(self, run_id: str, step: int, idempotency_key: str | None = None) -> RunReport:
        return self._thread.call(self._inner.restore(run_id, step, idempotency_key))

    def quarantine(self, run_id: str, client_version: str, *, reason: str = "", quarantined: bool = True) -> RunReport:
        wish = self._inner.quarantine(run_id, client_version, reason=reason, quarantined=quarantined)
        return self._thread.call(wish)

    def current_run_id(self) -> str:
        return self._thread.call(self._inner.current_run_id())

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
        after: str | None = None,
    ) -> Iterator[LedgerEntry]:
        pages = self._inner.ledger(
            run_id=run_id,
            step=step,
            client_id=client_id,
            task_id=task_id,
            kind=kind,
            reason=reason,
            state=state,
            after=after,
        )

        async def following() -> LedgerEntry | None:
            return await anext(pages, None)

        while (entry := self._thread.call(following())) is not None:
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
        after: str | None = None,
        limit: int = 100,
    ) -> LedgerPage:
        return self._thread.call(
            self._inner.ledger_page(
                run_id=run_id,
                step=step,
                client_id=client_id,
                task_id=task_id,
                kind=kind,
                reason=reason,
                state=state,
                after=after,
                limit=limit,
            )
        )

    def entry(self, episode_id: str) -> LedgerEntry:
        return self._thread.call(self._inner.entry(episode_id))

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
    ) -> LedgerSummary:
        return self._thread.call(
            self._inner.summary(
                run_id=run_id, step=step, client_id=client_id, task_id=task_id, kind=kind, reason=reason, state=state
            )
        )

    def trace(self, episode_id: str, *, text: bool = False) -> EpisodeTrace:
        return self._thread.call(self._inner.trace(episode_id, text=text))

    def tasks(
        self, *, run_id: str | None = None, client_id: str | None = None, mix: str | None = None
    ) -> list[TaskProgress]:
        return self._thread.call(self._inner.tasks(run_id=run_id, client_id=client_id, mix=mix))

    def claim(self, claim: EpisodeClaim) -> EpisodeGrant:
        return self._thread.call(self._inner.claim(claim))

    def end(self, episode_id: str, result: EpisodeResult) -> EpisodeReceipt:
        return self._thread.call(self._inner.end(episode_id, result))

    def abort(self, episode_id: str, lease: str, reason: str) -> LedgerEntry:
        return self._thread.call(self._inner.abort(episode_id, lease, reason))

    def prepare(self, episode_id: str, preparation: EpisodePreparation) -> TeamReceipt:
        return self._thread.call(self._inner.prepare(episode_id, preparation))

    def commit(self, episode_id: str, lease: str, patience: Patience | None = None) -> TeamReceipt:
        return self._thread.call(self._inner.commit(episode_id, lease, patience))

    def resolve(self, episode_id: str, resolution: EpisodeResolution) -> TeamReceipt:
        return self._thread.call(self._inner.resolve(episode_id, resolution))

    def renew(self, episode_id: str, lease: str) -> float:
        return self._thread.call(self._inner.renew(episode_id, lease))

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
            return self._inner.episode(
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

        return Episode(self._thread.call(make()), self._thread)

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
        sampling: Mapping[str, Any] | None = None,
        progress: bool | None = None,
    ) -> CrewReport:
        """As the asynchronous one; `rollout` is a plain function and runs in threads, `concurrency` of them at most."""
        with ThreadPoolExecutor(concurrency, thread_name_prefix="rollout") as threads:
            return self._thread.call(
                self._inner.run_tasks(
                    tasks,
                    _in_thread(rollout, threads, self._thread),
                    concurrency=concurrency,
                    retries=retries,
                    kind=kind,
                    episodes_per_task=episodes_per_task,
                    run_id=run_id,
                    mix=mix,
                    idle_limit_s=idle_limit_s,
                    max_episode_s=max_episode_s,
                    sampling=sampling,
                    progress=progress,
                )
            )


def _in_thread(rollout: SyncRollout, threads: ThreadPoolExecutor, thread: _LoopThread) -> Rollout:
    async def play(inner: episodes.Episode, task: Task) -> Outcome | float | None:
        work = functools.partial(rollout, Episode(inner, thread), task)
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    return play
