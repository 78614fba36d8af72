"""Which calls failed on the server's side, and how long to wait for an engine that crashed.

How a call ended shows whether it failed. If its client gave up, the engine's health shows it later. The state machine
decides what a failure means for an episode.
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
"""How long a request waits for a crashed engine to come back before it fails."""
FAILING_S = 15.0
"""How long a request is tried again that fails while its engine runs: a crash shows in the engine's health much sooner."""
_AGAIN_AFTER_S = 0.25
CRASH_UNNOTICED_S = 5.0
"""A client that gave up less than this before a crash was noticed, with no token in between, met the crash."""
_LOG = logging.getLogger(__name__)
_MARK_AGAIN_S = 2.0
_LEFT_AT_MOST = 10_000
_DETAIL_CHARS = 300
_Reason = Literal["engine_down", "engine_hung", "refused", "cut_off"]


@dataclass(slots=True)
class Progress:
    """A request's progress. outage: the engine crashed during it, and the client has seen nothing since."""

    outage: EngineDown | None = None
    shown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCall:
    """A recorded call that may still turn out to have failed on our side. at: Unix time of its end."""

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
    """How long one request is tried again. Times are monotonic. failing_since: it has failed since then while its engine ran."""

    give_up_at: float
    failing_since: float | None = None


class KeepsFailing(RequestFailed):
    """The engine ran all along, and failed on a request each time for `FAILING_S`."""


class EngineWait:
    """Waits for a crashed engine to come back, as long as that may help."""

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
        """The patience with a request that begins now."""
        return Patience(self._clock.monotonic() + ENGINE_WAIT_S)

    async def ask(self, progress: Progress, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Ask the engine. If it crashes meanwhile, wait for it and ask again. Only while the client has seen nothing."""
        patience = self.patience()
        while True:
            try:
                return await ask()
            except EngineDown as error:
                progress.outage = error
                if not await self.is_back(patience, error):
                    raise

    async def is_back(self, patience: Patience, error: EngineDown) -> bool:
        """Wait until another try may succeed; False if none will. Raises: KeepsFailing."""
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
    """Finds the failed calls of one gateway. Use from one event loop."""

    def __init__(self, service: Service, clock: Clock) -> None:
        self._service = service
        self._clock = clock
        self._hung = False
        self._crashes: dict[str, int] = {}
        """Number of crashes of each sampling process, by device."""
        self._left: deque[KeptCall] = deque(maxlen=_LEFT_AT_MOST)
        """The newest calls whose clients gave up."""
        self._lived_at = 0.0
        """Unix time at which the engine, or any replica of it, last sampled something."""
        self._marking: set[asyncio.Task[None]] = set()

    def why(self, progress: Progress, error: BaseException, *, sampling: bool = False) -> CallFailure | None:
        """The server-side failure behind an error that ended a call. None: the client went away, or sent a bad request.

        sampling: the engine was asked to sample.
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
        """Note that the engine sampled a token: clients that gave up earlier met no crash. Another replica may still hang."""
        self._lived_at = self._clock.now()
        self._service.engine_lived(self._lived_at)

    def left(self, call: KeptCall) -> None:
        """Remember a call whose client gave up while nothing seemed wrong."""
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
        """Mark calls whose clients gave up after this Unix time. Their replica is unknown, so any of them may have met the failure."""
        left = [call for call in self._left if call.at >= since]
        self._left.clear()
        for call in left:
            self.mark(call.failed(failure))

    def mark(self, found: FailedCall) -> None:
        """Mark a recorded call as failed after all. If its episode has ended, this continues in the background."""
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
    """Whether the request was refused because the request was wrong. The end of its episode does not count as such."""
    return isinstance(error, SwarmError) and not _is_over(error) and answer_of(error).status < 500


def why_refused(error: SwarmError) -> str:
    """The message of a refusal and its status, on one line, for the ledger."""
    answer = answer_of(error)
    words = " ".join(str((answer.body.get("error") or {}).get("message", "")).split())
    return f"{words[:_DETAIL_CHARS]} ({answer.status})"


def _is_over(error: BaseException) -> bool:
    """Whether nobody waits for the answer: the client went away, or its episode is over."""
    lost = isinstance(error, Refusal) and error.code is ErrorCode.LEASE_LOST
    return lost or isinstance(error, asyncio.CancelledError | GeneratorExit)


def _failure(reason: _Reason, words: str) -> CallFailure:
    return CallFailure(cause=Cause.SERVER, reason=reason, detail=words.partition("\n")[0][:_DETAIL_CHARS])
