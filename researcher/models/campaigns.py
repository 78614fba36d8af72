"""Records of campaigns: what was aimed at, which hypotheses there are, and each decision with what it saw."""

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
    """One campaign as SQL has it.

    goal: the goal file's fields. aim: what they mean on its first instrument (`researcher.campaign.goal.Aim`); further ones join
    by lines of its journal. options: those of its studies. schedule: its timetable, and whether a daemon carries it.
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
    """A hypothesis of a campaign in its newest version.

    claim, metric, margin, prediction and kill_if are fixed when it is registered; its fate and parent's are told by later
    versions. kill_if: what would end it. seq: the decision that wrote this version.
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
    """One decision. saw: what it was made from, whole; saw_digest: SHA-256 of its canonical JSON.

    proposals: every proposal with its price and rank, or with what was wrong with it. plan: the frozen plan's canonical
    JSON, where the action carries out a study.
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
    """Of a confirmation: what it spends."""
    plan: str | None = None
    llm_calls: list[dict[str, Any]] = []


SPOKEN = ("told", "vetoed", "approved", "answered", "amended")
"""Kinds of lines in which a person speaks."""


class CampaignEvent(BaseModel):
    """A line of a campaign's journal (`told`, `vetoed`, `amended`, `asked`, `answered`, `joined`, `status`, …)."""

    seq: int
    campaign_id: str
    at: float
    kind: str
    detail: dict[str, Any] = {}
