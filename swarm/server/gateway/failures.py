"""Which calls failed because of the server, and how long to wait for an engine that crashed.

How a call ended usually tells whether the server was at fault. If the client gave up first, that is known only later, from the
engine's health. The state machine decides what a failure means for an episode.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from foundation.clock import Clock
from foundation.event_loop import within
from swarm.engine.seam import EngineDown, EngineHealth, RequestFailed
from swarm.protocol.episodes import CallFailure, Cause
from swarm.protocol.errors import ErrorCode, Refusal, SwarmError
from swarm.server.gateway.errors import answer_of
from swarm.server.service import Service
from swarm.server.state.calls import CallAttempt, FailedCall

Answer = TypeVar("Answer")

ENGINE_WAIT_S = 180.0
"""Seconds that a request waits for a crashed engine to come back before the request fails."""
FAILING_S = 15.0
"""Seconds for which we retry a request that fails although the engine runs. A crash would show in the engine's health much sooner."""
_AGAIN_AFTER_S = 0.25
CRASH_UNNOTICED_S = 5.0
"""Seconds that a crash may go unnoticed: we blame it for clients that gave up at most this long before we noticed it. With a single
replica, only for those that gave up after its last sampled token."""
_LOG = logging.getLogger(__name__)
_MARK_AGAIN_S = 2.0
_LEFT_AT_MOST = 10_000
_DETAIL_CHARS = 300
_Reason = Literal["engine_down", "engine_hung", "refused", "cut_off"]


@dataclass(slots=True)
class Progress:
    """A request's progress. `outage` is the last engine crash that it ran into; `shown` says whether the client got any output."""

    outage: EngineDown | None = None
    shown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCall:
    """A recorded call that may still turn out to have failed because of us. `at` is the Unix time of its end."""

    at: float
    episode_id: str
    call_ids: frozenset[str]
    attempt: CallAttempt
    attempts: list[CallAttempt]

    def failed(self, failure: CallFailure) -> FailedCall:
        return FailedCall(
            episode_id=self.episode_id,
            call_ids=self.call_ids,
            failure=failure,
            attempt=self.attempt,
            attempts=self.attempts,
        )


@dataclass(slots=True)
class Patience:
    """How long to retry one request, in monotonic time. `failing_since` is when it began to fail although the engine runs."""

    give_up_at: float
    failing_since: float | None = None


class KeepsFailing(RequestFailed):
    """Every try of the request failed for `FAILING_S` seconds, although the engine was running."""


class EngineWait:
    """Waits for a crashed engine to come back, as long as a request's time limit allows."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ready = asyncio.Event()
        self._failed = False

    def on_health(self, health: EngineHealth) -> None:
        self._failed = health.failed_for_good
        if health.samples or health.failed_for_good:
            self._ready.set()
        else:
            self._ready.clear()

    def patience(self) -> Patience:
        """Return the retry limits of a request that begins now."""
        return Patience(self._clock.monotonic() + ENGINE_WAIT_S)

    async def ask(self, progress: Progress, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Ask the engine; if it crashes, wait for it and ask again. Call this only while the client has seen none of the answer."""
        patience = self.patience()
        while True:
            try:
                return await ask()
            except EngineDown as error:
                progress.outage = error
                if not await self.is_back(patience, error):
                    raise

    async def is_back(self, patience: Patience, error: EngineDown) -> bool:
        """Wait until a retry may succeed. Return False if none can. Raises: KeepsFailing."""
        now = self._clock.monotonic()
        left_s = patience.give_up_at - now
        if self._failed or left_s <= 0:
            return False
        if not isinstance(error, RequestFailed) or not self._ready.is_set():
            patience.failing_since = None
        elif patience.failing_since is None:
            patience.failing_since = now
        elif now - patience.failing_since >= FAILING_S:
            raise KeepsFailing(str(error)) from error
        if self._ready.is_set():  # the crash has not been noticed yet, or is already over
            await self._clock.sleep(_AGAIN_AFTER_S)
            return True
        await within(self._clock, left_s, self._ready.wait())
        return not self._failed


