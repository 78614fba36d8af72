"""A sample of each trial's episodes is kept. Trials that ended before have none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

TEXT = sa.Text()


def upgrade() -> None:
    op.create_table(
        "episodes",
        sa.Column("study_id", TEXT, nullable=False),
        sa.Column("trial_key", TEXT, nullable=False),
        sa.Column("id", TEXT, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["study_id", "trial_key"], ["trials.study_id", "trials.key"], name="episodes_trial"),
        sa.PrimaryKeyConstraint("study_id", "trial_key", "id"),
    )
