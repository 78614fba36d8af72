"""One episode as its client holds it: where the agent finds its model, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Generator, Mapping
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
"""How long after a lease's end the client asks whether it has run out, in seconds."""
REASON_CHARS = 8_000
GIVE_BACK_S = 2.0
"""How long a stopping client waits for the answer to a request that it has sent, in seconds."""

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


class EpisodeServer(Protocol):
    """The client's methods that an episode needs."""

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
    """The result of `Episode.end`. Await it to store the result now; else it is sent when the block is left."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode

    def __await__(self) -> Generator[Any, None, EpisodeReceipt]:
        return self._episode._send().__await__()


class Episode:
    """An async context manager: claims on entry; on exit sends the result of `end`, or aborts with the reason.

    sampling: request parameters that every call of this episode should carry (an evaluation's temperature).
    """

    def __init__(
        self, server: EpisodeServer, claim: EpisodeClaim, *, clock: Clock, sampling: Mapping[str, Any] | None = None
    ) -> None:
        self.claim = claim
        self.sampling: Mapping[str, Any] = dict(sampling or {})
        self.receipt: EpisodeReceipt | None = None
        self.lost = asyncio.Event()
        """Set when the server says that the lease is gone: the episode no longer counts."""
        self.on_lost: Callable[[], object] | None = None
        """Called once when a renewal finds the lease gone."""
        self.in_team = False
        """Set by its team, if it has one: then only the team prepares, commits or aborts it."""
        self.cause: Cause | None = None
        """Who lost it: stated or guessed here, until the server's ledger names the cause."""
        self.settled = False
        """Whether `cause` comes from the ledger."""
        self.if_cancelled = Cause.PERSON
        """Who lost it if its asyncio task is cancelled from outside."""
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
        """For any OpenAI-compatible client."""
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
        """End the episode. The result is sent when the block is left, or at once when awaited; then `receipt` is set.

        An episode is not trained if one of its calls failed on the server's side (`receipt.dropped` is `tainted`). despite: how the
        agent recovered; then it counts. An episode that never called the model does not count either (`no_calls`).
        by_hand: a person answered in the model's place; then an evaluation counts without a call.
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
        """The checked result that `end` would send. Raises: what `end` raises."""
        if self._result is not None or self._abort_reason is not None:
            raise RuntimeError(f"episode {self.id} was ended already")
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
            raise NoReward(f"episode {self.id} cannot end with this result: {error.detail}") from error
        require_finite_metadata(result.metadata)
        written(result)  # refuse here what cannot be sent
        return result

    def abort(self, reason: str, *, cause: Cause | None = None) -> None:
        """Give the episode up when the block is left: its calls are dropped, its slot is offered again.

        cause: who lost it; None means the rollout. A result that was not sent yet is withdrawn.
        """
        if self.receipt is not None:
            raise RuntimeError(f"episode {self.id} was ended already; its result is stored")
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
        """The result given to `end`; None before."""
        return self._result

    async def let_go(
        self, receipt: EpisodeReceipt | None = None, given_up: str | None = None, cause: Cause | None = None
    ) -> None:
        """A team has decided the episode: stop renewing the lease, and send nothing when the block is left.

        given_up: the reason, if the caller gave the team up. cause: who lost it, if it was lost.
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
        """The reward given to `end`; None before."""
        return None if self._result is None else self._result.reward

    # -- the block ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Episode:
        if not self.claim.run_id:
            self.claim = self.claim.model_copy(update={"run_id": await self.server.current_run_id()})
        await self._claimed()
        self._renewing = asyncio.create_task(self._renew_while_alive())
        return self

    async def _claimed(self) -> None:
        """Claim. If the caller is cancelled meanwhile, give back the granted episode."""
        try:
            self._grant = await self.server.claim(self.claim)
        except asyncio.CancelledError:
            await self._take_back()
            raise

    async def _take_back(self) -> None:
        """Abort the episode of an unanswered claim: repeat the claim without waiting, which returns the same grant if there is one."""
        again = self.claim.model_copy(update={"wait_s": 0.0})
        asked = asyncio.ensure_future(self.server.claim(again, Patience(connect_s=0.0, later_s=0.0)))
        if not await within(self._clock, GIVE_BACK_S, asked):
            return  # nobody answers; the lease, if there is one, runs out by itself
        try:
            self._grant = asked.result()
        except SwarmError:
            return  # nothing was granted
        self._abort_reason, self.cause = "the client stopped before it began", self.if_cancelled
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
        """The urls that the episode's agent and client send requests to."""
        return self.base_url, self.server.url

    def blame(self, error: BaseException) -> Cause:
        """Who lost the episode, assuming that this error ended it."""
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            return self.if_cancelled if task is not None and task.cancelling() else Cause.ROLLOUT
        return cause_of(error, self.addresses)

    async def _send(self) -> EpisodeReceipt:
        if self._result is None:
            raise RuntimeError("there is no result to send")
        if self.in_team:
            raise RuntimeError(f"episode {self.id} ends with its team: leave the team's block, do not await its end")
        if self.receipt is None:
            return await await_answer(self._handed_in(self._result), self._clock)
        return self.receipt

    async def _send_or_abort(self) -> None:
        """Send the result; if the server refuses it for good, give the slot back right away."""
        try:
            await self._send()
        except InvalidSpec as error:
            self._abort_reason, self.cause = f"the result was refused: {error}"[:REASON_CHARS], Cause.GRADER
            await self._abort_quietly()
            raise

    async def find_cause(self) -> Cause | None:
        """Who lost the episode, according to the server's ledger, or this client's guess while the ledger does not say.

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
        """Abort. If the abort cannot be delivered, only log that, so that it does not hide the original error; the lease runs
        out anyway."""
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
            # Just after `max_episode_s` if that comes first, because a rollout that keeps playing holds up the next attempt.
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
    """The answer to a request. If the caller is cancelled, the request has GIVE_BACK_S to complete before it is cancelled too."""
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
