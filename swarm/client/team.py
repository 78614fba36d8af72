"""One attempt at a task by several models. Each model gets its own reward, and the results count on all servers or on none.

When the block exits, the client prepares every member, commits on the decider, and informs the others. If the client dies in
between, the servers ask the decider and settle the team among themselves.
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
"""Patience for informing the other servers of the decision. It is short because a server that was not informed asks the decider."""
FIRST_CONTACT_S = 20.0
"""How long a team waits for a server that has never answered its client, in seconds. A server that has answered before may be
restarting, and gets full patience."""
PARTNER_IDLE_LIMIT_S = 60.0
"""Maximum idle limit of a partner's episode, in seconds. After a restart, a killed client finds its own open episodes and gives them
back, but its episodes on other servers are only released, and their slots offered again, when this limit expires."""
_RESULT = frozenset(TeamResult.model_fields)

log = logging.getLogger(__name__)


class Team:
    """An async context manager that claims an episode on every server on entry. On exit it commits the results given to `end`, or
    aborts.

    `ep["planner"].base_url` and `ep["planner"].api_key` tell the agent of the member "planner" where its model is.
    """

    def __init__(self, members: Mapping[str, Episode], *, decider: str, patience_s: float) -> None:
        over = [name for name, episode in members.items() if episode.ended or episode.aborted]
        if over:
            raise ValueError(f"{', '.join(over)} already ended; form a team only from episodes that are still open")
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
        """End all members, each with its own reward. The results are sent when the block exits.

        If a call of any member failed on the server, that member is tainted and the whole team is dropped, unless `despite` says
        how the team recovered.

        Members may also be ended one by one, with `ep["planner"].end(reward=..., agent_rewards=...)`; do not await its return value.
        """
        if set(rewards) != set(self.members):
            raise ValueError(f"give one reward to each member ({', '.join(self.members)}); got {', '.join(rewards)}")
        shared: dict[str, Any] = {"success": success, "metrics": metrics, "metadata": metadata, "despite": despite}
        for name, reward in rewards.items():  # check all before setting any
            self.members[name].result_of(reward=reward, **shared)
        for name, reward in rewards.items():
            self.members[name].end(reward=reward, **shared)

    def abort(self, reason: str, *, cause: Cause | None = None) -> None:
        """Abort the team when the block exits: none of its results count. `cause` says who is to blame; None means the rollout."""
        self._abort_reason, self._abort_cause = reason, cause or Cause.ROLLOUT

    # -- the block ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        # All teams claim on servers in the same order, so that no two can wait for each other.
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
            raise EpisodeUnfinished(
                f"the team has no rewards for {', '.join(unfinished)}: call ep.end before the block exits"
            )
        else:
            await self._conclude()

    async def _claim(self, name: str) -> None:
        """Claim a member's episode. Raises: TeamOver if that member's run is over, and the errors of a claim."""
        episode = self.members[name]
        try:
            await episode.__aenter__()
        except (OverLimit, NotFound) as error:
            if isinstance(error, NotFound) and episode.claim.run_id:  # the server has moved on to another run,
                await episode.server.run(episode.claim.run_id)  # or never had this one; then this raises NotFound too
            raise TeamOver(
                ErrorCode.OVER_LIMIT, f"{name} cannot play any longer: {error.detail}", **error.fields
            ) from error
        self._held.append(name)

    async def _conclude(self) -> None:
        """Prepare all members, commit on the decider, then inform the others. Raises: TeamAborted, TeamUndecided, Refusal."""
        try:
            await self._prepare()
            self._asked_to_commit = True
            decided = await self._commit(self._decider)
        except (LeaseLost, NotFound) as lost:
            tainted = lost.fields.get("dropped") == DropReason.TAINTED
            cause = Cause.SERVER if tainted else await self._lost_by() or Cause.CLIENT
            await self._abort(f"a member was lost: {lost}", cause)
            raise TeamAborted(f"the team was aborted on every server: {lost}") from lost
        except BaseException as error:
            if not self._asked_to_commit:
                await self._abort(f"{type(error).__name__}: {error}", self._blame(error))
                raise
            await self._let_go()  # the decider may have received the commit, so only its decision counts
            if isinstance(error, ServerUnreachable):
                raise TeamUndecided(f"the decider did not answer the commit: {error}") from error
            raise
        self.committed = True
        await self._inform(decided)

    async def _prepare(self) -> None:
        """Prepare all members, the decider last. Once it is prepared, any server in doubt can ask it for the decision."""
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
        """Tell the other servers about the commit. This is best effort: a server that cannot be reached will ask the decider."""
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
        """Abort all members, the decider first. Call this only if no commit can have arrived, or after the commit was refused.

        `given_up` means that the caller asked for the abort and nothing failed.
        """
        words = redact(reason)[-REASON_CHARS:]
        for name in sorted(self._held, key=lambda name: name != self._decider):
            episode = self.members[name]
            try:
                await episode.server.abort(episode.id, episode.grant.lease, words, cause)
            except (LeaseLost, NotFound):  # already closed
                continue
            except SwarmError as error:
                log.warning("could not abort episode %s; its server will settle it: %s", episode.id, error)
        await self._let_go(words if given_up else None, cause)

    async def _let_go(self, given_up: str | None = None, cause: Cause | None = None) -> None:
        for name in self._held:
            await self.members[name].let_go(given_up=given_up, cause=cause)

    def _blame(self, error: BaseException) -> Cause:
        """Return who is to blame if `error` ended the team. The error may come from a request to any member's server."""
        if isinstance(error, asyncio.CancelledError):
            return next(iter(self.members.values())).blame(error)
        held = [self.members[name] for name in self._held]
        return cause_of(error, [address for episode in held for address in episode.addresses])

    async def _found_cause(self, error: BaseException) -> Cause:
        """Do the same as `_blame`, but if a member was lost before the agent failed, use the cause of that loss."""
        cause = self._blame(error)
        return await self._lost_by() or cause if cause is Cause.ROLLOUT else cause

    async def _lost_by(self) -> Cause | None:
        """Return who is to blame for losing a member, according to that member's server; None if no member was lost."""
        for name in self._held:
            episode = self.members[name]
            try:
                cause = (await episode.server.entry(episode.id, INFORM_PATIENCE)).cause
            except SwarmError as error:
                log.info("cannot find out who is to blame for losing episode %s: %s", episode.id, error)
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
    """Return a team, for use as `async with team(task_id="t-1", planner=swarm_a, solver=swarm_b) as ep`.

    A member is a client or an episode. If an episode is already claimed, such as the one that `run_tasks` passes to its rollout,
    the members that are clients take over its task, kind, mix and sampling.

    Args:
        task_id: the task to claim; needed unless a member is already claimed.
        decider: name of the member whose server decides; None means the first member.
        patience_s: how long this client may stay silent after preparing the members before the servers settle the team without it.
        members: the members by name, as keyword arguments.
    The other arguments are those of `SwarmClient.episode`.
    Raises: ValueError for fewer than two members, an unknown decider, a missing task, or two members on one server.
    """
    if len(members) < 2:
        raise ValueError("a team needs at least two members: team(task_id=..., planner=swarm_a, solver=swarm_b)")
    if decider is not None and decider not in members:
        raise ValueError(f"decider must be one of {', '.join(members)}, got {decider!r}")
    model = next((member for member in members.values() if isinstance(member, Episode) and member.claimed), None)
    if model is not None:
        task_id, kind, mix, sampling = model.claim.task_id, model.claim.kind, model.claim.mix, model.sampling
    if task_id is None and any(isinstance(member, SwarmClient) for member in members.values()):
        raise ValueError("give task_id, or a member that is already claimed")
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
    """Raise ValueError if two members are on one server, where they would share a group and be compared with each other."""
    names: dict[str, str] = {}
    for name, episode in members.items():
        other = names.setdefault(episode.server.url, name)
        if other != name:
            raise ValueError(
                f"{other} and {name} are on the same server, {episode.server.url}: give each its own server, or play both "
                f"in one episode, as the models policy@{other} and policy@{name}, and end it with agent_rewards"
            )


@dataclass(frozen=True, slots=True)
class Partner:
    """The server and run of another model in a trial that trains several. A workflow's `meet` receives its partners by role."""

    swarm: SwarmClient
    run_id: str

    def episode_with(self, episode: Episode) -> Episode:
        """Return an unclaimed episode of this model for the same task as `episode`, for use in `team(solver=episode, planner=...)`."""
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
