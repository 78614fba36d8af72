"""Alembic's entry: migrates over the connection it is handed, inside the caller's transaction.

`Store.open` upgrades by itself. To write a new revision, see the head of versions/0001_records.py. There is no way down: put a backup back.
"""

from __future__ import annotations

from alembic import context

from researcher.store.tables import Base

connection = context.config.attributes.get("connection")
if connection is None:
    raise SystemExit("migrations run through Store.open(url), which takes the lock; there is no alembic.ini")
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    compare_type=True,
    render_as_batch=connection.dialect.name == "sqlite",
)
with context.begin_transaction():
    context.run_migrations()
