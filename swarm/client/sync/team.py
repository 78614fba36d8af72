"""One attempt at a task by several models, for plain scripts and threads: the synchronous twin of `swarm.client.team`."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from swarm.client.sync.client import SwarmClient
from swarm.client.sync.episode import Episode
from swarm.client.sync.loop import LoopThread
from swarm.client.team import Team as AsynchronousTeam
from swarm.client.team import team as asynchronous_team
from swarm.protocol.episodes import Cause, EpisodeKind


class Team:
    """A context manager: claims on every server on entry; on exit commits what `end` said, or aborts.

    `ep["planner"].base_url`, `.api_key`: where that member's agent finds its model.
    """

    def __init__(self, inner: AsynchronousTeam, thread: LoopThread) -> None:
        self._inner = inner
        self._thread = thread

    def __getitem__(self, member: str) -> Episode:
        return Episode(self._inner[member], self._thread)

    def __enter__(self) -> Self:
        self._thread.call(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.call(self._inner.__aexit__(kind, error, trace))

    @property
    def committed(self) -> bool:
        """Whether the team is known to count."""
        return self._inner.committed

    def end(
        self,
        *,
        rewards: Mapping[str, float],
        success: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Hand the results in, one reward for every member. Sent when the block is left."""

        async def hand_in() -> None:
            self._inner.end(rewards=rewards, success=success, metrics=metrics, metadata=metadata)

        self._thread.call(hand_in())

    def abort(self, reason: str, *, cause: Cause | None = None) -> None:
        """Give the team up when the block is left: nothing of it counts. cause: who lost it; None means the rollout."""
        self._inner.abort(reason, cause=cause)


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
    """`with team(task_id="t-1", planner=swarm_a, solver=swarm_b) as ep`; see `swarm.client.team`."""
    clients = [member for member in members.values() if isinstance(member, SwarmClient)]
    held = [member for member in members.values() if isinstance(member, Episode)]
    if not members:
        raise ValueError("a team has at least two members: team(task_id=..., planner=swarm_a, solver=swarm_b)")
    thread = clients[0].thread if clients else held[0].thread

    async def make() -> AsynchronousTeam:
        return asynchronous_team(
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

    return Team(thread.call(make()), thread)
