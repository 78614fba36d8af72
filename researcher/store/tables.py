"""The tables, as SQLAlchemy models. `db/migrations` creates them; a test checks that both agree.

Times are Unix seconds (UTC). A trial's key is unique within its study only: two studies may run the same plan.
"""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import JSON, BigInteger, Dialect, Float, ForeignKey, ForeignKeyConstraint, Index, Integer, Text, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

SCHEMA_REVISION = "0010"
"""Revision of the newest migration that this code knows."""

Serial = BigInteger().with_variant(Integer, "sqlite")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
"""Characters to replace: PostgreSQL text cannot hold NUL, and UTF-8 cannot encode lone surrogates."""


class Words(TypeDecorator[str]):
    """Text that every database accepts: it replaces characters that cannot be stored.

    Client output and LLM answers may contain any character.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", value)


class Base(DeclarativeBase):
    type_annotation_map = {float: Float(53), str: Words, dict[str, Any]: JSON, Any: JSON}


class StudyRow(Base):
    __tablename__ = "studies"

    id: Mapped[str] = mapped_column(primary_key=True)
    topic: Mapped[str]
    options: Mapped[dict[str, Any]]
    status: Mapped[str] = mapped_column(index=True)
    reason: Mapped[str | None]
    stop_requested: Mapped[bool]
    pause_requested: Mapped[bool]
    created_at: Mapped[float] = mapped_column(index=True)
    updated_at: Mapped[float]
    ended_at: Mapped[float | None]
    campaign_id: Mapped[str | None] = mapped_column(index=True)
    hypothesis_id: Mapped[str | None]
    role: Mapped[str | None]


class CampaignRow(Base):
    """A campaign. `goal` is the goal file; `aim` is the goal in the terms of the first instrument, fixed at the start."""

    __tablename__ = "campaigns"

    id: Mapped[str] = mapped_column(primary_key=True)
    goal: Mapped[dict[str, Any]]
    aim: Mapped[dict[str, Any]]
    options: Mapped[dict[str, Any]]
    schedule: Mapped[dict[str, Any]]
    status: Mapped[str]
    reason: Mapped[str | None]
    stop_requested: Mapped[bool]
    pause_requested: Mapped[bool]
    created_at: Mapped[float] = mapped_column(index=True)
    updated_at: Mapped[float]
    ended_at: Mapped[float | None]


class CampaignHypothesisRow(Base):
    """One version of a campaign's hypothesis. Append-only: a change adds a new version."""

    __tablename__ = "campaign_hypotheses"

    campaign_id: Mapped[str] = mapped_column(ForeignKey("campaigns.id"), primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    seq: Mapped[int]
    parent: Mapped[str | None]
    claim: Mapped[str]
    metric: Mapped[str]
    margin: Mapped[float]
    prediction: Mapped[str]
    kill_if: Mapped[str]
    status: Mapped[str]
    because: Mapped[str]


class DecisionRow(Base):
    """A campaign's decision. Append-only, one row per number: an interrupted decision is made again but stored only once."""

    __tablename__ = "decisions"

    campaign_id: Mapped[str] = mapped_column(ForeignKey("campaigns.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    saw_digest: Mapped[str]
    saw: Mapped[dict[str, Any]]
    strategist: Mapped[str]
    proposals: Mapped[Any]
    action: Mapped[str]
    because: Mapped[str]
    hypothesis: Mapped[str | None]
    study_id: Mapped[str | None]
    role: Mapped[str | None]
    alpha: Mapped[float | None]
    plan: Mapped[str | None]
    llm_calls: Mapped[Any]


class CampaignEventRow(Base):
    """The campaign's journal. Append-only: messages from people, status changes and other events."""

    __tablename__ = "campaign_events"
    __table_args__ = (Index("events_of_campaign", "campaign_id", "seq"),)

    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    campaign_id: Mapped[str] = mapped_column(ForeignKey("campaigns.id"))
    at: Mapped[float]
    kind: Mapped[str]
    detail: Mapped[dict[str, Any]]


class PlanRow(Base):
    """One version of a study's plan. Never updated: a change adds a new version."""

    __tablename__ = "plans"

    study_id: Mapped[str] = mapped_column(ForeignKey("studies.id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str]
    canonical: Mapped[str]
    created_at: Mapped[float]


class HypothesisRow(Base):
    __tablename__ = "hypotheses"
    __table_args__ = (
        ForeignKeyConstraint(["study_id", "plan_version"], ["plans.study_id", "plans.version"], name="hypotheses_plan"),
    )

    study_id: Mapped[str] = mapped_column(primary_key=True)
    plan_version: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    statement: Mapped[str]
    factor: Mapped[str]
    baseline: Mapped[str]
    treatment: Mapped[str]
    metric: Mapped[str]
    direction: Mapped[str]
    margin: Mapped[float]
    alpha: Mapped[float]


class StageRow(Base):
    __tablename__ = "stages"
    __table_args__ = (
        ForeignKeyConstraint(["study_id", "plan_version"], ["plans.study_id", "plans.version"], name="stages_plan"),
    )

    study_id: Mapped[str] = mapped_column(primary_key=True)
    plan_version: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int]
    kind: Mapped[str]
    arms: Mapped[Any]
    seeds: Mapped[int]
    max_seeds: Mapped[int]
    first_seed: Mapped[int]
    status: Mapped[str]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]


class TrialRow(Base):
    __tablename__ = "trials"

    study_id: Mapped[str] = mapped_column(ForeignKey("studies.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    plan_version: Mapped[int]
    stage: Mapped[str]
    arm: Mapped[str]
    seed: Mapped[int]
    position: Mapped[int]
    status: Mapped[str]
    attempt: Mapped[int]
    reason: Mapped[str | None]
    evidence: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]


class AttemptRow(Base):
    __tablename__ = "attempts"
    __table_args__ = (
        ForeignKeyConstraint(["study_id", "trial_key"], ["trials.study_id", "trials.key"], name="attempts_trial"),
    )

    study_id: Mapped[str] = mapped_column(primary_key=True)
    trial_key: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    server_url: Mapped[str]
    idempotency_key: Mapped[str] = mapped_column(unique=True)
    spec: Mapped[dict[str, Any]]
    run_id: Mapped[str | None]
    blueprint: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    client_pid: Mapped[int | None]
    client_started: Mapped[float | None]
    step: Mapped[int]
    outcome: Mapped[str]
    reason: Mapped[str | None]
    intent_at: Mapped[float]
    heartbeat_at: Mapped[float]
    ended_at: Mapped[float | None]


class MetricRow(Base):
    """One value of a metric. `step` is NULL for a trial's finals; in a series it is the optimizer step or the episode's index."""

    __tablename__ = "trial_metrics"
    __table_args__ = (
        ForeignKeyConstraint(["study_id", "trial_key"], ["trials.study_id", "trials.key"], name="trial_metrics_trial"),
        Index("trial_metrics_point", "study_id", "trial_key", "attempt", "name", "step", unique=True),
        Index(
            "trial_metrics_final",
            "study_id",
            "trial_key",
            "attempt",
            "name",
            unique=True,
            sqlite_where=text("step IS NULL"),
            postgresql_where=text("step IS NULL"),
        ),
    )

    id: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    study_id: Mapped[str]
    trial_key: Mapped[str]
    attempt: Mapped[int]
    name: Mapped[str]
    step: Mapped[int | None]
    value: Mapped[float]


class AttritionRow(Base):
    """Number of attempts at episodes of one kind (`train`, `eval`), by cause of loss. Cause `none` counts rewarded episodes."""

    __tablename__ = "trial_attrition"
    __table_args__ = (
        ForeignKeyConstraint(
            ["study_id", "trial_key"], ["trials.study_id", "trials.key"], name="trial_attrition_trial"
        ),
        Index("trial_attrition_arm", "study_id", "arm"),
    )

    study_id: Mapped[str] = mapped_column(primary_key=True)
    trial_key: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    cause: Mapped[str] = mapped_column(primary_key=True)
    arm: Mapped[str]
    attempts: Mapped[int]


class VerdictRow(Base):
    __tablename__ = "verdicts"

    study_id: Mapped[str] = mapped_column(ForeignKey("studies.id"), primary_key=True)
    plan_version: Mapped[int] = mapped_column(primary_key=True)
    stage: Mapped[str] = mapped_column(primary_key=True)
    hypothesis: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int]
    verdict: Mapped[str]
    reason: Mapped[str]
    effect: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    sentinels: Mapped[Any] = mapped_column(server_default="[]")
    at: Mapped[float]


class ClaimRow(Base):
    __tablename__ = "claims"

    study_id: Mapped[str] = mapped_column(ForeignKey("studies.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int]
    expression: Mapped[str]
    value: Mapped[Any] = mapped_column(JSON(none_as_null=True), nullable=True)
    text: Mapped[str]


class FindingRow(Base):
    """A finding. An imported one has an `origin`, and the `study_id` of another group's study."""

    __tablename__ = "findings"

    id: Mapped[str] = mapped_column(primary_key=True)
    study_id: Mapped[str] = mapped_column(index=True)
    plan_hash: Mapped[str]
    question: Mapped[str]
    instrument: Mapped[str] = mapped_column(index=True)
    instrument_version: Mapped[str]
    model: Mapped[str]
    factor: Mapped[str]
    metric: Mapped[str]
    statement: Mapped[str]
    direction: Mapped[str]
    margin: Mapped[float | None]
    baseline: Mapped[Any]
    treatment: Mapped[Any]
    verdict: Mapped[str]
    effect: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    scope: Mapped[dict[str, Any]]
    seeds: Mapped[Any] = mapped_column(JSON(none_as_null=True), nullable=True)
    at: Mapped[float]
    origin: Mapped[str | None]
    imported_at: Mapped[float | None]


class EventRow(Base):
    """The journal. Append-only: rows are never updated or deleted."""

    __tablename__ = "events"
    __table_args__ = (Index("events_of_study", "study_id", "seq"),)

    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    study_id: Mapped[str] = mapped_column(ForeignKey("studies.id"))
    at: Mapped[float]
    kind: Mapped[str]
    detail: Mapped[dict[str, Any]]


class LeaseRow(Base):
    """Lease of `study:<id>`, `campaign:<id>` or `server:<url>`. Released rows stay, so that tokens only ever increase."""

    __tablename__ = "leases"

    resource: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str | None]
    token: Mapped[int]
    expires_at: Mapped[float]


class BudgetRow(Base):
    __tablename__ = "budgets"

    study_id: Mapped[str] = mapped_column(ForeignKey("studies.id"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    limit: Mapped[float]


class SpendingRow(Base):
    """One expense: reserved first, spent afterwards. `item` makes reserving and spending idempotent."""

    __tablename__ = "budget_spendings"
    __table_args__ = (
        ForeignKeyConstraint(
            ["study_id", "kind"], ["budgets.study_id", "budgets.kind"], name="budget_spendings_budget"
        ),
    )

    study_id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(primary_key=True)
    reserved: Mapped[float]
    spent: Mapped[float]


class LlmCallRow(Base):
    __tablename__ = "llm_calls"

    id: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    study_id: Mapped[str] = mapped_column(ForeignKey("studies.id"), index=True)
    purpose: Mapped[str]
    model: Mapped[str]
    request: Mapped[dict[str, Any]]
    answer: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    error: Mapped[str | None]
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    cost: Mapped[float | None]
    latency_s: Mapped[float]
    at: Mapped[float]


class ScheduleRow(Base):
    __tablename__ = "schedules"

    study_id: Mapped[str] = mapped_column(ForeignKey("studies.id"), primary_key=True)
    detail: Mapped[dict[str, Any]]
    updated_at: Mapped[float]


class ReceiptRow(Base):
    """The number of a writer's last transaction, written within that transaction (see retries.py). Each thread is a writer."""

    __tablename__ = "receipts"

    writer: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[float]


class OutboxRow(Base):
    """A change that sinks have to copy, written in the transaction of the change."""

    __tablename__ = "outbox"
    __table_args__ = (Index("outbox_of_study", "study_id", "seq"),)

    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    study_id: Mapped[str] = mapped_column(ForeignKey("studies.id"))
    kind: Mapped[str]
    ref: Mapped[str]
    created_at: Mapped[float]


class DeliveryRow(Base):
    """Delivery of an outbox row to a sink (`mlflow`, `tensorboard`, `wandb`), or the last error. Without a row, it was never tried."""

    __tablename__ = "deliveries"

    sink: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(Serial, ForeignKey("outbox.seq"), primary_key=True, autoincrement=False)
    tries: Mapped[int]
    error: Mapped[str | None]
    sent_at: Mapped[float | None]


class NoticeRow(Base):
    """A notice about a study or a campaign (`subject_id`) for one service, and whether it was sent."""

    __tablename__ = "notices"
    __table_args__ = (
        Index("notices_once", "subject_id", "service", "key", unique=True),
        Index("notices_waiting", "service", "sent_at"),
    )

    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    subject_id: Mapped[str]
    service: Mapped[str]
    key: Mapped[str]
    notice: Mapped[str]
    created_at: Mapped[float]
    tries: Mapped[int]
    error: Mapped[str | None]
    sent_at: Mapped[float | None]


class EpisodeRow(Base):
    """A sampled episode of a trial, call by call, cut to a bounded size. A trial's sample is complete when the trial is done."""

    __tablename__ = "episodes"
    __table_args__ = (
        ForeignKeyConstraint(["study_id", "trial_key"], ["trials.study_id", "trials.key"], name="episodes_trial"),
    )

    study_id: Mapped[str] = mapped_column(primary_key=True)
    trial_key: Mapped[str] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int]
    detail: Mapped[dict[str, Any]]
