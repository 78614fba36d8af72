"""The outbox: changes that copies of the records (MLflow and others) have not received yet.

Deliveries are recorded per sink, so one sink's outage neither delays nor repeats the deliveries to another. A sink that is added
later gets everything.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from researcher.store.locks import turn
from researcher.store.retries import retried
from researcher.store.tables import DeliveryRow, OutboxRow
from researcher.store.transactions import Part, locked


@dataclass(frozen=True, slots=True)
class Message:
    """A message that something has changed: a `study`, `stage`, `trial`, `verdict` or `report`. Read its current state from the
    store."""

    seq: int
    study_id: str
    kind: str
    ref: str


class Outbox(Part):
    """The outbox in the store. It delivers at least once, so sending a message twice must be harmless."""

    @retried
    def unsent(self, sink: str, study_id: str | None = None) -> list[Message]:
        """Return the messages not yet sent to this sink, oldest first; only those about `study_id`, if given."""
        with self._db.reading() as session:
            rows = session.scalars(_waiting(sink, study_id).order_by(OutboxRow.seq))
            return [Message(row.seq, row.study_id, row.kind, row.ref) for row in rows]

    @retried
    def turn(self, sink: str, study_id: str) -> AbstractContextManager[None]:
        """Return the lock for copying this study to this sink. Without it, two processes could both create the same run."""
        return turn(self._db.engine, self._db.retries, f"copy-{sink}-{study_id}")

    @retried
    def mark_sent(self, sink: str, seq: int) -> None:
        with self._db.writing() as session:
            row = _delivery(session, sink, seq)
            row.sent_at, row.error = self._db.clock.now(), None

    @retried
    def mark_unsent(self, sink: str, seq: int, error: str) -> None:
        """Record that sending failed; the message stays in the outbox."""
        with self._db.writing() as session:
            row = _delivery(session, sink, seq)
            row.tries, row.error = row.tries + 1, error

    @retried
    def state(self, sink: str, study_id: str) -> tuple[int, str | None]:
        """Return the number of waiting messages, and the newest error among them."""
        with self._db.reading() as session:
            waiting = _waiting(sink, study_id)
            count = session.scalar(select(func.count()).select_from(waiting.subquery())) or 0
            failed = waiting.with_only_columns(DeliveryRow.error).where(DeliveryRow.error.is_not(None))
            return count, session.scalar(failed.order_by(OutboxRow.seq.desc()).limit(1))


def _waiting(sink: str, study_id: str | None) -> Select[OutboxRow]:
    delivered = (DeliveryRow.seq == OutboxRow.seq) & (DeliveryRow.sink == sink)
    chosen = select(OutboxRow).outerjoin(DeliveryRow, delivered).where(DeliveryRow.sent_at.is_(None))
    return chosen if study_id is None else chosen.where(OutboxRow.study_id == study_id)


def _delivery(session: Session, sink: str, seq: int) -> DeliveryRow:
    chosen = select(DeliveryRow).where(DeliveryRow.sink == sink, DeliveryRow.seq == seq)
    return locked(session, chosen, DeliveryRow(sink=sink, seq=seq, tries=0))
