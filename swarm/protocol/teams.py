"""Messages about teams. A team's episodes are prepared on all its servers, decided on one of them, and the others are informed."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator

from swarm.protocol.episodes import Cause, Despite, DropReason, Finite, Reward
from swarm.protocol.problem import ClientModel
from swarm.protocol.quantities import NotBoolean

TeamOutcome = Literal["committed", "aborted"]


class Decider(ClientModel):
    """The episode that decides for the whole team, and how a server in doubt asks for the decision."""

    url: str
    """URL of the decider's server, which clients and the other servers can reach. It is the `base_url` of its grant without `/v1`."""
    episode_id: str
    key: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_\-]+$")]
    """The `team_key` from the decider's grant. It only allows its holder to ask for the decision."""

    @field_validator("url")
    @classmethod
    def _plain(cls, url: str) -> str:
        parts = urlsplit(url)
        # Reading an invalid port raises a ValueError.
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError("must look like http://127.0.0.1:8642")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("must contain neither credentials nor a query")
        return url.rstrip("/")


class TeamResult(ClientModel):
    """The result of the episode if the team commits."""

    reward: Reward
    agent_rewards: dict[str, Reward] | None = None
    success: bool | None = None
    metrics: dict[str, Finite] = {}
    metadata: dict[str, Any] = {}
    despite: Despite = None
    """How the agent recovered from a call that failed on the server; see `EpisodeResult.despite`."""


class EpisodePreparation(ClientModel):
    """Binds an episode to its team's decision. The episode that names itself as the decider is the decider."""

    lease: str
    decider: Decider
    result: TeamResult
    patience_s: Annotated[float, Field(ge=1, le=86_400), NotBoolean] = 60.0
    """How long the client may stay silent from now on, in seconds. After that, the decider aborts and the others ask the decider."""


class EpisodeCommit(ClientModel):
    lease: str


class EpisodeResolution(ClientModel):
    """An operator's decision on a prepared episode, in place of the decider's."""

    outcome: TeamOutcome
    reason: Annotated[str, Field(min_length=1, max_length=2_000)]


class TeamReceipt(BaseModel):
    """Confirms that the new state of a team's episode is stored durably."""

    episode_id: str
    status: Literal["prepared", "committed", "aborted"]
    dropped: DropReason | None = None
    """For a committed member, the same as `EpisodeReceipt.dropped`."""


class TeamDecision(BaseModel):
    """The decider's answer to a server in doubt. Once it is `aborted` or `committed`, it never changes."""

    episode_id: str
    decision: Literal["undecided", "committed", "aborted"]
    cause: Cause | None = None
    """Who or what is to blame for losing the decider's episode, if known."""
