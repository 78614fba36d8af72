"""Notices for notification services: one row per notice and service, written once per event, with its delivery state.

A service is stored by its name, such as `SLACK`, never by its address. A notice is about a study or a campaign.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from sqlalchemy import Select, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from researcher.models import Notice
from researcher.store.errors import NotFound
from researcher.store.locks import turn
from researcher.store.retries import retried
from researcher.store.tables import NoticeRow
from researcher.store.transactions import Part, Transactions


@dataclass(frozen=True, slots=True)
class WaitingNotice:
    """A notice that has not been sent to its service yet. `at` is the Unix time at which it was recorded."""

    seq: int
    service: str
    notice: Notice
    at: float


class Notices(Part):
    """The notices in the store. Anyone may record one: that needs no lease and changes no study or campaign."""

    @retried
    def record(self, notice: Notice, services: Sequence[str]) -> bool:
        """Queue the notice for each service, unless that service already has one with the same subject and key.

        Return whether any was new.
        """
        with self._db.writing() as session:
            return add(self._db, session, notice, services)

    @retried
    def of(self, subject_id: str) -> list[Notice]:
        """Return every notice about the subject, oldest first. A notice for several services is returned only once."""
        with self._db.reading() as session:
            chosen = select(NoticeRow.notice).where(NoticeRow.subject_id == subject_id).order_by(NoticeRow.seq)
            found = [Notice.model_validate_json(text) for text in session.scalars(chosen)]
        return list({notice.key: notice for notice in found}.values())

    @retried
    def unsent(self, service: str, subject_id: str | None = None) -> list[WaitingNotice]:
        """Return the unsent notices for this service, oldest first; only those about `subject_id`, if given."""
        with self._db.reading() as session:
            rows = session.scalars(_waiting(service, subject_id).order_by(NoticeRow.seq))
            return [
                WaitingNotice(row.seq, row.service, Notice.model_validate_json(row.notice), row.created_at)
                for row in rows
            ]

    @retried
    def services(self) -> list[str]:
        """Return the services with waiting notices."""
        with self._db.reading() as session:
            return sorted(session.scalars(select(NoticeRow.service).where(NoticeRow.sent_at.is_(None)).distinct()))

    @retried
    def state(self, service: str, subject_id: str) -> tuple[int, str | None]:
        """Return the number of waiting notices, and the newest error among them."""
        with self._db.reading() as session:
            waiting = _waiting(service, subject_id)
            count = session.scalar(select(func.count()).select_from(waiting.subquery())) or 0
            failed = waiting.with_only_columns(NoticeRow.error).where(NoticeRow.error.is_not(None))
            return count, session.scalar(failed.order_by(NoticeRow.seq.desc()).limit(1))

    @retried
    def turn(self, service: str) -> AbstractContextManager[None]:
        """Return the lock for sending to this service. Without it, two processes would send each notice twice."""
        return turn(self._db.engine, self._db.retries, f"notify-{service}")

    @retried
    def mark_sent(self, seq: int) -> None:
        with self._db.writing() as session:
            row = _row(session, seq)
            row.sent_at, row.error = self._db.clock.now(), None

    @retried
    def mark_unsent(self, seq: int, error: str) -> None:
        """Record that sending failed; the notice keeps waiting."""
        with self._db.writing() as session:
            row = _row(session, seq)
            row.tries, row.error = row.tries + 1, error


def add(db: Transactions, session: Session, notice: Notice, services: Sequence[str]) -> bool:
    """Do the work of `Notices.record`, within the transaction of the event itself."""
    new = False
    for service in dict.fromkeys(services):
        row = NoticeRow(
            subject_id=notice.subject_id,
            service=service,
            key=notice.key,
            notice=notice.model_dump_json(),
            created_at=db.clock.now(),
            tries=0,
        )
        try:
            with session.begin_nested():
                session.add(row)
        except IntegrityError:
            continue  # recorded already
        new = True
    return new


def _waiting(service: str, subject_id: str | None) -> Select[NoticeRow]:
    chosen = select(NoticeRow).where(NoticeRow.service == service, NoticeRow.sent_at.is_(None))
    return chosen if subject_id is None else chosen.where(NoticeRow.subject_id == subject_id)


def _row(session: Session, seq: int) -> NoticeRow:
    row = session.get(NoticeRow, seq, with_for_update=True)
    if row is None:
        raise NotFound(f"there is no notice {seq}")
    return row
