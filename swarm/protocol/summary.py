"""A filter for the ledger, and totals over its entries that help answer "why didn't it learn?" without reading every row."""

from __future__ import annotations

from typing import Annotated, TypedDict

from pydantic import BaseModel, Field

from swarm.protocol.episodes import Cause, DropReason, EpisodeKind, EpisodeState
from swarm.protocol.problem import ClientModel


class LedgerFilter(ClientModel):
    """Which ledger entries to return. A field that is None matches all of them."""

    run_id: str | None = None
    step: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """The step that trained on the episodes."""
    client_id: str | None = None
    task_id: str | None = None
    kind: EpisodeKind | None = None
    mix: str | None = None
    reason: DropReason | None = None
    state: EpisodeState | None = None
    cause: Cause | None = None


class LedgerFields(TypedDict, total=False):
    """The fields of `LedgerFilter`, as keyword arguments of a method."""

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
    """Totals over the episodes that agree in client, version, kind, mix, state, reason, cause and `tainted`."""

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
    """Sum of rewards over the episodes that have one; `rewarded` is their number."""
    rewarded: int
    prompt_tokens: int = 0
    """Number of prompt tokens of all calls. Each call counts its whole prompt. 0 if the server is too old to report it."""
    sampled_tokens: int
    last_claim_at: float


class LastFailure(BaseModel):
    """The newest episode of one client and version that was aborted, expired, or ended without a call."""

    client_id: str
    client_version: str
    episode_id: str
    reason: DropReason
    detail: str | None
    claimed_at: float


class LostAttempts(BaseModel):
    """Number of attempts at one task by one client and version that were lost for the same cause."""

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
    """Number of attempts lost for each cause. Causes without lost attempts are omitted."""
    lost: list[LostAttempts] = []
    """Lost attempts by client, version and task, with the largest counts first; at most 1,000 rows."""
    failures: list[LastFailure]
    """Most recent failures, newest first."""
    recent: list[str]
    """Ids of the latest episodes that sampled any tokens, newest first. Their traces may be worth reading."""
