"""Each copy of the records has its own deliveries; until now there was one copy, MLflow's.

What MLflow had taken stays taken, what it had not still waits, with its tries and its error.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TEXT, NUMBER, COUNT = sa.Text(), sa.Float(53), sa.Integer()
SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "deliveries",
        sa.Column("sink", TEXT, nullable=False),
        sa.Column("seq", SERIAL, autoincrement=False, nullable=False),
        sa.Column("tries", COUNT, nullable=False),
        sa.Column("error", TEXT, nullable=True),
        sa.Column("sent_at", NUMBER, nullable=True),
        sa.ForeignKeyConstraint(["seq"], ["outbox.seq"]),
        sa.PrimaryKeyConstraint("sink", "seq"),
    )
    op.execute(
        "INSERT INTO deliveries (sink, seq, tries, error, sent_at) "
        "SELECT 'mlflow', seq, tries, error, sent_at FROM outbox WHERE tries > 0 OR sent_at IS NOT NULL"
    )
    op.drop_index("outbox_open", table_name="outbox")
    for column in ("tries", "error", "sent_at"):
        op.drop_column("outbox", column)
    op.create_index("outbox_of_study", "outbox", ["study_id", "seq"])
