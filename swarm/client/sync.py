"""The synchronous version of `swarm.client`, for plain scripts and threads. It has the same names and raises the same errors.

One event loop in its own thread serves all clients of a process. It renews leases while a script computes, and lets the members of
a team, which are clients of different servers, act together.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sized,
)
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

import httpx
from anyio.from_thread import BlockingPortalProvider

from swarm.client import client as asynchronous
from swarm.client import episode as episodes
from swarm.client.rollouts import RolloutReport
from swarm.client.tasks import Outcome, Rollout, Task, as_runtime_error
from swarm.client.team import Team as AsynchronousTeam
from swarm.client.team import team as asynchronous_team
from swarm.client.wire import Patience
from swarm.protocol.episodes import (
    Cause,
    EpisodeGrant,
    EpisodeKind,
    EpisodeOptions,
    EpisodeReceipt,
    LedgerEntry,
    RolloutOptions,
)
from swarm.protocol.status import ServerStatus
from swarm.protocol.summary import LedgerFields

__all__ = ["Episode", "SwarmClient", "SyncRollout", "Team", "team"]

T = TypeVar("T")
P = ParamSpec("P")

LEAVING_S = 10.0
"""How long an interrupted caller waits, in seconds, for its open episodes to be given back. One takes about twice GIVE_BACK_S."""
CLOSED = "this client is closed"

_portals: dict[int, BlockingPortalProvider] = {}
"""Portals by process id. Threads do not survive a fork, so a forked process needs its own event loop."""


# -- the event loop -------------------------------------------------------------------------------------------------------


class LoopThread:
    """One client's access to the shared event loop, which runs as long as any client of the process is open."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._provider = _portals.setdefault(self._process, BlockingPortalProvider())
        self._portal = self._provider.__enter__()
        self._lock = threading.Lock()
        self._closed = False
        self._calls: dict[concurrent.futures.Future[Any], Callable[[], object]] = {}
        """The futures that threads are waiting for, each with a function that cancels it."""

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` on the loop and return its result.

        If the caller is interrupted, cancel the work and wait until it has given back its episodes.
        """
        if self._process != os.getpid():
            raise RuntimeError(
                "this client belongs to the parent of this forked process; create a new client after the fork"
            )
        tasks: list[asyncio.Task[Any]] = []

        async def run() -> tuple[list[T], BaseException | None]:
            tasks.extend(filter(None, [asyncio.current_task()]))
            try:
                return [await work()], None
            except (SystemExit, KeyboardInterrupt) as error:
                # Raise it in the caller: raised here, it would end the loop and everyone's work.
                return [], error

        with self._lock:
            if self._closed:
                raise RuntimeError(CLOSED)
            future = self._portal.start_task_soon(run)
            # Do not use `future.cancel`: anyio would cancel the task again at each `await` while it gives back its episodes.
            self._calls[future] = lambda: [task.cancel() for task in tasks]
        try:
            result, error = future.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError(CLOSED) if self._closed else asyncio.CancelledError from None
        except BaseException:
            self._cancel([future])  # it is still running only if the caller was interrupted
            raise
        finally:
            self._calls.pop(future, None)
        if error is not None:
            raise error
        return result[0]

    def close(self, last: Callable[[], Awaitable[None]]) -> None:
        """Cancel the work that threads are waiting for, then run `last`. May be called repeatedly. Raises any error from `last`."""
        if self._process != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            calls = list(self._calls)
        try:
            self._cancel(calls)
            self._portal.call(last)
        finally:
            self._provider.__exit__(None, None, None)

    def _cancel(self, futures: Iterable[concurrent.futures.Future[Any]]) -> None:
        """Cancel the calls, and wait until they have given back their episodes."""
        running = [(future, self._calls.get(future)) for future in futures if not future.done()]
        for _, cancel in running:
            if cancel is not None:
                self._portal.start_task_soon(cancel)
        concurrent.futures.wait([future for future, _ in running], LEAVING_S)


class RunningLoop:
    """Access to an event loop that is already running, for the threads in which it runs plain functions."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` on the loop and return its result. Never call this from the loop's own thread."""

        async def run() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Wrap a method of the async client so that plain threads can call it."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self.thread.call(functools.partial(method, self.inner, *args, **kwargs))
        return result

    return call


# -- clients --------------------------------------------------------------------------------------------------------------

SyncRollout = Callable[["Episode", Task], Outcome | float | None]


