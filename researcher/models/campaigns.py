"""Records of campaigns: the goal, the hypotheses, and each decision with the data that it was made from."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel

from researcher.models.records import StudyOptions

Role = Literal["explore", "confirm"]
Action = Literal["explore", "confirm", "replicate", "new_instrument", "ask", "conclude"]
STUDIES: tuple[Action, ...] = ("explore", "confirm", "replicate")
"""Actions that carry out a study."""
CONFIRMING: tuple[Action, ...] = ("confirm", "replicate")
"""Actions that spend alpha."""
Fate = Literal["open", "supported", "refuted", "equivalent", "inconclusive", "invalid", "explored", "dropped"]


class CampaignStatus(StrEnum):
    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether the campaign is over."""
        return self in (CampaignStatus.DONE, CampaignStatus.STOPPED, CampaignStatus.FAILED)


class CampaignRecord(BaseModel):
    """One campaign as stored in SQL.

    Args:
        goal: fields of the goal file.
        aim: what these fields mean on the first instrument (`researcher.campaign.goal.Aim`). Journal events add further
            instruments.
        options: options of the campaign's studies.
        schedule: the timetable, and whether a daemon runs the campaign.
    """

    id: str
    goal: dict[str, Any]
    aim: dict[str, Any]
    options: StudyOptions = StudyOptions()
    schedule: dict[str, Any] = {}
    status: CampaignStatus
    reason: str | None = None
    stop_requested: bool = False
    pause_requested: bool = False
    created_at: float
    updated_at: float
    ended_at: float | None = None


class HypothesisRecord(BaseModel):
    """The newest version of a campaign's hypothesis.

    `claim`, `metric`, `margin`, `prediction` and `kill_if` are fixed when the hypothesis is registered; later versions change its
    status and its parent's. `kill_if` is the result that would end it. `seq` is the decision that wrote this version.
    """

    id: str
    parent: str | None = None
    claim: str
    metric: str
    margin: float
    prediction: str
    kill_if: str
    status: Fate = "open"
    because: str = ""
    version: int = 1
    seq: int


class DecisionRecord(BaseModel):
    """One decision of a campaign.

    Args:
        saw: all data that the decision was made from.
        saw_digest: SHA-256 of the canonical JSON of `saw`.
        proposals: every proposal, with its price and rank or with the reason why it was refused.
        plan: canonical JSON of the frozen plan, if the action carries out a study.
    """

    seq: int
    at: float = 0.0
    saw_digest: str
    saw: dict[str, Any]
    strategist: str
    proposals: list[dict[str, Any]] = []
    action: Action
    because: str
    hypothesis: str | None = None
    study_id: str | None = None
    role: Role | None = None
    alpha: float | None = None
    """Alpha that a confirmation spends."""
    plan: str | None = None
    llm_calls: list[dict[str, Any]] = []


SPOKEN = ("told", "vetoed", "approved", "answered", "amended")
"""Kinds of journal events that a person writes."""


class CampaignEvent(BaseModel):
    """One event of a campaign's journal (`told`, `vetoed`, `amended`, `asked`, `answered`, `joined`, `status`, …)."""

    seq: int
    campaign_id: str
    at: float
    kind: str
    detail: dict[str, Any] = {}
