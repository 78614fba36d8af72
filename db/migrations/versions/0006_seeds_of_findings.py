"""Findings say which seeds their study had. Our own learn them from their trials; imported ones did not say."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_SEEDS = sa.text(
    "SELECT DISTINCT findings.id, trials.seed FROM findings"
    " JOIN plans ON plans.study_id = findings.study_id AND plans.digest = findings.plan_hash"
    " JOIN trials ON trials.study_id = plans.study_id AND trials.plan_version = plans.version"
    " WHERE findings.origin IS NULL ORDER BY findings.id, trials.seed"
)


def upgrade() -> None:
    column = sa.Column("seeds", sa.JSON(none_as_null=True), nullable=True)
    op.add_column("findings", column)
    connection = op.get_bind()
    found: dict[str, list[int]] = {}
    for finding, seed in connection.execute(_SEEDS):
        found.setdefault(finding, []).append(seed)
    table = sa.table("findings", sa.column("id", sa.Text()), sa.column("seeds", sa.JSON()))
    for finding, seeds in found.items():
        connection.execute(table.update().where(table.c.id == finding).values(seeds=seeds))
