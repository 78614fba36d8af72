"""One attempt at a task by several models: each gets its own reward, and they count on all servers or on none.

When the block is left, the client prepares every member, commits on the decider, and informs the others. If the client dies in
between, the servers ask the decider and settle the team themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from foundation.logs import redact
from swarm.client.client import SwarmClient
from swarm.client.episode import REASON_CHARS, Episode
from swarm.client.errors import (
    EpisodeUnfinished,
    LeaseLost,
    NotFound,
    OverLimit,
    ServerUnreachable,
    TeamAborted,
    TeamOver,
    TeamUndecided,
)
from swarm.client.losses import cause_of
from swarm.client.wire import Patience
from swarm.protocol.episodes import Cause, DropReason, EpisodeKind, EpisodeReceipt
from swarm.protocol.errors import ErrorCode, SwarmError
from swarm.protocol.teams import Decider, EpisodePreparation, TeamReceipt, TeamResult

INFORM_PATIENCE = Patience(connect_s=2.0, later_s=2.0)
"""For informing the other servers of the decision. Short, because a server that cannot be reached asks the decider itself."""
FIRST_CONTACT_S = 20.0
"""How long a team waits for a server that has never answered its client. One that has answered may be restarting, and gets
full patience."""
PARTNER_IDLE_LIMIT_S = 60.0
"""Longest idle limit of a partner's episode. A killed client finds its own open episodes after a restart and gives them back, but its
episodes on other servers expire only by this limit; then their slots are offered again."""
_RESULT = frozenset(TeamResult.model_fields)

log = logging.getLogger(__name__)


class Team:
    """An async context manager: claims on every server on entry; on exit commits the results of `end`, or aborts.

    `ep["planner"].base_url`, `.api_key`: where that member's agent finds its model.
    """

    def __init__(self, members: Mapping[str, Episode], *, decider: str, patience_s: float) -> None:
        over = [name for name, episode in members.items() if episode.ended or episode.aborted]
        if over:
            raise ValueError(f"{', '.join(over)} already ended: the members of a team end with it")
        self.members = dict(members)
        self.committed = False
        """Whether the team is known to be committed."""
        self._decider = decider
        self._patience_s = patience_s
        self._held = [name for name, episode in members.items() if episode.claimed]
        self._abort_reason: str | None = None
        self._abort_cause = Cause.ROLLOUT
        self._asked_to_commit = False

    def __getitem__(self, member: str) -> Episode:
        return self.members[member]

    def end(
        self,
        *,
        rewards: Mapping[str, float],
        success: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        despite: str | None = None,
    ) -> None:
        """End all members, each with its reward. The results are sent when the block is left.

        If a call failed on the server's side, its member is tainted and the whole team is dropped. despite: how the team
        recovered; then it counts.

        Members may also be ended one by one (`ep["planner"].end(reward=..., agent_rewards=...)`), without awaiting the result.
        """
        if set(rewards) != set(self.members):
            raise ValueError(f"give each member its reward: {', '.join(self.members)}; got {', '.join(rewards)}")
        shared: dict[str, Any] = {"success": success, "metrics": metrics, "metadata": metadata, "despite": despite}
        for name, reward in rewards.items():  # check all before setting any
            self.members[name].result_of(reward=reward, **shared)
        for name, reward in rewards.items():
            self.members[name].end(reward=reward, **shared)

    def abort(self, reason: str, *, cause: Cause | None = None) -> None:
        """Give the team up when the block is left: none of its results count.

        cause: who lost it; None means the rollout.
        """
        self._abort_reason, self._abort_cause = reason, cause or Cause.ROLLOUT

    # -- the block ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        # All teams claim in the same order of servers, so that two cannot wait for each other.
        waiting = [name for name in self.members if name not in self._held]
        try:
            for name in waiting:  # before any slot is held
                await self.members[name].server.meet(FIRST_CONTACT_S)
            for name in sorted(waiting, key=lambda name: (self.members[name].server.url, name)):
                await self._claim(name)
        except BaseException as error:
            await self._abort(
                f"another member could not be claimed: {type(error).__name__}: {error}", self._blame(error)
            )
            raise
        for episode in self.members.values():
            episode.in_team = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unfinished = [name for name, episode in self.members.items() if not episode.ended]
        if error is not None:
            cause = await self._found_cause(error) if self._abort_reason is None else self._abort_cause
            await self._abort(f"{type(error).__name__}: {error}", cause)
        elif self._abort_reason is not None:
            await self._abort(self._abort_reason, self._abort_cause, given_up=True)
        elif unfinished:
            await self._abort("the client left the team without rewards", Cause.ROLLOUT, given_up=True)
            raise EpisodeUnfinished(f"the team was left without rewards for {', '.join(unfinished)}: call ep.end")
        else:
            await self._conclude()

    async def _claim(self, name: str) -> None:
        """Raises: TeamOver (the run of that member is over), and whatever a claim raises."""
        episode = self.members[name]
        try:
            await episode.__aenter__()
        except (OverLimit, NotFound) as error:
            if isinstance(error, NotFound) and episode.claim.run_id:  # the server has another run by now,
                await episode.server.run(episode.claim.run_id)  # or never knew this one; then this raises NotFound too
            raise TeamOver(
                ErrorCode.OVER_LIMIT, f"{name} cannot play any more: {error.detail}", **error.fields
            ) from error
        self._held.append(name)

    async def _conclude(self) -> None:
        """Prepare all, commit on the decider, inform the others. Raises: TeamAborted, TeamUndecided, Refusal."""
        try:
            await self._prepare()
            self._asked_to_commit = True
            decided = await self._commit(self._decider)
        except (LeaseLost, NotFound) as lost:
            tainted = lost.fields.get("dropped") == DropReason.TAINTED
            cause = Cause.SERVER if tainted else await self._lost_by() or Cause.CLIENT
            await self._abort(f"a member was lost: {lost}", cause)
            raise TeamAborted(f"the team counts on no server: {lost}") from lost
        except BaseException as error:
            if not self._asked_to_commit:
                await self._abort(f"{type(error).__name__}: {error}", self._blame(error))
                raise
            await self._let_go()  # the decider may have received it: only its decision counts
            if isinstance(error, ServerUnreachable):
                raise TeamUndecided(f"the decider did not answer the commit: {error}") from error
            raise
        self.committed = True
        await self._inform(decided)

    async def _prepare(self) -> None:
        """Prepare all members, the decider last: once it is prepared, any server in doubt can ask it."""
        deciding = self.members[self._decider]
        url = deciding.base_url.removesuffix("/v1")
        decider = Decider(url=url, episode_id=deciding.id, key=deciding.grant.team_key)
        for name in sorted(self.members, key=lambda name: name == self._decider):
            episode = self.members[name]
            assert episode.result is not None
            result = TeamResult.model_validate(episode.result.model_dump(include=set(_RESULT)))
            lease = episode.grant.lease
            wish = EpisodePreparation(lease=lease, decider=decider, result=result, patience_s=self._patience_s)
            await episode.server.prepare(episode.id, wish)

    async def _commit(self, name: str, patience: Patience | None = None) -> TeamReceipt:
        episode = self.members[name]
        return await episode.server.commit(episode.id, episode.grant.lease, patience)

    async def _inform(self, decided: TeamReceipt) -> None:
        """Inform the other servers, best effort: one that cannot be reached asks the decider."""
        others = [name for name in self.members if name != self._decider]
        commits = (self._commit(name, INFORM_PATIENCE) for name in others)
        outcomes: list[TeamReceipt | BaseException] = []
        try:
            outcomes = await asyncio.gather(*commits, return_exceptions=True)
        finally:
            heard = [decided, *(outcome for outcome in outcomes if isinstance(outcome, TeamReceipt))]
            dropped = {receipt.episode_id: receipt.dropped for receipt in heard}
            for episode in self.members.values():
                receipt = EpisodeReceipt(episode_id=episode.id, status="pooled", dropped=dropped.get(episode.id))
                await episode.let_go(receipt)
        for name, outcome in zip(others, outcomes, strict=True):
            if isinstance(outcome, SwarmError):
                log.info("the server of %s will ask the decider: %s", name, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    async def _abort(self, reason: str, cause: Cause, *, given_up: bool = False) -> None:
        """Abort all members, the decider first. Only while no commit can have been received, or after it was refused.

        given_up: the caller wanted it; nothing failed.
        """
        words = redact(reason)[-REASON_CHARS:]
        for name in sorted(self._held, key=lambda name: name != self._decider):
            episode = self.members[name]
            try:
                await episode.server.abort(episode.id, episode.grant.lease, words, cause)
            except (LeaseLost, NotFound):  # already closed
                continue
            except SwarmError as error:
                log.warning("could not abort episode %s; its server settles it: %s", episode.id, error)
        await self._let_go(words if given_up else None, cause)

    async def _let_go(self, given_up: str | None = None, cause: Cause | None = None) -> None:
        for name in self._held:
            await self.members[name].let_go(given_up=given_up, cause=cause)

    def _blame(self, error: BaseException) -> Cause:
        """Who lost the team, if this error ended it. The error may be about a request to any member's server."""
        if isinstance(error, asyncio.CancelledError):
            return next(iter(self.members.values())).blame(error)
        held = [self.members[name] for name in self._held]
        return cause_of(error, [address for episode in held for address in episode.addresses])

    async def _found_cause(self, error: BaseException) -> Cause:
        """Like `_blame`, but if a member was lost before the agent failed, the cause of that loss counts for the team."""
        cause = self._blame(error)
        return await self._lost_by() or cause if cause is Cause.ROLLOUT else cause

    async def _lost_by(self) -> Cause | None:
        """Who lost a member, according to its server; None if none was lost."""
        for name in self._held:
            episode = self.members[name]
            try:
                cause = (await episode.server.entry(episode.id, INFORM_PATIENCE)).cause
            except SwarmError as error:
                log.info("cannot find out who lost episode %s: %s", episode.id, error)
                continue
            if cause is not None:
                return cause
        return None


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
    """`async with team(task_id="t-1", planner=swarm_a, solver=swarm_b) as ep`.

    decider: the member whose server decides; None: the first. patience_s: how long this client may be silent after the members
    are prepared, before the servers settle without it. A member may be a client or an episode: your own, or one that is already
    claimed, such as the one that `run_tasks` gives to its rollout (then members that are clients take its task, kind, mix and
    sampling).
    """
    if len(members) < 2:
        raise ValueError("a team has at least two members: team(task_id=..., planner=swarm_a, solver=swarm_b)")
    if decider is not None and decider not in members:
        raise ValueError(f"decider must be one of {', '.join(members)}, got {decider!r}")
    model = next((member for member in members.values() if isinstance(member, Episode) and member.claimed), None)
    if model is not None:
        task_id, kind, mix, sampling = model.claim.task_id, model.claim.kind, model.claim.mix, model.sampling
    if task_id is None and any(isinstance(member, SwarmClient) for member in members.values()):
        raise ValueError("which task? give task_id, or a member that is claimed already")
    episodes = {
        name: member
        if isinstance(member, Episode)
        else member.episode(
            task_id=task_id or "",
            kind=kind,
            mix=mix,
            sampling=sampling,
            idle_limit_s=idle_limit_s,
            max_episode_s=max_episode_s,
            max_call_s=max_call_s,
            wait_s=wait_s,
        )
        for name, member in members.items()
    }
    _refuse_shared_servers(episodes)
    return Team(episodes, decider=decider or next(iter(members)), patience_s=patience_s)