class SwarmClient:
    """One client's connection to one server. Use as a context manager. For the arguments, see `swarm.client.SwarmClient`."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        client_id: str | None = None,
        client_version: str = "0",
        patience: Patience | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.inner = asynchronous.SwarmClient(
            url, token, client_id=client_id, client_version=client_version, patience=patience, transport=transport
        )
        self.thread = LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the client. May be called repeatedly."""
        self.thread.close(self.inner.close)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def client_id(self) -> str:
        return self.inner.client_id

    status = _blocking(asynchronous.SwarmClient.status)
    start_run = _blocking(asynchronous.SwarmClient.start_run)
    run = _blocking(asynchronous.SwarmClient.run)
    patch_run = _blocking(asynchronous.SwarmClient.patch_run)
    stop_run = _blocking(asynchronous.SwarmClient.stop_run)
    checkpoint = _blocking(asynchronous.SwarmClient.checkpoint)
    restore = _blocking(asynchronous.SwarmClient.restore)
    quarantine = _blocking(asynchronous.SwarmClient.quarantine)
    current_run_id = _blocking(asynchronous.SwarmClient.current_run_id)
    ledger_page = _blocking(asynchronous.SwarmClient.ledger_page)
    entry = _blocking(asynchronous.SwarmClient.entry)
    summary = _blocking(asynchronous.SwarmClient.summary)
    trace = _blocking(asynchronous.SwarmClient.trace)
    tasks = _blocking(asynchronous.SwarmClient.tasks)
    fence = _blocking(asynchronous.SwarmClient.fence)
    claim = _blocking(asynchronous.SwarmClient.claim)
    end = _blocking(asynchronous.SwarmClient.end)
    abort = _blocking(asynchronous.SwarmClient.abort)
    prepare = _blocking(asynchronous.SwarmClient.prepare)
    meet = _blocking(asynchronous.SwarmClient.meet)
    commit = _blocking(asynchronous.SwarmClient.commit)
    resolve = _blocking(asynchronous.SwarmClient.resolve)
    renew = _blocking(asynchronous.SwarmClient.renew)

    def statuses(self, wait_s: float = 30.0) -> Iterator[ServerStatus]:
        """Yield the current status, then a new one after each change or every `wait_s` seconds without a change."""
        status = self.status()
        while True:
            yield status
            status = self.status(since=status.revision, wait_s=wait_s)

    def ledger(self, *, after: str | None = None, **wanted: Unpack[LedgerFields]) -> Iterator[LedgerEntry]:
        """Yield the ledger entry of each episode in claim order, as `ledger` of the async client does."""
        while True:
            page = self.ledger_page(after=after, limit=asynchronous.LEDGER_PAGE, **wanted)
            yield from page.entries
            if page.next is None:
                return
            after = page.next

    def episode(
        self, *, task_id: str, idempotency_key: str | None = None, **options: Unpack[EpisodeOptions]
    ) -> Episode:
        """Return an episode, which is a context manager. The arguments are those of `episode` of the async client."""
        return Episode(self.inner.episode(task_id=task_id, idempotency_key=idempotency_key, **options), self.thread)

    def run_tasks(
        self, tasks: Iterable[Task], rollout: SyncRollout, **options: Unpack[RolloutOptions]
    ) -> RolloutReport:
        """Do the same as `run_tasks` of the async client, but with a plain function as `rollout`. Each attempt runs in its own thread.

        Threads cannot be cancelled: if an attempt loses its lease or is interrupted, its thread continues and its result is ignored.
        Another thread iterates over `tasks`, so the iterable may block and may call this client. `run_tasks` never waits for either
        kind of thread to finish.
        """
        with contextlib.closing(DaemonThread("the stream of tasks")) as drawing:
            stream = _SizedStream(tasks, drawing) if isinstance(tasks, Sized) else _Stream(tasks, drawing)
            play = _in_threads(rollout, self.thread)
            return self.thread.call(lambda: self.inner.run_tasks(stream, play, **options))


