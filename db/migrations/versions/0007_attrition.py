"""Attempts at episodes are counted, by trial, arm, kind and who or what lost them. Trials that ended before have no counts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

TEXT = sa.Text()


def upgrade() -> None:
    op.create_table(
        "trial_attrition",
        *(sa.Column(name, TEXT, nullable=False) for name in ("study_id", "trial_key", "kind", "cause", "arm")),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["study_id", "trial_key"], ["trials.study_id", "trials.key"], name="trial_attrition_trial"
        ),
        sa.PrimaryKeyConstraint("study_id", "trial_key", "kind", "cause"),
    )
    op.create_index("trial_attrition_arm", "trial_attrition", ["study_id", "arm"])
