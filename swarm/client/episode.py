"""One episode from the client's side: where the agent finds its model, and how the episode ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol, TypeVar

from foundation.clock import Clock
from foundation.event_loop import within
from foundation.logs import redact
from swarm.client.errors import EpisodeUnfinished, InvalidSpec, LeaseLost, NoReward, NotFound
from swarm.client.losses import cause_of
from swarm.client.wire import Patience, require_finite_metadata, with_text_keys, written
from swarm.protocol.episodes import Cause, EpisodeClaim, EpisodeGrant, EpisodeReceipt, EpisodeResult, LedgerEntry
from swarm.protocol.errors import SwarmError
from swarm.protocol.teams import EpisodePreparation, TeamReceipt

RENEWALS_PER_IDLE_LIMIT = 3
LATE_S = 0.5
"""Seconds after a lease's expiry at which the client checks whether it has really expired."""
REASON_CHARS = 8_000
GIVE_BACK_S = 2.0
"""Seconds that a client that is stopping waits for the response to a request it has already sent."""

Answer = TypeVar("Answer")
played: ContextVar[Episode | None] = ContextVar("played", default=None)
"""Within a rollout of `run_tasks`: its episode. Its `if_cancelled` also applies to other episodes that the rollout opens, such as the
members of its team."""

log = logging.getLogger(__name__)


class EpisodeServer(Protocol):
    """The methods of a client that an episode needs."""

    @property
    def url(self) -> str: ...

    async def meet(self, connect_s: float) -> None: ...

    async def current_run_id(self) -> str: ...

    async def run(self, run_id: str) -> object: ...

    async def claim(self, claim: EpisodeClaim, patience: Patience | None = None) -> EpisodeGrant: ...

    async def end(self, episode_id: str, result: EpisodeResult) -> EpisodeReceipt: ...

    async def abort(self, episode_id: str, lease: str, reason: str, cause: Cause | None = None) -> LedgerEntry: ...

    async def entry(self, episode_id: str, patience: Patience | None = None) -> LedgerEntry: ...

    async def renew(self, episode_id: str, lease: str) -> float: ...

    async def prepare(self, episode_id: str, preparation: EpisodePreparation) -> object: ...

    async def commit(self, episode_id: str, lease: str, patience: Patience | None = None) -> TeamReceipt: ...


