"""Repairs of an instrument's code, as lines of the journal: recorded once, never changed."""

from __future__ import annotations

from sqlalchemy import select

from researcher.models import RepairRecord
from researcher.store.sessions import Sessions
from researcher.store.tables import EventRow

REPAIRED = "repaired"


class Repairs(Sessions):
    """Writes belong to the study's owner."""

    def record_repair(self, study_id: str, record: RepairRecord) -> RepairRecord:
        """The study goes on with this version from now on. Returns the record as it was kept."""
        kept = record.model_copy(update={"at": self._clock.now()})
        with self._owning(study_id) as session:
            session.add(EventRow(study_id=study_id, at=kept.at, kind=REPAIRED, detail=kept.model_dump(mode="json")))
        return kept

    def repairs(self, study_id: str) -> list[RepairRecord]:
        """Every repair of a study, the first one first."""
        with self._reading() as session:
            rows = session.scalars(
                select(EventRow).where(EventRow.study_id == study_id, EventRow.kind == REPAIRED).order_by(EventRow.seq)
            )
            return [RepairRecord.model_validate(row.detail) for row in rows]
