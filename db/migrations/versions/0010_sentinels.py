"""Verdicts name the sentinels that made them invalid. Those on record named them in their reason alone."""

from __future__ import annotations

import re

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_KEY = ("study_id", "plan_version", "stage", "hypothesis")


def upgrade() -> None:
    op.add_column("verdicts", sa.Column("sentinels", sa.JSON(), nullable=False, server_default="[]"))
    connection = op.get_bind()
    table = sa.table(
        "verdicts",
        *(sa.column(name) for name in (*_KEY, "verdict", "reason")),
        sa.column("sentinels", sa.JSON()),
    )
    invalid = sa.select(table).where(table.c.verdict == "invalid")
    for row in connection.execute(invalid).mappings().all():
        same = sa.and_(*(table.c[name] == row[name] for name in _KEY))
        connection.execute(table.update().where(same).values(sentinels=_named_in(row["reason"])))


def _named_in(reason: str) -> list[str]:
    """`leak: its words; collapse: its words`."""
    return list(dict.fromkeys(re.findall(r"(?:^|; )([a-z_]+): ", reason)))