def _refuse_shared_servers(members: Mapping[str, Episode]) -> None:
    """Refuse two members on one server, where they would be each other's baseline in one group. Raises: ValueError."""
    names: dict[str, str] = {}
    for name, episode in members.items():
        other = names.setdefault(episode.server.url, name)
        if other != name:
            raise ValueError(
                f"{other} and {name} are on the same server, {episode.server.url}: give each a server of its own, or play both "
                f"in one episode, as the models policy@{other} and policy@{name}, and end it with agent_rewards"
            )


@dataclass(frozen=True, slots=True)
class Partner:
    """Another model of a trial that trains several: its server and its run. A workflow gets them by role (`meet`)."""

    swarm: SwarmClient
    run_id: str

    def episode_with(self, episode: Episode) -> Episode:
        """This model's episode for the task of a claimed `episode`, not yet claimed: for `team(solver=episode, planner=...)`."""
        claim = episode.claim
        return self.swarm.episode(
            task_id=claim.task_id,
            run_id=self.run_id,
            mix=claim.mix,
            kind=claim.kind,
            idle_limit_s=min(claim.idle_limit_s, PARTNER_IDLE_LIMIT_S),
            max_episode_s=claim.max_episode_s,
            max_call_s=claim.max_call_s,
            sampling=episode.sampling,
        )
