"""The records of a study, as they began.

A change of `researcher/store/tables.py` needs the next file here (`0002_<noun>.py`, `down_revision = "0001"`) and
`SCHEMA_REVISION` raised; tests/researcher/store/test_migrations.py fails until models and migrations agree.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TEXT, NUMBER, COUNT, FLAG, JSON = sa.Text(), sa.Float(53), sa.Integer(), sa.Boolean(), sa.JSON()


def upgrade() -> None:
    _plans()
    _stages()
    _trials()
    _metrics()
    _conclusions()
    _ownership()
    _bookkeeping()


def _must(name: str, kind: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False)


def _may(name: str, kind: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=True)


def _serial(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False)


def _plans() -> None:
    op.create_table(
        "studies",
        _must("id", TEXT),
        _must("topic", TEXT),
        _must("options", JSON),
        _must("status", TEXT),
        _may("reason", TEXT),
        _must("stop_requested", FLAG),
        _must("pause_requested", FLAG),
        _must("created_at", NUMBER),
        _must("updated_at", NUMBER),
        _may("ended_at", NUMBER),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_studies_created_at", "studies", ["created_at"])
    op.create_index("ix_studies_status", "studies", ["status"])
    op.create_table(
        "plans",
        _must("study_id", TEXT),
        _must("version", COUNT),
        _must("digest", TEXT),
        _must("canonical", TEXT),
        _must("created_at", NUMBER),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"]),
        sa.PrimaryKeyConstraint("study_id", "version"),
    )
    op.create_table(
        "hypotheses",
        _must("study_id", TEXT),
        _must("plan_version", COUNT),
        _must("id", TEXT),
        _must("statement", TEXT),
        _must("factor", TEXT),
        _must("baseline", TEXT),
        _must("treatment", TEXT),
        _must("metric", TEXT),
        _must("direction", TEXT),
        _must("margin", NUMBER),
        _must("alpha", NUMBER),
        sa.ForeignKeyConstraint(
            ["study_id", "plan_version"], ["plans.study_id", "plans.version"], name="hypotheses_plan"
        ),
        sa.PrimaryKeyConstraint("study_id", "plan_version", "id"),
    )


def _stages() -> None:
    op.create_table(
        "stages",
        _must("study_id", TEXT),
        _must("plan_version", COUNT),
        _must("id", TEXT),
        _must("position", COUNT),
        _must("kind", TEXT),
        _must("arms", JSON),
        _must("seeds", COUNT),
        _must("max_seeds", COUNT),
        _must("first_seed", COUNT),
        _must("status", TEXT),
        _may("started_at", NUMBER),
        _may("ended_at", NUMBER),
        sa.ForeignKeyConstraint(["study_id", "plan_version"], ["plans.study_id", "plans.version"], name="stages_plan"),
        sa.PrimaryKeyConstraint("study_id", "plan_version", "id"),
    )


def _trials() -> None:
    op.create_table(
        "trials",
        _must("study_id", TEXT),
        _must("key", TEXT),
        _must("plan_version", COUNT),
        _must("stage", TEXT),
        _must("arm", TEXT),
        _must("seed", COUNT),
        _must("position", COUNT),
        _must("status", TEXT),
        _must("attempt", COUNT),
        _may("reason", TEXT),
        _may("evidence", JSON),
        _may("started_at", NUMBER),
        _may("ended_at", NUMBER),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"]),
        sa.PrimaryKeyConstraint("study_id", "key"),
    )
    op.create_table(
        "attempts",
        _must("study_id", TEXT),
        _must("trial_key", TEXT),
        _must("number", COUNT),
        _must("server_url", TEXT),
        _must("idempotency_key", TEXT),
        _must("spec", JSON),
        _may("run_id", TEXT),
        _may("blueprint", JSON),
        _may("client_pid", COUNT),
        _may("client_started", NUMBER),
        _must("step", COUNT),
        _must("outcome", TEXT),
        _may("reason", TEXT),
        _must("intent_at", NUMBER),
        _must("heartbeat_at", NUMBER),
        _may("ended_at", NUMBER),
        sa.ForeignKeyConstraint(["study_id", "trial_key"], ["trials.study_id", "trials.key"], name="attempts_trial"),
        sa.PrimaryKeyConstraint("study_id", "trial_key", "number"),
        sa.UniqueConstraint("idempotency_key"),
    )


def _metrics() -> None:
    op.create_table(
        "trial_metrics",
        _serial("id"),
        _must("study_id", TEXT),
        _must("trial_key", TEXT),
        _must("attempt", COUNT),
        _must("name", TEXT),
        _may("step", COUNT),
        _must("value", NUMBER),
        sa.ForeignKeyConstraint(
            ["study_id", "trial_key"], ["trials.study_id", "trials.key"], name="trial_metrics_trial"
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "trial_metrics_final",
        "trial_metrics",
        ["study_id", "trial_key", "attempt", "name"],
        unique=True,
        sqlite_where=sa.text("step IS NULL"),
        postgresql_where=sa.text("step IS NULL"),
    )
    op.create_index(
        "trial_metrics_point", "trial_metrics", ["study_id", "trial_key", "attempt", "name", "step"], unique=True
    )


def _conclusions() -> None:
    op.create_table(
        "verdicts",
        _must("study_id", TEXT),
        _must("plan_version", COUNT),
        _must("stage", TEXT),
        _must("hypothesis", TEXT),
        _must("position", COUNT),
        _must("verdict", TEXT),
        _must("reason", TEXT),
        _may("effect", JSON),
        _must("at", NUMBER),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"]),
        sa.PrimaryKeyConstraint("study_id", "plan_version", "stage", "hypothesis"),
    )
    op.create_table(
        "claims",
        _must("study_id", TEXT),
        _must("name", TEXT),
        _must("position", COUNT),
        _must("expression", TEXT),
        _may("value", JSON),
        _must("text", TEXT),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"]),
        sa.PrimaryKeyConstraint("study_id", "name"),
    )
    op.create_table(
        "findings",
        _must("id", TEXT),
        _must("study_id", TEXT),
        _must("plan_hash", TEXT),
        _must("instrument", TEXT),
        _must("model", TEXT),
        _must("factor", TEXT),
        _must("metric", TEXT),
        _must("statement", TEXT),
        _must("verdict", TEXT),
        _may("effect", JSON),
        _must("scope", JSON),
        _must("at", NUMBER),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_findings_instrument", "findings", ["instrument"])
    op.create_index("ix_findings_study_id", "findings", ["study_id"])
    op.create_table(
        "events",
        _serial("seq"),
        _must("study_id", TEXT),
        _must("at", NUMBER),
        _must("kind", TEXT),
        _must("detail", JSON),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"]),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("events_of_study", "events", ["study_id", "seq"])


def _ownership() -> None:
    op.create_table(
        "leases",
        _must("resource", TEXT),
        _may("owner", TEXT),
        _must("token", COUNT),
        _must("expires_at", NUMBER),
        sa.PrimaryKeyConstraint("resource"),
    )
    op.create_table(
        "budgets",
        _must("study_id", TEXT),
        _must("kind", TEXT),
        _must("limit", NUMBER),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"]),
        sa.PrimaryKeyConstraint("study_id", "kind"),
    )
    op.create_table(
        "budget_spendings",
        _must("study_id", TEXT),
        _must("kind", TEXT),
        _must("item", TEXT),
        _must("reserved", NUMBER),
        _must("spent", NUMBER),
        sa.ForeignKeyConstraint(
            ["study_id", "kind"], ["budgets.study_id", "budgets.kind"], name="budget_spendings_budget"
        ),
        sa.PrimaryKeyConstraint("study_id", "kind", "item"),
    )


def _bookkeeping() -> None:
    op.create_table(
        "schedules",
        _must("study_id", TEXT),
        _must("detail", JSON),
        _must("updated_at", NUMBER),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"]),
        sa.PrimaryKeyConstraint("study_id"),
    )
    op.create_table(
        "llm_calls",
        _serial("id"),
        _must("study_id", TEXT),
        _must("purpose", TEXT),
        _must("model", TEXT),
        _must("request", JSON),
        _may("answer", JSON),
        _may("error", TEXT),
        _must("prompt_tokens", COUNT),
        _must("completion_tokens", COUNT),
        _may("cost", NUMBER),
        _must("latency_s", NUMBER),
        _must("at", NUMBER),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_llm_calls_study_id", "llm_calls", ["study_id"])
    op.create_table(
        "outbox",
        _serial("seq"),
        _must("study_id", TEXT),
        _must("kind", TEXT),
        _must("ref", TEXT),
        _must("tries", COUNT),
        _may("error", TEXT),
        _must("created_at", NUMBER),
        _may("sent_at", NUMBER),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"]),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("outbox_open", "outbox", ["sent_at", "seq"])