class Ending:
    """What `Episode.end` returns. Await it to store the result now; otherwise the result is sent when the block exits."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode

    def __await__(self) -> Generator[Any, None, EpisodeReceipt]:
        return self._episode._send().__await__()


class Episode:
    """An async context manager that claims an episode on entry. On exit it sends the result given to `end`, or aborts with the reason.

    `sampling` holds request parameters that every call of this episode should use, such as an evaluation's temperature.
    """

    def __init__(
        self, server: EpisodeServer, claim: EpisodeClaim, *, clock: Clock, sampling: Mapping[str, Any] | None = None
    ) -> None:
        self.claim = claim
        self.sampling: Mapping[str, Any] = dict(sampling or {})
        self.receipt: EpisodeReceipt | None = None
        self.lost = asyncio.Event()
        """Set when the server reports that the lease is lost; the episode then no longer counts."""
        self.on_lost: Callable[[], object] | None = None
        """Called once when a renewal finds that the lease is lost."""
        self.in_team = False
        """True if the episode belongs to a team; then only the team prepares, commits or aborts it."""
        self.cause: Cause | None = None
        """Who is to blame for losing the episode. This is the caller's claim or a guess until the server's ledger gives the cause."""
        self.settled = False
        """Whether `cause` comes from the ledger."""
        self.if_cancelled = Cause.PERSON
        """Who is to blame if the episode's asyncio task is cancelled from outside. While `run_tasks` plays the episode, this is the
        rollout, because it may set its own time limit, unless `run_tasks` stops it."""
        self.server = server
        self._clock = clock
        self._grant: EpisodeGrant | None = None
        self._result: EpisodeResult | None = None
        self._abort_reason: str | None = None
        self._renewing: asyncio.Task[None] | None = None

    # -- what an agent needs ------------------------------------------------------------------------------------------

    @property
    def claimed(self) -> bool:
        return self._grant is not None

    @property
    def grant(self) -> EpisodeGrant:
        if self._grant is None:
            raise RuntimeError("the episode is not claimed yet; use it inside `async with`")
        return self._grant

    @property
    def id(self) -> str:
        return self.grant.episode_id

    @property
    def base_url(self) -> str:
        """The URL to give to any OpenAI-compatible client."""
        return self.grant.base_url

    @property
    def api_key(self) -> str:
        return self.grant.api_key

    # -- how it ends --------------------------------------------------------------------------------------------------

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
    ) -> Ending:
        """End the episode. The result is sent when the block exits, or right away if you await the return value; then `receipt` is set.

        An episode is not trained on if one of its calls failed on the server (`receipt.dropped` is `tainted`) or if it never called the
        model (`no_calls`).

        Args:
            reward: what training maximizes.
            success: whether the task was solved.
            metrics: other numbers to record.
            agent_rewards: rewards by agent name, for an episode in which several agents call the model.
            metadata: any JSON values to record.
            despite: how the agent recovered from a call that failed on the server; the episode then counts nonetheless.
            by_hand: a person answered in place of the model; an evaluation then counts even without a call.
        Raises: NoReward (a ValueError) if the reward is not a finite number, InvalidSpec if the metadata is not JSON.
        """
        self._result = self.result_of(
            reward=reward,
            success=success,
            metrics=metrics,
            agent_rewards=agent_rewards,
            metadata=metadata,
            despite=despite,
            by_hand=by_hand,
        )
        return Ending(self)

    def result_of(
        self,
        *,
        reward: float,
        success: bool | None,
        metrics: Mapping[str, float] | None,
        agent_rewards: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None,
        despite: str | None = None,
        by_hand: bool = False,
    ) -> EpisodeResult:
        """Validate and return the result that `end` would send. Raises the same errors as `end`."""
        if self._result is not None or self._abort_reason is not None:
            raise RuntimeError(f"episode {self.id} has already ended; call `end` or `abort` only once")
        try:
            result = EpisodeResult(
                lease=self.grant.lease,
                reward=reward,
                success=success,
                metrics=dict(metrics or {}),
                agent_rewards=None if agent_rewards is None else dict(agent_rewards),
                metadata=with_text_keys(metadata),
                despite=despite,
                by_hand=by_hand,
                idempotency_key=f"end-{self.id}",
            )
        except InvalidSpec as error:
            raise NoReward(f"invalid result for episode {self.id}: {error.detail}") from error
        require_finite_metadata(result.metadata)
        written(result)  # refuse here what cannot be sent
        return result

    def abort(self, reason: str, *, cause: Cause | None = None) -> None:
        """Abort the episode when the block exits: its calls are dropped, and its slot is offered again.

        `cause` says who is to blame; None means the rollout. Withdraws a result that has not been sent yet.
        """
        if self.receipt is not None:
            raise RuntimeError(f"cannot abort episode {self.id}: it has ended and its result is stored")
        self._result = None
        self._abort_reason = redact(reason)[-REASON_CHARS:]
        self.cause = cause or Cause.ROLLOUT

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return self._result is not None

    @property
    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._abort_reason is not None

    @property
    def result(self) -> EpisodeResult | None:
        """The result given to `end`; None before `end` is called."""
        return self._result

    async def let_go(
        self, receipt: EpisodeReceipt | None = None, given_up: str | None = None, cause: Cause | None = None
    ) -> None:
        """Stop renewing the lease and send nothing when the block exits, because a team has settled the episode.

        Args:
            receipt: the episode's receipt; None unless the team is known to be committed.
            given_up: the reason, if the caller aborted the team.
            cause: who is to blame, if the episode was lost.
        """
        self.in_team = True
        if given_up is not None and self.receipt is None:
            self.abort(given_up)
        self.cause = cause
        if receipt is not None:
            self.receipt = receipt
        else:
            self.lost.set()
        await self._stop_renewing()

    @property
    def reward(self) -> float | None:
        """The reward given to `end`; None before `end` is called."""
        return None if self._result is None else self._result.reward

    # -- the block ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Episode:
        if not self.claim.run_id:
            self.claim = self.claim.model_copy(update={"run_id": await self.server.current_run_id()})
        await self._claimed()
        self._renewing = asyncio.create_task(self._renew_while_alive())
        return self

    async def _claimed(self) -> None:
        """Claim the episode. If the caller is cancelled meanwhile, give back what the server granted."""
        try:
            self._grant = await self.server.claim(self.claim)
        except asyncio.CancelledError:
            await self._take_back()
            raise

    async def _take_back(self) -> None:
        """Abort the episode that an unanswered claim may have been granted.

        Repeats the claim without waiting, which returns the same grant if there was one.
        """
        again = self.claim.model_copy(update={"wait_s": 0.0})
        asked = asyncio.ensure_future(self.server.claim(again, Patience(connect_s=0.0, later_s=0.0)))
        if not await within(self._clock, GIVE_BACK_S, asked):
            return  # the server does not answer; if there is a lease, it will run out
        try:
            self._grant = asked.result()
        except SwarmError:
            return  # nothing was granted
        self._abort_reason, self.cause = "the client stopped before it began", (played.get() or self).if_cancelled
        await self._abort_quietly()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.receipt is not None or self.in_team:
                return
            if error is not None:
                self.cause = self.cause or self.blame(error)
                self._abort_reason = redact(f"{type(error).__name__}: {error}")[:REASON_CHARS]
                await self._abort_quietly()
            elif self._abort_reason is not None:
                await self._abort_quietly()
            elif self._result is not None:
                await self._send_or_abort()
            else:
                self._abort_reason, self.cause = "the client left the episode without a reward", Cause.ROLLOUT
                await self._abort_quietly()
                raise EpisodeUnfinished(f"episode {self.id} was left without a reward: call ep.end(reward=...)")
        finally:
            await self._stop_renewing()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The URLs that the episode's agent and client send requests to."""
        return self.base_url, self.server.url

    def blame(self, error: BaseException) -> Cause:
        """Return who is to blame for the loss of the episode, assuming that `error` ended it."""
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            return (played.get() or self).if_cancelled if task is not None and task.cancelling() else Cause.ROLLOUT
        return cause_of(error, self.addresses)

    async def _send(self) -> EpisodeReceipt:
        if self._result is None:
            raise RuntimeError("there is no result to send: the episode was aborted after `end`")
        if self.in_team:
            raise RuntimeError(
                f"episode {self.id} ends with its team: leave the team's block instead of awaiting `end`"
            )
        if self.receipt is None:
            return await await_answer(self._handed_in(self._result), self._clock)
        return self.receipt

    async def _send_or_abort(self) -> None:
        """Send the result. If the server rejects it as invalid, abort the episode right away so that its slot is offered again."""
        try:
            await self._send()
        except InvalidSpec as error:
            self._abort_reason, self.cause = f"the result was refused: {error}"[:REASON_CHARS], Cause.GRADER
            await self._abort_quietly()
            raise

    async def find_cause(self) -> Cause | None:
        """Return who is to blame for the loss of the episode: the cause in the server's ledger or, if it has none, this client's guess.

        Raises: Refusal, ServerUnreachable.
        """
        if not self.settled:
            with contextlib.suppress(NotFound):
                self.cause = (await self.server.entry(self.id)).cause or self.cause
        return self.cause

    async def _handed_in(self, result: EpisodeResult) -> EpisodeReceipt:
        self.receipt = await self.server.end(self.id, result)
        return self.receipt

    async def _abort_quietly(self) -> None:
        """Abort the episode. Only log a failure to do so: it must not hide the original error, and the lease runs out anyway."""
        try:
            abort = self.server.abort(self.id, self.grant.lease, self._abort_reason or "", self.cause)
            entry = await await_answer(abort, self._clock)
            self.cause, self.settled = entry.cause or self.cause, True
        except (LeaseLost, NotFound):
            self.lost.set()
        except SwarmError as error:
            log.warning("could not abort episode %s: %s", self.id, error)

    async def _renew_while_alive(self) -> None:
        usual_s, ends_at = self.claim.idle_limit_s / RENEWALS_PER_IDLE_LIMIT, self.grant.expires_at
        while True:
            # Check just after `max_episode_s` if that comes first: a rollout that keeps playing delays the next attempt.
            left_s = ends_at - self._clock.now() + LATE_S
            await self._clock.sleep(min(usual_s, left_s) if left_s >= LATE_S else usual_s)
            try:
                ends_at = await self.server.renew(self.id, self.grant.lease)
            except (LeaseLost, NotFound) as error:
                log.warning("episode %s is lost: %s", self.id, error)
                self.lost.set()
                if self.on_lost is not None:
                    self.on_lost()
                return
            except SwarmError as error:
                log.warning("could not renew the lease of episode %s: %s", self.id, error)

    async def _stop_renewing(self) -> None:
        renewing, self._renewing = self._renewing, None
        if renewing is not None:
            renewing.cancel()
            await asyncio.wait([renewing])  # unlike awaiting `renewing`, this raises only our caller's own cancellation
            if not renewing.cancelled():
                renewing.result()


async def await_answer(request: Coroutine[Any, Any, Answer], clock: Clock) -> Answer:
    """Await a request and return its result. If the caller is cancelled, give the request GIVE_BACK_S to finish, then cancel it too."""
    sent = asyncio.create_task(request)
    try:
        return await asyncio.shield(sent)
    except asyncio.CancelledError:
        enough = asyncio.ensure_future(clock.sleep(GIVE_BACK_S))
        await asyncio.wait((sent, enough), return_when=asyncio.FIRST_COMPLETED)
        enough.cancel()
        if not sent.cancel() and not sent.cancelled():
            sent.exception()  # mark it as retrieved
        raise