class Episode:
    """An episode. Use as a context manager, with `base_url`, `api_key` and `end(reward=...)` inside. An exception aborts it."""

    def __init__(self, inner: episodes.Episode, thread: LoopThread | RunningLoop) -> None:
        self.inner = inner
        self.thread = thread

    def __enter__(self) -> Self:
        self.thread.call(self.inner.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thread.call(lambda: self.inner.__aexit__(kind, error, trace))

    @property
    def id(self) -> str:
        return self.inner.id

    @property
    def grant(self) -> EpisodeGrant:
        return self.inner.grant

    @property
    def base_url(self) -> str:
        return self.inner.base_url

    @property
    def api_key(self) -> str:
        return self.inner.api_key

    @property
    def sampling(self) -> Mapping[str, Any]:
        return self.inner.sampling

    @property
    def receipt(self) -> EpisodeReceipt | None:
        return self.inner.receipt

    def end(
        self,
        *,
        reward: float,
        success: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        agent_rewards: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        despite: str | None = None,
        by_hand: bool = False,
    ) -> EpisodeReceipt | None:
        """End the episode, and wait until its result is stored durably. For the arguments, see `swarm.client.Episode.end`.

        For an episode in a team, return None: the team sends its members' results at the end of its block.
        Raises: LeaseLost, and the errors of `swarm.client.Episode.end`.
        """
        ending = self.inner.end(
            reward=reward,
            success=success,
            metrics=metrics,
            agent_rewards=agent_rewards,
            metadata=metadata,
            despite=despite,
            by_hand=by_hand,
        )
        return None if self.inner.in_team else self.thread.call(lambda: ending)

    def abort(self, reason: str, *, cause: Cause | None = None) -> None:
        """Abort the episode when the block exits. `cause` says who is to blame; None means the rollout."""
        self.inner.abort(reason, cause=cause)


# -- teams ----------------------------------------------------------------------------------------------------------------


class Team:
    """A context manager that claims an episode on every server on entry. On exit it commits the results given to `end`, or aborts.

    `ep["planner"].base_url` and `ep["planner"].api_key` tell the agent of the member "planner" where its model is.
    """

    def __init__(self, inner: AsynchronousTeam, thread: LoopThread | RunningLoop) -> None:
        self.inner = inner
        self.thread = thread

    def __getitem__(self, member: str) -> Episode:
        return Episode(self.inner[member], self.thread)

    def __enter__(self) -> Self:
        self.thread.call(self.inner.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thread.call(lambda: self.inner.__aexit__(kind, error, trace))

    @property
    def committed(self) -> bool:
        """Whether the team is known to be committed."""
        return self.inner.committed

    def end(
        self,
        *,
        rewards: Mapping[str, float],
        success: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        despite: str | None = None,
    ) -> None:
        """Set the results, with one reward for every member. They are sent when the block exits. See `swarm.client.Team.end`."""
        self.inner.end(rewards=rewards, success=success, metrics=metrics, metadata=metadata, despite=despite)

    def abort(self, reason: str, *, cause: Cause | None = None) -> None:
        """Abort the team when the block exits: none of its results count. `cause` says who is to blame; None means the rollout."""
        self.inner.abort(reason, cause=cause)


def team(
    *,
    task_id: str | None = None,
    decider: str | None = None,
    kind: EpisodeKind = "train",
    mix: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    idle_limit_s: float = 240.0,
    max_episode_s: float | None = None,
    max_call_s: float | None = None,
    wait_s: float = 30.0,
    patience_s: float = 60.0,
    **members: SwarmClient | Episode,
) -> Team:
    """Return a team, for use as `with team(task_id="t-1", planner=swarm_a, solver=swarm_b) as ep`; see `swarm.client.team`."""
    inner = asynchronous_team(
        task_id=task_id,
        decider=decider,
        kind=kind,
        mix=mix,
        sampling=sampling,
        idle_limit_s=idle_limit_s,
        max_episode_s=max_episode_s,
        max_call_s=max_call_s,
        wait_s=wait_s,
        patience_s=patience_s,
        **{name: member.inner for name, member in members.items()},
    )
    # Prefer a client's loop thread: the one of an already claimed episode may belong to a client that is closed earlier.
    first = min(members.values(), key=lambda member: isinstance(member, Episode))
    return Team(inner, first.thread)


# -- plain functions in threads -------------------------------------------------------------------------------------------


class DaemonThread:
    """A thread that runs one piece of work at a time until it is closed. It does not keep the process from exiting."""

    def __init__(self, name: str) -> None:
        """Start the thread. `name` describes its work in error messages."""
        self._name = name
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def begin(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Start work. The returned future gets its result, or its error in a form that can be raised in an event loop."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()
        answer.set_running_or_notify_cancel()

        def do() -> None:
            try:
                answer.set_result(work())
            except StopIteration as error:
                answer.set_exception(as_runtime_error(error, self._name))
            except BaseException as error:  # noqa: BLE001 - it is raised in the waiting caller
                answer.set_exception(error)

        self._work.put(do)
        return answer

    def close(self) -> None:
        """End the thread once the work it has begun is done."""
        self._work.put(None)


class _Stream(AsyncIterable[Task]):
    """Tasks from a plain iterable. Each one is fetched in a thread, so that leases are renewed meanwhile."""

    def __init__(self, tasks: Iterable[Task], thread: DaemonThread) -> None:
        self._tasks = tasks
        self._thread = thread

    async def __aiter__(self) -> AsyncIterator[Task]:
        drawn = await asyncio.wrap_future(self._thread.begin(functools.partial(iter, self._tasks)))
        following = functools.partial(next, drawn, self)  # `self` marks the end, because it is not a task
        while (task := await asyncio.wrap_future(self._thread.begin(following))) is not self:
            yield task


class _SizedStream(_Stream):
    """A stream with a known length, for the progress bar."""

    def __len__(self) -> int:
        assert isinstance(self._tasks, Sized)
        return len(self._tasks)


def plain_rollout(rollout: SyncRollout) -> Rollout:
    """Wrap a plain function as a rollout for the async client. Each attempt runs in its own thread, as in `run_tasks` above."""

    async def play(inner: episodes.Episode, task: Task) -> Outcome | float | None:
        return await _in_threads(rollout, RunningLoop())(inner, task)

    return play


def _in_threads(rollout: SyncRollout, thread: LoopThread | RunningLoop) -> Rollout:
    async def play(inner: episodes.Episode, task: Task) -> Outcome | float | None:
        with contextlib.closing(DaemonThread("the rollout")) as playing:
            return await asyncio.wrap_future(playing.begin(functools.partial(rollout, Episode(inner, thread), task)))

    return play
