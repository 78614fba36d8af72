"""Messages about teams: an episode on several servers is prepared on all, decided on one, and reported to the others."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator

from swarm.protocol.episodes import Cause, Despite, DropReason, Finite, Reward
from swarm.protocol.problem import ClientModel
from swarm.protocol.quantities import NotBoolean

TeamOutcome = Literal["committed", "aborted"]


class Decider(ClientModel):
    """The episode whose fate the whole team shares, and how a server that is in doubt asks for it."""

    url: str
    """URL of the decider's server, reachable by clients and the other servers: its grant's `base_url` without `/v1`."""
    episode_id: str
    key: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_\-]+$")]
    """The `team_key` of the decider's grant: it only allows asking for the decision."""

    @field_validator("url")
    @classmethod
    def _plain(cls, url: str) -> str:
        parts = urlsplit(url)
        # Reading an invalid port raises a ValueError.
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError("must look like http://127.0.0.1:8642")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("must hold neither credentials nor a query")
        return url.rstrip("/")


class TeamResult(ClientModel):
    """The result of the episode if the team commits."""

    reward: Reward
    agent_rewards: dict[str, Reward] | None = None
    success: bool | None = None
    metrics: dict[str, Finite] = {}
    metadata: dict[str, Any] = {}
    despite: Despite = None
    """See `EpisodeResult.despite`."""


class EpisodePreparation(ClientModel):
    """Binds an episode to its team's decision. The one that names itself as decider is the decider."""

    lease: str
    decider: Decider
    result: TeamResult
    patience_s: Annotated[float, Field(ge=1, le=86_400), NotBoolean] = 60.0
    """How long the client may stay silent from now on. After that the decider aborts, and the others ask the decider."""


class EpisodeCommit(ClientModel):
    lease: str


class EpisodeResolution(ClientModel):
    """An operator's word on an episode that is prepared, in place of the decider's."""

    outcome: TeamOutcome
    reason: Annotated[str, Field(min_length=1, max_length=2_000)]


class TeamReceipt(BaseModel):
    """Stored durably before this was sent."""

    episode_id: str
    status: Literal["prepared", "committed", "aborted"]
    dropped: DropReason | None = None
    """As in `EpisodeReceipt`, for a committed member."""


class TeamDecision(BaseModel):
    """The decider's answer to a server in doubt. `aborted` and `committed` never change again."""

    episode_id: str
    decision: Literal["undecided", "committed", "aborted"]
    cause: Cause | None = None
    """Who or what lost the decider's episode, if known."""
