"""Notices have a table of their own: they are about campaigns as well as studies. Those that stood in the outbox move there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

TEXT, NUMBER, COUNT = sa.Text(), sa.Float(53), sa.Integer()
SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_BEGINNING = len("notify:")


def upgrade() -> None:
    op.create_table(
        "notices",
        sa.Column("seq", SERIAL, autoincrement=True, nullable=False),
        *(sa.Column(name, TEXT, nullable=False) for name in ("subject_id", "service", "key", "notice")),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("tries", COUNT, nullable=False),
        sa.Column("error", TEXT, nullable=True),
        sa.Column("sent_at", NUMBER, nullable=True),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("notices_once", "notices", ["subject_id", "service", "key"], unique=True)
    op.create_index("notices_waiting", "notices", ["service", "sent_at"])
    op.execute(
        "INSERT INTO notices (subject_id, service, key, notice, created_at, tries, error, sent_at) "
        f"SELECT o.study_id, substr(o.kind, {_BEGINNING + 1}), CAST(o.seq AS TEXT), o.ref, o.created_at, coalesce(d.tries, 0), "
        "d.error, d.sent_at FROM outbox o LEFT JOIN deliveries d ON d.seq = o.seq AND d.sink = o.kind "
        "WHERE o.kind LIKE 'notify:%' ORDER BY o.seq"
    )
    op.execute("DELETE FROM deliveries WHERE seq IN (SELECT seq FROM outbox WHERE kind LIKE 'notify:%')")
    op.execute("DELETE FROM outbox WHERE kind LIKE 'notify:%'")
