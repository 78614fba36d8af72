"""What a copy of the records (MLflow) has still to be told. SQL first, always."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select, update

from researcher.store.sessions import Sessions
from researcher.store.tables import OutboxRow


@dataclass(frozen=True, slots=True)
class Message:
    """Something changed: a `study`, `stage`, `trial`, `verdict` or `report`. What it is now, the store knows."""

    seq: int
    study_id: str
    kind: str
    ref: str


class Outbox(Sessions):
    """Delivery is at least once: whoever sends must be able to send the same thing twice."""

    def unsent(self, study_id: str | None = None) -> list[Message]:
        """Oldest first."""
        with self._reading() as session:
            chosen = select(OutboxRow).where(OutboxRow.sent_at.is_(None)).order_by(OutboxRow.seq)
            if study_id is not None:
                chosen = chosen.where(OutboxRow.study_id == study_id)
            return [Message(row.seq, row.study_id, row.kind, row.ref) for row in session.scalars(chosen)]

    def mark_sent(self, seq: int) -> None:
        with self._writing() as session:
            session.execute(update(OutboxRow).where(OutboxRow.seq == seq).values(sent_at=self._clock.now(), error=None))

    def mark_unsent(self, seq: int, error: str) -> None:
        """Sending failed; it stays in the box."""
        with self._writing() as session:
            session.execute(
                update(OutboxRow).where(OutboxRow.seq == seq).values(tries=OutboxRow.tries + 1, error=error)
            )

    def outbox_state(self, study_id: str) -> tuple[int, str | None]:
        """How many messages wait, and the newest error among them."""
        with self._reading() as session:
            waits = (OutboxRow.study_id == study_id, OutboxRow.sent_at.is_(None))
            count = session.scalar(select(func.count()).where(*waits)) or 0
            error = session.scalar(
                select(OutboxRow.error)
                .where(*waits, OutboxRow.error.is_not(None))
                .order_by(OutboxRow.seq.desc())
                .limit(1)
            )
            return count, error
