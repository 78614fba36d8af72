"""Runs many episodes concurrently over a stream of tasks, with retries, resumption and a clean end.

Claims follow the order of the tasks, and the claims of one task come one after another, so that runs with the same seed see the same
groups. Tasks overtake those of another family of a mix only while that family is held up. A waiting claim counts as one of the
concurrent episodes. The client first shuts out its earlier processes, so that episodes left open by a crash are closed.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter, defaultdict
from collections.abc import Sized
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, cast

from foundation.streams import one_line
from swarm.client.claims import ClaimOrder
from swarm.client.episode import Episode, played
from swarm.client.errors import (
    InvalidSpec,
    LeaseLost,
    NotFound,
    OverLimit,
    RolloutsFailing,
    TeamOver,
)
from swarm.client.losses import Tries, tries_of
from swarm.client.progress import ProgressLine, terminal
from swarm.client.tasks import Outcome, Rollout, Task, TaskStream, each, own_traceback, rolled_out
from swarm.protocol.episodes import Cause, DropReason, EpisodeOptions, EpisodeState, LedgerEntry, RolloutOptions

if TYPE_CHECKING:
    from swarm.client.client import SwarmClient

FAILING_AT_FIRST = 3
"""If this many tasks in a row fail before any episode has ended, the rollout is considered broken."""
FAILING_LATER = 10
"""Replaces FAILING_AT_FIRST once an episode has ended."""
SKIPPED_AT_ONCE = 100
"""Number of skipped tasks in a row after which to wait for a running episode to end."""
_FAULTS = (Cause.ROLLOUT, Cause.GRADER)
"""Causes for which the user's code is to blame."""
_Which = tuple[str | None, str]
"""A task, identified by its family and id."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RolloutReport:
    """Outcomes of the episodes of one `run_tasks` call.

    `run_over` is true if it stopped because its run, or the run of a team member, was over, and not because the tasks ran out.
    """

    ended: int = 0
    resumed: int = 0
    """Number of episodes that an earlier process of this client ended."""
    crashed: int = 0
    """Number of attempts lost because of the rollout or the grader."""
    lost: int = 0
    """Number of attempts lost for any other cause."""
    causes: dict[Cause, int] = field(default_factory=dict)
    """Number of lost attempts, by cause."""
    given_up: int = 0
    """Number of episodes that will not be played because their task was set aside."""
    set_aside: int = 0
    """Number of tasks that were set aside, which means they are skipped because their retries are used up."""
    run_over: bool = False


@dataclass(slots=True)
class _History:
    """Earlier work of this client, according to the server's ledger."""

    ended: Counter[_Which] = field(default_factory=Counter)
    records: defaultdict[_Which, list[LedgerEntry]] = field(default_factory=lambda: defaultdict(list))
    """Finished attempts by this version of the client."""


class _Fate(Enum):
    ENDED = auto()
    LOST = auto()
    OVER = auto()


