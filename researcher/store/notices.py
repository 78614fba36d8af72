"""Notices that wait for their services, in the outbox: one row per notice and service, written once per event.

A service is a name such as `SLACK`, never its address. Its rows are of the kind `notify:SLACK`, which is also the sink that
takes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from researcher.models import Notice
from researcher.store.outbox import NOTIFY, Message
from researcher.store.retries import retried
from researcher.store.tables import OutboxRow
from researcher.store.transactions import Part, Transactions


class Notices(Part):
    """Anybody may record one: it needs no lease, and changes nothing of a study."""

    @retried
    def record(self, notice: Notice, names: Sequence[str]) -> bool:
        """Have the notice sent to each of these services; returns whether it is new. One of the same key was recorded before."""
        with self._db.writing() as session:
            return add(self._db, session, notice, names)

    @retried
    def of(self, subject_id: str) -> list[Notice]:
        """Every notice about it, the first one first, however many services it goes to."""
        with self._db.reading() as session:
            rows = session.scalars(
                select(OutboxRow)
                .where(OutboxRow.study_id == subject_id, OutboxRow.kind.startswith(NOTIFY))
                .order_by(OutboxRow.seq)
            )
            found = [Notice.model_validate_json(row.ref) for row in rows]
        return list({notice.key: notice for notice in found}.values())

    @retried
    def names(self) -> list[str]:
        """Services that any notice was ever recorded for."""
        with self._db.reading() as session:
            kinds = session.scalars(select(OutboxRow.kind).where(OutboxRow.kind.startswith(NOTIFY)).distinct())
            return sorted(kind.removeprefix(NOTIFY) for kind in kinds)


def add(db: Transactions, session: Session, notice: Notice, names: Sequence[str]) -> bool:
    """`Notices.record` within the transaction of the event itself."""
    new = [name for name in dict.fromkeys(names) if not _is_there(session, notice, name)]
    for name in new:
        db.announce(session, notice.subject_id, sink_name(name), notice.model_dump_json())
    return bool(new)


def sink_name(service: str) -> str:
    """Of the sink that takes the notices to a service, and the kind of their rows."""
    return f"{NOTIFY}{service}"


def notice_of(message: Message) -> Notice:
    """The notice that a message of the outbox carries."""
    return Notice.model_validate_json(message.ref)


def _is_there(session: Session, notice: Notice, name: str) -> bool:
    chosen = select(OutboxRow.ref).where(OutboxRow.study_id == notice.subject_id, OutboxRow.kind == sink_name(name))
    return any(json.loads(ref)["key"] == notice.key for ref in session.scalars(chosen))
