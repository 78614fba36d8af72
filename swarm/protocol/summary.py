"""A filter for the ledger, and sums over it: the answer to "why didn't it learn?" without reading every row."""

from __future__ import annotations

from typing import Annotated, TypedDict

from pydantic import BaseModel, Field

from swarm.protocol.episodes import Cause, DropReason, EpisodeKind, EpisodeState
from swarm.protocol.problem import ClientModel


class LedgerFilter(ClientModel):
    """Which episodes of the ledger to return; None in a field matches all."""

    run_id: str | None = None
    step: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """The step that trained them."""
    client_id: str | None = None
    task_id: str | None = None
    kind: EpisodeKind | None = None
    mix: str | None = None
    reason: DropReason | None = None
    state: EpisodeState | None = None
    cause: Cause | None = None


class LedgerFields(TypedDict, total=False):
    """The fields of `LedgerFilter`, as keywords of a method."""

    run_id: str | None
    step: int | None
    client_id: str | None
    task_id: str | None
    kind: EpisodeKind | None
    mix: str | None
    reason: DropReason | None
    state: EpisodeState | None
    cause: Cause | None


class LedgerCount(BaseModel):
    """How many episodes are equal in all of these fields."""

    client_id: str
    client_version: str
    kind: EpisodeKind
    mix: str | None
    state: EpisodeState
    reason: DropReason | None
    cause: Cause | None = None
    tainted: bool = False
    episodes: int
    reward_sum: float
    """Sum over episodes that have a reward."""
    rewarded: int
    prompt_tokens: int = 0
    """Prompt tokens of all calls, each call with its whole prompt. 0 from an older server."""
    sampled_tokens: int
    last_claim_at: float


class LastFailure(BaseModel):
    """The newest episode of one client and version that was aborted, ran out, or was ended without a call."""

    client_id: str
    client_version: str
    episode_id: str
    reason: DropReason
    detail: str | None
    claimed_at: float


class LostAttempts(BaseModel):
    """Attempts at one task by one client and version that one cause lost."""

    client_id: str
    client_version: str
    kind: EpisodeKind
    mix: str | None
    task_id: str
    cause: Cause
    episodes: int


class LedgerSummary(BaseModel):
    counts: list[LedgerCount]
    causes: dict[Cause, int] = {}
    """Attempts that each cause lost; causes that lost none are left out."""
    lost: list[LostAttempts] = []
    """Lost attempts by client, version and task, largest counts first; at most 1,000 rows."""
    failures: list[LastFailure]
    """Most recent failures, newest first."""
    recent: list[str]
    """The newest episodes that sampled any tokens, newest first; their traces may be worth reading."""