class Rollouts:
    """Carries out one `run_tasks` call. Use only once."""

    def __init__(self, swarm: SwarmClient, rollout: Rollout, run_id: str, options: RolloutOptions) -> None:
        self._swarm = swarm
        self._rollout = rollout
        self._run_id = run_id
        concurrency = options.pop("concurrency", 16)
        self._retries = options.pop("retries", 2)
        self._per_task = options.pop("episodes_per_task", None)
        self._progress = options.pop("progress", None)
        if concurrency < 1 or self._retries < 0 or (self._per_task is not None and self._per_task < 1):
            raise ValueError("concurrency and episodes_per_task must be at least 1, retries at least 0")
        self._options = cast(EpisodeOptions, {**options, "run_id": run_id})
        self._kind = options.get("kind", "train")
        self._mix = options.get("mix") or None  # the server treats "" as no mix
        swarm.episode(task_id="any", **self._options)  # reject invalid options before anything is played
        self._permits = asyncio.Semaphore(concurrency)
        self._history = _History()
        self._aside: set[_Which] = set()
        """Tasks whose retries are used up and of which no episode has ended since."""
        self._failing: set[_Which] = set()
        """Tasks that have failed since an episode of any task last ended."""
        self._skipped = 0
        """Number of consecutive tasks passed over."""
        self._playing: set[Episode] = set()
        self._units = 0
        self._unit_over = asyncio.Event()
        self._cancelled_by = Cause.PERSON
        self._last_crash = ""
        self._report = RolloutReport()

    async def work(self, tasks: TaskStream) -> RolloutReport:
        """Play tasks until they run out or the run is over. Raises: RolloutsFailing, Refusal, ServerUnreachable."""
        run = await self._swarm.run(self._run_id)
        size = self._per_task or (run.spec.batch.group_size if self._kind == "train" else 1)
        self._history = await self._look_back(run.step)
        total = len(tasks) * size if isinstance(tasks, Sized) else None
        line = ProgressLine(self._kind, total=total, clock=self._swarm.clock, stream=terminal(self._progress))
        try:
            async with asyncio.TaskGroup() as group:
                try:
                    await self._feed(group, tasks, size, line)
                except Exception:  # so that the client, not a person, is blamed for losing open episodes
                    self._stop_as_client()
                    raise
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__
        finally:
            line.close()
        if not self._report.ended and not self._report.causes:
            await self._say_why_nothing_was_played()
        return self._report

    async def _say_why_nothing_was_played(self) -> None:
        if self._report.run_over:
            run = await self._swarm.run(self._run_id)
            why = (
                f"run {run.run_id} is {run.status} ({run.reason or 'no reason given'}); start a new run with a new key"
            )
        elif self._report.resumed:
            why = f"earlier processes of client {self._swarm.client_id!r} have already ended all {self._report.resumed} episodes"
        else:
            return
        log.warning("nothing was played: %s", why)

    # -- what was before ----------------------------------------------------------------------------------------------

    async def _look_back(self, step: int) -> _History:
        """Return this client's earlier work in the run. For evaluations, include only episodes that used the current weights."""
        found = _History()
        me = self._swarm.client_id
        async for entry in self._swarm.ledger(run_id=self._run_id, client_id=me, kind=self._kind):
            # A running episode belongs to another `run_tasks` call of this process.
            over = entry.state is not EpisodeState.RUNNING
            at_stake = self._kind == "train" or entry.claimed_step == step
            if over and at_stake and entry.client_version == self._swarm.client_version:
                found.records[entry.mix, entry.task_id].append(entry)
        for progress in await self._swarm.tasks(run_id=self._run_id, client_id=me):
            if progress.kind == self._kind and (self._kind == "train" or progress.step == step):
                found.ended[progress.mix, progress.task_id] += progress.ended
        return found

    # -- feeding ------------------------------------------------------------------------------------------------------

    async def _feed(self, group: asyncio.TaskGroup, tasks: TaskStream, size: int, line: ProgressLine) -> None:
        order = ClaimOrder(group, self._swarm.clock)
        async for task in each(tasks):
            which = self._which(task)
            done = min(size, self._history.ended[which])
            if done:
                self._history.ended[which] -= done
                self._report.resumed += done
                line.resumed(done)
            if done < size and which in self._aside:
                self._report.given_up += size - done
                await self._pass_over()
                continue
            tries = tries_of(self._history.records.pop(which, ()))
            if done < size:
                self._skipped = 0
                begin = partial(self._begin, group, task, tries, line)
                await order.enter(which[0], begin, size - done, may_be_passed=bool(task.mix))
            if self._report.run_over:
                return

    async def _pass_over(self) -> None:
        """Skip a task. Raises: RolloutsFailing if many tasks in a row were skipped and no episode is running."""
        self._skipped += 1
        while self._skipped >= SKIPPED_AT_ONCE and self._aside:
            if not self._units:
                raise RolloutsFailing(f"all tasks of the stream were set aside, {self._why_aside()}")
            self._unit_over.clear()
            await self._unit_over.wait()

    async def _begin(
        self, group: asyncio.TaskGroup, task: Task, tries: Tries, line: ProgressLine
    ) -> asyncio.Event | None:
        """Start one more episode of a task as soon as there is room.

        Returns an event that is set once the episode has been claimed, or None if the run is over.
        """
        await self._permits.acquire()
        if self._report.run_over:
            self._permits.release()
            return None
        claimed = asyncio.Event()
        self._units += 1
        group.create_task(self._unit(task, replace(tries), claimed, line))
        return claimed

    async def _unit(self, task: Task, tries: Tries, claimed: asyncio.Event, line: ProgressLine) -> None:
        """Attempt one episode until it ends or the retries of its task are used up."""
        which, tried = self._which(task), False
        try:
            while not tries.used_up(self._retries) and which not in self._aside:
                if tries.pause_s:
                    await self._swarm.clock.sleep(tries.pause_s)
                fate, cause = await self._attempt(task, claimed, line)
                if fate is _Fate.ENDED:
                    self._failing.clear()
                    self._aside.discard(which)
                if fate is not _Fate.LOST or self._report.run_over:
                    return
                if (own := asyncio.current_task()) is not None and own.cancelling():
                    raise asyncio.CancelledError  # the rollout returned although it was stopped: do not try its task again
                tries.lost(cause)
                tried = True
            self._report.given_up += 1
            if tries.used_up(self._retries):
                self._set_aside(which, failed=tried and tries.charged > self._retries)
        except Exception:
            self._stop_as_client()
            raise
        finally:
            claimed.set()
            self._permits.release()
            self._units -= 1
            self._unit_over.set()

    def _set_aside(self, which: _Which, *, failed: bool) -> None:
        """Set a task aside: make no more attempts at it. `failed` is true if its rollout has just failed.

        Raises: RolloutsFailing if too many tasks in a row have failed.
        """
        if which not in self._aside:
            self._aside.add(which)
            self._report.set_aside += 1
            log.warning("task %s is set aside: its retries are used up", which[1])
        if not failed:
            return
        self._failing.add(which)
        if len(self._failing) >= (FAILING_LATER if self._report.ended or self._report.resumed else FAILING_AT_FIRST):
            raise RolloutsFailing(f"{len(self._failing)} tasks in a row were set aside, {self._why_aside()}")

    def _why_aside(self) -> str:
        return (
            f"each after {self._retries + 1} lost attempts, the last with {self._last_crash or 'no reason given'}; fix the "
            "rollout (its traceback is in the ledger: `swarm ledger --detail`)"
        )

    def _stop_as_client(self) -> None:
        """Blame the client for all episodes cancelled from now on, because it is stopping with an error."""
        self._cancelled_by = Cause.CLIENT
        for episode in self._playing:
            episode.if_cancelled = Cause.CLIENT

    # -- one attempt --------------------------------------------------------------------------------------------------

    async def _attempt(self, task: Task, claimed: asyncio.Event, line: ProgressLine) -> tuple[_Fate, Cause]:
        """Make one attempt. Returns its outcome and, if it was lost, who is to blame."""
        mix, task_id = self._which(task)
        options: EpisodeOptions = {**self._options, "mix": mix}
        episode = self._swarm.episode(task_id=task_id, **options)
        episode.if_cancelled = self._cancelled_by
        async with AsyncExitStack() as stack:
            try:
                self._playing.add(episode)
                stack.callback(self._playing.discard, episode)
                await stack.enter_async_context(episode)
            except (OverLimit, NotFound) as error:
                if isinstance(error, NotFound):  # the server has moved on to another run, or never had this one;
                    await self._swarm.run(self._run_id)  # in the latter case, this raises NotFound too
                self._report.run_over = True
                return _Fate.OVER, Cause.SERVER
            claimed.set()
            fate, crash = await self._play(episode, task)
            words = "" if crash is None else _last_line(crash)
            try:
                await stack.aclose()
            except (LeaseLost, NotFound, OverLimit) as error:
                fate, words = _Fate.LOST, f"its result arrived too late: {error}"
            except InvalidSpec as error:
                fate, words = _Fate.LOST, f"its result was refused: {error}"
                self._last_crash = f"a refused result: {error}"
        if fate is _Fate.ENDED and episode.receipt is not None and episode.receipt.dropped is not None:
            fate, words = _Fate.LOST, f"the server dropped it when it ended: {episode.receipt.dropped}"
            self._last_crash = f"a result that does not count: {episode.receipt.dropped}"
        cause = Cause.ROLLOUT
        if fate is _Fate.LOST:
            cause = await self._cause_of(episode)
            _log_loss(episode, task, cause, words, crash)
        self._count(fate, cause, episode, line)
        return fate, cause

    async def _cause_of(self, episode: Episode) -> Cause:
        """Return who is to blame for a lost attempt.

        If an older server's ledger gives no cause, assume that the lease ran out, which uses up a retry.
        """
        if episode.receipt is not None and episode.receipt.dropped is not None:
            if episode.receipt.dropped is DropReason.TAINTED:
                return Cause.SERVER
            return await episode.find_cause() or Cause.ROLLOUT
        return await episode.find_cause() or Cause.LIMIT

    async def _play(self, episode: Episode, task: Task) -> tuple[_Fate, Exception | None]:
        """Run the rollout. Cancels it when the lease is lost. An exception from it costs only this episode.

        Returns the episode's fate so far, and the exception if the rollout raised one.
        """
        try:
            outcome = await self._finished(episode, task)
            if episode.aborted or (episode.in_team and episode.receipt is None):
                self._last_crash = "an abort by the rollout itself"
                return _given_up(episode), None
            end_with(episode, outcome)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            if episode.lost.is_set():
                return _given_up(episode, "the lease was lost", Cause.LIMIT), None
            self._last_crash = "asyncio.CancelledError, raised by the rollout itself"
            return _given_up(episode, "the rollout cancelled itself", Cause.ROLLOUT), None
        except TeamOver as error:
            log.warning("starting no more episodes: %s", error)
            self._report.run_over = True
            return _Fate.OVER, None
        except Exception as error:
            if episode.receipt is not None:
                words = (
                    "the rollout of task %s raised an error after it had ended episode %s; the result still counts: %s"
                )
                own_fault = episode.blame(error) in _FAULTS
                log.warning(words, task.id, episode.id, _last_line(error), exc_info=own_fault)
                return _Fate.ENDED, None
            self._last_crash = _last_line(error)
            return _given_up(episode, own_traceback(error), episode.blame(error)), error
        return _Fate.ENDED, None

    async def _finished(self, episode: Episode, task: Task) -> Outcome | float | None:
        """Run the rollout in a task of its own and return its outcome.

        If this task is cancelled, so is the rollout; an outcome that it still returns counts.
        """
        within, episode.if_cancelled = played.set(episode), Cause.ROLLOUT
        playing = asyncio.ensure_future(rolled_out(self._rollout, episode, task))
        played.reset(within)

        def stop(cause: Cause) -> None:
            episode.if_cancelled = cause
            playing.cancel()

        episode.on_lost = partial(stop, Cause.LIMIT)
        cancelled: asyncio.CancelledError | None = None
        while not playing.done():
            try:
                await asyncio.wait({playing})
            except asyncio.CancelledError as error:
                cancelled = error
                stop(self._cancelled_by)
        if cancelled is not None and (playing.cancelled() or playing.exception() is not None):
            raise cancelled
        return playing.result()

    def _count(self, fate: _Fate, cause: Cause, episode: Episode, line: ProgressLine) -> None:
        report = self._report
        if fate is _Fate.ENDED:
            report.ended += 1
            line.ended(episode.reward)
        elif fate is _Fate.LOST:
            report.causes[cause] = report.causes.get(cause, 0) + 1
            if cause in _FAULTS:
                report.crashed += 1
                line.crashed()
            else:
                report.lost += 1

    def _which(self, task: Task) -> _Which:
        return task.mix or self._mix, task.id


