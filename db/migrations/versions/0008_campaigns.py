"""Campaigns: goals pursued through several studies, with their hypotheses, decisions and what people said."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

TEXT, NUMBER, COUNT, FLAG, JSON = sa.Text(), sa.Float(53), sa.Integer(), sa.Boolean(), sa.JSON()
_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "campaigns",
        sa.Column("id", TEXT, nullable=False),
        *(sa.Column(name, JSON, nullable=False) for name in ("goal", "aim", "options", "schedule")),
        sa.Column("status", TEXT, nullable=False),
        sa.Column("reason", TEXT),
        sa.Column("stop_requested", FLAG, nullable=False),
        sa.Column("pause_requested", FLAG, nullable=False),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("updated_at", NUMBER, nullable=False),
        sa.Column("ended_at", NUMBER),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_campaigns_created_at", "campaigns", ["created_at"])
    op.create_table(
        "campaign_hypotheses",
        sa.Column("campaign_id", TEXT, nullable=False),
        sa.Column("id", TEXT, nullable=False),
        sa.Column("version", COUNT, nullable=False),
        sa.Column("seq", COUNT, nullable=False),
        sa.Column("parent", TEXT),
        sa.Column("claim", TEXT, nullable=False),
        sa.Column("metric", TEXT, nullable=False),
        sa.Column("margin", NUMBER, nullable=False),
        *(sa.Column(name, TEXT, nullable=False) for name in ("prediction", "kill_if", "status", "because")),
        sa.ForeignKeyConstraint(["campaign_id"], ["campaigns.id"]),
        sa.PrimaryKeyConstraint("campaign_id", "id", "version"),
    )
    op.create_table(
        "decisions",
        sa.Column("campaign_id", TEXT, nullable=False),
        sa.Column("seq", COUNT, nullable=False),
        sa.Column("at", NUMBER, nullable=False),
        sa.Column("saw_digest", TEXT, nullable=False),
        sa.Column("saw", JSON, nullable=False),
        sa.Column("strategist", TEXT, nullable=False),
        sa.Column("proposals", JSON, nullable=False),
        sa.Column("action", TEXT, nullable=False),
        sa.Column("because", TEXT, nullable=False),
        *(sa.Column(name, TEXT) for name in ("hypothesis", "study_id", "role")),
        sa.Column("alpha", NUMBER),
        sa.Column("plan", TEXT),
        sa.Column("llm_calls", JSON, nullable=False),
        sa.ForeignKeyConstraint(["campaign_id"], ["campaigns.id"]),
        sa.PrimaryKeyConstraint("campaign_id", "seq"),
    )
    op.create_table(
        "campaign_events",
        sa.Column("seq", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("campaign_id", TEXT, nullable=False),
        sa.Column("at", NUMBER, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("detail", JSON, nullable=False),
        sa.ForeignKeyConstraint(["campaign_id"], ["campaigns.id"]),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("events_of_campaign", "campaign_events", ["campaign_id", "seq"])
    for name in ("campaign_id", "hypothesis_id", "role"):
        op.add_column("studies", sa.Column(name, TEXT))
    op.create_index("ix_studies_campaign_id", "studies", ["campaign_id"])
