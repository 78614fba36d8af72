"""Studies: their status, requests and schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from researcher.models import Notice, StudyOptions, StudyRecord, StudyStatus
from researcher.store.errors import NotFound
from researcher.store.notices import add
from researcher.store.plans import newest_version
from researcher.store.retries import retried
from researcher.store.tables import ScheduleRow, StudyRow
from researcher.store.transactions import Part, readable, resolved


class Studies(Part):
    """The studies in the store, with their status, requests and schedules."""

    @retried
    def create(self, topic: str, options: StudyOptions | Mapping[str, Any]) -> str:
        found = StudyOptions.model_validate(options)
        study_id, now = self._db.ids.new("st"), self._db.clock.now()
        with self._db.writing() as session:
            made = StudyRecord(
                id=study_id, topic=topic, options=found, status=StudyStatus.PLANNING, created_at=now, updated_at=now
            )
            session.add(StudyRow(**made.model_dump(mode="json", exclude={"plan_version"})))
            session.flush()
            self._db.announce(session, study_id, "study", study_id)
        return study_id

    @retried
    def get(self, study_id: str) -> StudyRecord:
        with readable("the row of the study"), self._db.reading() as session:
            return _study(session, self._db.study_row(session, study_id))

    @retried
    def all(self) -> list[StudyRecord]:
        """Return all studies, newest first."""
        with readable("the rows of studies"), self._db.reading() as session:
            rows = session.scalars(select(StudyRow).order_by(StudyRow.created_at.desc(), StudyRow.id)).all()
            return [_study(session, row) for row in rows]

    @retried
    def resolve(self, reference: str) -> str:
        """Return the study id that `reference` stands for: `latest`, an id, or the beginning of one, with or without `st-`.

        Raises: NotFound, Ambiguous.
        """
        known = [study.id for study in self.all()]
        if not known:
            raise NotFound('there are no studies yet; start one with `researcher start --topic "..."`')
        return resolved(reference, known, "st-", "study", "researcher list")

    @retried
    def set_status(
        self, study_id: str, status: StudyStatus, reason: str | None = None, notice: Notice | None = None
    ) -> None:
        """Set the status. Queue `notice` for the study's notification services, unless it was queued before."""
        now = self._db.clock.now()
        with self._db.owning(study_id) as session:
            row = self._db.study_row(session, study_id)
            if (row.status, row.reason) != (status, reason):
                self._db.note(session, study_id, "study", status=status, because=reason)
            row.status, row.reason, row.updated_at = status, reason, now
            row.ended_at = now if status.ended else None
            self._db.announce(session, study_id, "study", study_id)
            if notice is not None:
                add(self._db, session, notice, StudyOptions.model_validate(row.options).notify)

    @retried
    def move(self, study_id: str, servers: Sequence[str]) -> None:
        """Record that the study runs on these servers from now on."""
        with self._db.owning(study_id) as session:
            row = self._db.study_row(session, study_id)
            before = list(row.options.get("servers", ()))
            if before != list(servers):
                row.options, row.updated_at = {**row.options, "servers": list(servers)}, self._db.clock.now()
                self._db.note(session, study_id, "moved", before=before, after=list(servers))

    # -- requests by people: no lease needed --------------------------------------------------------------------------

    @retried
    def request_stop(self, study_id: str) -> None:
        self._set_request(study_id, stop=True)

    @retried
    def request_pause(self, study_id: str) -> None:
        self._set_request(study_id, pause=True)

    @retried
    def clear_requests(self, study_id: str) -> None:
        """Withdraw stop and pause requests, as `resume` does."""
        self._set_request(study_id, stop=False, pause=False)

    def _set_request(self, study_id: str, *, stop: bool | None = None, pause: bool | None = None) -> None:
        with self._db.writing() as session:
            row = self._db.study_row(session, study_id)
            row.stop_requested = row.stop_requested if stop is None else stop
            row.pause_requested = row.pause_requested if pause is None else pause
            row.updated_at = self._db.clock.now()

    @retried
    def save_schedule(self, study_id: str, detail: Mapping[str, Any]) -> None:
        """Save when this study may run (windows, days), in the format of the package `schedule`."""
        with self._db.owning(study_id) as session:
            session.merge(ScheduleRow(study_id=study_id, detail=dict(detail), updated_at=self._db.clock.now()))

    @retried
    def schedule(self, study_id: str) -> dict[str, Any] | None:
        with self._db.reading() as session:
            row = session.get(ScheduleRow, study_id)
            return None if row is None else dict(row.detail)


def _study(session: Session, row: StudyRow) -> StudyRecord:
    found = StudyRecord.model_validate(row, from_attributes=True)
    return found.model_copy(update={"plan_version": newest_version(session, row.id)})