def _given_up(episode: Episode, reason: str | None = None, cause: Cause | None = None) -> _Fate:
    """Abort the episode of a rollout that did not finish, unless its result is already stored.

    `reason` is None if the rollout has already given one.
    """
    if episode.receipt is not None:
        return _Fate.ENDED
    if reason is not None and not episode.in_team:
        episode.abort(reason, cause=cause)
    return _Fate.LOST


def _log_loss(episode: Episode, task: Task, cause: Cause, words: str, crash: Exception | None) -> None:
    """Log a lost attempt in one line, with the traceback if the user's code is to blame.

    Otherwise the traceback would only show where the rollout was when, say, the server went away, once for each open episode.
    """
    if crash is not None and cause in _FAULTS:
        log.error("the rollout of task %s crashed (episode %s)", task.id, episode.id, exc_info=crash)
    else:
        level = logging.WARNING if words else logging.INFO
        log.log(level, "an attempt at task %s was lost (%s): %s", task.id, cause, words or f"episode {episode.id}")


def _last_line(error: BaseException) -> str:
    return one_line(traceback.format_exception_only(error)[-1])


def end_with(episode: Episode, outcome: Outcome | float | None) -> None:
    """End an episode with the value that its rollout returned.

    Raises: TypeError if the value is not a reward, for which the rollout is to blame; NoReward if the reward is not finite, for which
    the grader is to blame.
    """
    if outcome is None:
        if not episode.ended:
            raise TypeError("the rollout returned None without calling episode.end; return a number or an Outcome")
    elif isinstance(outcome, Outcome):
        episode.end(reward=outcome.reward, success=outcome.success, metrics=outcome.metrics, despite=outcome.despite)
    elif isinstance(outcome, int | float) and not isinstance(outcome, bool):
        episode.end(reward=outcome)
    else:
        raise TypeError(f"the rollout must return a number or an Outcome, not {outcome!r:.80}")
