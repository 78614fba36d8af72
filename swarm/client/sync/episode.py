"""One episode, for plain scripts and threads."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from swarm.client import episode as episodes
from swarm.client.sync.loop import LoopThread
from swarm.protocol.episodes import Cause, EpisodeGrant, EpisodeReceipt


class Episode:
    """An episode as a context manager: `base_url`, `api_key`, `end(reward=...)`. An exception aborts it."""

    def __init__(self, inner: episodes.Episode, thread: LoopThread) -> None:
        self.inner = inner
        self.thread = thread

    def __enter__(self) -> Self:
        self.thread.call(self.inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thread.call(self.inner.__aexit__(kind, error, trace))

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
        """Hand the result in; when this returns, it is stored durably. Raises: LeaseLost.

        despite: how the agent recovered from a call that failed on the server's side; without it such an episode is not trained.
        by_hand: a person answered in the model's place; then an evaluation counts without a call.
        None: it belongs to a team, which sends the results of its members when its block is left.
        """

        async def send() -> EpisodeReceipt | None:
            ending = self.inner.end(
                reward=reward,
                success=success,
                metrics=metrics,
                agent_rewards=agent_rewards,
                metadata=metadata,
                despite=despite,
                by_hand=by_hand,
            )
            return None if self.inner.in_team else await ending

        return self.thread.call(send())

    def abort(self, reason: str, *, cause: Cause | None = None) -> None:
        """Give the episode up when the block is left. cause: who lost it; None means the rollout."""
        self.inner.abort(reason, cause=cause)