class Failures:
    """Finds out which of a gateway's calls failed because of the server. Use it from one event loop only."""

    def __init__(self, service: Service, clock: Clock) -> None:
        self._service = service
        self._clock = clock
        self._hung = False
        self._crashes: dict[str, int] = {}
        """Number of crashes of each sampling process, keyed by device."""
        self._left: deque[KeptCall] = deque(maxlen=_LEFT_AT_MOST)
        """The most recent calls whose clients gave up."""
        self._lived_at = 0.0
        """Unix time at which the engine, or any replica of it, last sampled a token."""
        self._marking: set[asyncio.Task[None]] = set()

    def why(self, progress: Progress, error: BaseException, *, sampling: bool = False) -> CallFailure | None:
        """Return the server-side failure behind an error that ended a call; None if the client went away or sent a bad request.

        `sampling` says whether the engine was already asked to sample.
        """
        if is_refusal(error):
            return None
        if isinstance(error, EngineDown) and not progress.shown:
            return self._of_engine(error)
        if progress.outage is not None and not progress.shown:
            return self._of_engine(progress.outage)
        if _is_over(error):
            return None
        words = str(error) if isinstance(error, SwarmError) else f"{type(error).__name__}: {error}"
        return _failure("cut_off" if progress.shown or sampling else "refused", words)

    def engine_lives(self) -> None:
        """Record that the engine, or one of its replicas, sampled a token just now, so it was neither down nor hanging."""
        self._lived_at = self._clock.now()
        self._service.engine_lived(self._lived_at)

    def left(self, call: KeptCall) -> None:
        """Remember a call whose client gave up while the engine seemed healthy."""
        self._service.suspect(call.attempt, call.at, call.call_ids)
        self._left.append(call)

    def on_health(self, health: EngineHealth) -> None:
        """Mark calls whose clients gave up because the engine hung or crashed."""
        samplers = health.samplers
        self._hung = any(not each.ready and (each.hung_since is not None or self._hung) for each in samplers)
        for each in samplers:
            known, self._crashes[each.device] = self._crashes.get(each.device, 0), each.failures
            if each.ready:
                continue
            if each.hung_since is not None:
                self._mark_left(each.hung_since, _failure("engine_hung", each.reason or ""))
            elif each.failures > known:
                since = self._clock.now() - CRASH_UNNOTICED_S
                lived_at = self._lived_at if len(samplers) == 1 else since  # any replica may have sampled that token
                self._mark_left(max(lived_at, since), _failure("engine_down", each.reason or ""))

    def _mark_left(self, since: float, failure: CallFailure) -> None:
        """Mark calls whose clients gave up since this Unix time. We do not know which replica served which call."""
        left = [call for call in self._left if call.at >= since]
        self._left.clear()
        for call in left:
            self.mark(call.failed(failure))

    def mark(self, found: FailedCall) -> None:
        """Mark an already recorded call as failed. If its episode has ended, this continues in the background."""
        if not self._service.fail_open(found):
            task = asyncio.get_running_loop().create_task(self._mark_closed(found))
            self._marking.add(task)
            task.add_done_callback(self._marked)

    async def _mark_closed(self, found: FailedCall) -> None:
        while True:
            try:
                await self._service.fail_closed(found)
                return
            except Refusal as refusal:
                if refusal.code is not ErrorCode.STORAGE_FULL:
                    raise
                await self._clock.sleep(_MARK_AGAIN_S)

    def _marked(self, task: asyncio.Task[None]) -> None:
        self._marking.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("a call that failed could not be marked as such", exc_info=error)

    def _of_engine(self, error: EngineDown) -> CallFailure:
        return _failure("engine_hung" if self._hung else "engine_down", str(error))


def is_refusal(error: BaseException) -> bool:
    """True if the error is a refusal of a bad request. A request refused because its episode is over is not a bad one."""
    return isinstance(error, SwarmError) and not _is_over(error) and answer_of(error).status < 500


def why_refused(error: SwarmError) -> str:
    """Return the message and status of a refusal on one line, for the ledger."""
    answer = answer_of(error)
    words = " ".join(str((answer.body.get("error") or {}).get("message", "")).split())
    return f"{words[:_DETAIL_CHARS]} ({answer.status})"


def _is_over(error: BaseException) -> bool:
    """True if nobody waits for the answer any more: the client went away, or its episode is over."""
    lost = isinstance(error, Refusal) and error.code is ErrorCode.LEASE_LOST
    return lost or isinstance(error, asyncio.CancelledError | GeneratorExit)


def _failure(reason: _Reason, words: str) -> CallFailure:
    return CallFailure(cause=Cause.SERVER, reason=reason, detail=words.partition("\n")[0][:_DETAIL_CHARS])
