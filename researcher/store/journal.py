"""A study's journal: append-only entries, each with a kind and a detail as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from researcher.models import Event, LlmCall, RepairRecord
from researcher.store.retries import retried
from researcher.store.tables import EventRow, LlmCallRow
from researcher.store.transactions import Part, readable

REPAIRED = "repaired"


class Journal(Part):
    """The journals of studies. Only a study's owner may write to its journal.

    `**where` selects the entries whose detail has these string values under these keys.
    """

    @retried
    def record(self, study_id: str, kind: str, detail: Mapping[str, Any] | None = None) -> int:
        """Append one entry and return its number."""
        with self._db.owning(study_id) as session:
            row = EventRow(study_id=study_id, at=self._db.clock.now(), kind=kind, detail=dict(detail or {}))
            session.add(row)
            session.flush()
            return row.seq

    @retried
    def record_once(self, study_id: str, kind: str, detail: Mapping[str, Any]) -> None:
        """Append an entry, unless the study already has an equal one."""
        with self._db.owning(study_id) as session:
            if all(row.detail != detail for row in session.scalars(lines(study_id, kind))):
                self._db.note(session, study_id, kind, **detail)

    @retried
    def events(self, study_id: str, /, *kinds: str, after: int = 0, **where: str) -> list[Event]:
        """Return the entries numbered above `after`, oldest first. If `kinds` are given, return only entries of these kinds."""
        with readable("the rows of events"), self._db.reading() as session:
            rows = session.scalars(lines(study_id, *kinds, **where).where(EventRow.seq > after))
            return [event_of(row) for row in rows]

    @retried
    def last(self, study_id: str, /, *kinds: str, **where: str) -> Event | None:
        """Return the newest matching entry, or None."""
        with readable("the rows of events"), self._db.reading() as session:
            return newest(session, study_id, *kinds, **where)

    @retried
    def record_repair(self, study_id: str, record: RepairRecord) -> RepairRecord:
        """Record a repair: the study now runs this version of the instrument's code. Return the record as stored."""
        kept = record.model_copy(update={"at": self._db.clock.now()})
        with self._db.owning(study_id) as session:
            row = EventRow(study_id=study_id, at=kept.at, kind=REPAIRED, detail=kept.model_dump(mode="json"))
            session.add(row)
        return kept

    def repairs(self, study_id: str) -> list[RepairRecord]:
        """Return every repair of the instrument's code, oldest first."""
        return [RepairRecord.model_validate(event.detail) for event in self.events(study_id, REPAIRED)]

    @retried
    def record_llm_call(self, study_id: str, call: LlmCall) -> None:
        with self._db.owning(study_id) as session:
            session.add(LlmCallRow(study_id=study_id, **call.model_dump(mode="json")))

    @retried
    def llm_calls(self, study_id: str) -> list[LlmCall]:
        with self._db.reading() as session:
            rows = session.scalars(select(LlmCallRow).where(LlmCallRow.study_id == study_id).order_by(LlmCallRow.id))
            return [LlmCall.model_validate(row, from_attributes=True) for row in rows]


def lines(study_id: str, *kinds: str, **where: str) -> Select[EventRow]:
    """Build the query for matching journal rows, oldest first."""
    chosen = select(EventRow).where(EventRow.study_id == study_id).order_by(EventRow.seq)
    if kinds:
        chosen = chosen.where(EventRow.kind.in_(kinds))
    for name, value in where.items():
        chosen = chosen.where(EventRow.detail[name].as_string() == value)
    return chosen


def newest(session: Session, study_id: str, *kinds: str, **where: str) -> Event | None:
    chosen = lines(study_id, *kinds, **where).order_by(None).order_by(EventRow.seq.desc()).limit(1)
    row = session.scalar(chosen)
    return None if row is None else event_of(row)


def event_of(row: EventRow) -> Event:
    return Event.model_validate(row, from_attributes=True)


_AGAIN = 200
"""Number of entries to reread at each poll: far more than are written while one transaction is open."""


class JournalReader:
    """Polls a journal, reading only its end each time.

    PostgreSQL numbers an entry when it is inserted but shows it only once it is committed, so an entry can appear after others
    with higher numbers. Each poll therefore rereads the last few entries.
    """

    def __init__(self, journal: Journal, study_id: str) -> None:
        self._journal = journal
        self._study_id = study_id
        self.events: list[Event] = []
        """All entries seen so far, in order. Each poll replaces this list and never mutates it."""

    def look(self) -> list[Event]:
        """Read the journal and return the new entries, in order."""
        known = self.events
        again = known[-_AGAIN:]
        after = again[0].seq - 1 if len(again) == _AGAIN else 0
        seen = {event.seq for event in again}
        new = [event for event in self._journal.events(self._study_id, after=after) if event.seq not in seen]
        self.events = sorted([*known, *new], key=lambda event: event.seq)
        return new
