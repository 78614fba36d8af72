"""Studies, their plans, hypotheses and stages."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from researcher.models import StudyRecord, StudyStatus
from researcher.store.errors import Ambiguous, NotFound, PlanFrozen, PlanTampered
from researcher.store.reading import readable
from researcher.store.sessions import Sessions
from researcher.store.tables import Base, HypothesisRow, PlanRow, StageRow, StudyRow
from researcher.study.plan import Plan

_NEVER_FROZEN = ": its `researcher start` was cut off before it froze one (then start anew), or is about to"


class Studies(Sessions):
    """From the topic to the frozen plan."""

    def create_study(self, topic: str, options: Mapping[str, Any]) -> str:
        study_id, now = self._ids.new("st"), self._clock.now()
        with self._writing() as session:
            session.add(
                StudyRow(
                    id=study_id,
                    topic=topic,
                    options=dict(options),
                    status=StudyStatus.PLANNING,
                    reason=None,
                    stop_requested=False,
                    pause_requested=False,
                    created_at=now,
                    updated_at=now,
                    ended_at=None,
                )
            )
            session.flush()
            self._tell(session, study_id, "study", study_id)
        return study_id

    def study(self, study_id: str) -> StudyRecord:
        with readable("the row of the study"), self._reading() as session:
            return _study(session, self._study_row(session, study_id))

    def studies(self) -> list[StudyRecord]:
        """All of them, newest first."""
        with readable("the rows of studies"), self._reading() as session:
            rows = session.scalars(select(StudyRow).order_by(StudyRow.created_at.desc(), StudyRow.id)).all()
            return [_study(session, row) for row in rows]

    def resolve_study(self, reference: str) -> str:
        """The id that `latest`, an id or its beginning (with or without `st-`) means.

        Raises: NotFound, Ambiguous.
        """
        known = [study.id for study in self.studies()]
        if not known:
            raise NotFound('there is no study yet; begin with `researcher start --topic "..."`')
        if reference == "latest":
            return known[0]
        found = [
            name for name in known if reference and name.removeprefix("st-").startswith(reference.removeprefix("st-"))
        ]
        if reference in known:
            return reference
        if not found:
            raise NotFound(f"no study begins with {reference!r}; `researcher list` shows all")
        if len(found) > 1:
            raise Ambiguous(f"{reference!r} fits {', '.join(found)}; give more of the id")
        return found[0]

    def set_study_status(self, study_id: str, status: StudyStatus, reason: str | None = None) -> None:
        now = self._clock.now()
        with self._owning(study_id) as session:
            row = self._study_row(session, study_id)
            if (row.status, row.reason) != (status, reason):
                self._journal(session, study_id, "study", status=status, because=reason)
            row.status, row.reason, row.updated_at = status, reason, now
            row.ended_at = now if status.ended else None
            self._tell(session, study_id, "study", study_id)

    def move(self, study_id: str, servers: Sequence[str]) -> None:
        """From now on the study runs on these servers. Nothing changes where it does already."""
        with self._owning(study_id) as session:
            row = self._study_row(session, study_id)
            before = list(row.options.get("servers", ()))
            if before != list(servers):
                row.options, row.updated_at = {**row.options, "servers": list(servers)}, self._clock.now()
                self._journal(session, study_id, "moved", before=before, after=list(servers))

    # -- what people ask for: no lease needed -------------------------------------------------------------------------

    def request_stop(self, study_id: str) -> None:
        self._set_request(study_id, stop=True)

    def request_pause(self, study_id: str) -> None:
        self._set_request(study_id, pause=True)

    def clear_requests(self, study_id: str) -> None:
        """What `resume` does first: neither stop nor pause is asked for any more."""
        self._set_request(study_id, stop=False, pause=False)

    def _set_request(self, study_id: str, *, stop: bool | None = None, pause: bool | None = None) -> None:
        with self._writing() as session:
            row = self._study_row(session, study_id)
            row.stop_requested = row.stop_requested if stop is None else stop
            row.pause_requested = row.pause_requested if pause is None else pause
            row.updated_at = self._clock.now()

    # -- plans --------------------------------------------------------------------------------------------------------

    def save_plan(self, study_id: str, plan: Plan, *, amended: Mapping[str, Any] | None = None) -> str:
        """Freeze a plan with its hypotheses and stages; returns its digest. Saving the same plan again changes nothing.

        amended: who changed what, and why; a line of the journal, written with the plan or not at all.
        The first plan of a study may be of any version: a plan that was amended is carried out again as it is, under its hash.
        Raises: PlanFrozen when that version says something else, or does not follow the newest one.
        """
        digest = plan.digest()
        with self._owning(study_id) as session:
            self._study_row(session, study_id)
            stored = session.get(PlanRow, (study_id, plan.version))
            if stored is not None:
                if stored.digest != digest:
                    raise PlanFrozen(
                        f"plan {plan.version} of {study_id} is frozen; amend it as version {plan.version + 1}"
                    )
                return digest
            newest = _newest_version(session, study_id)
            if newest is not None and plan.version != newest + 1:
                raise PlanFrozen(f"the next plan of {study_id} is version {newest + 1}, not {plan.version}")
            _add_plan(session, study_id, plan, digest, self._clock.now())
            if amended is not None:
                self._journal(session, study_id, "amended", **amended)
            self._tell(session, study_id, "study", study_id)
        return digest

    def plan(self, study_id: str, version: int | None = None) -> Plan:
        """The plan of that version, the newest unless stated.

        Raises: NotFound; PlanTampered when what is stored no longer has the hash that it was frozen with.
        """
        canonical, digest = self._plan_text(study_id, version)
        if hashlib.sha256(canonical.encode()).hexdigest() != digest:
            raise PlanTampered(f"the plan of {study_id} was changed after it was frozen as {digest[:16]}")
        return Plan.model_validate_json(canonical)

    def frozen_plan(self, study_id: str, version: int | None = None) -> tuple[Plan, str]:
        """The stored plan, and the hash that it was frozen with; whether they agree is for the caller to check."""
        canonical, digest = self._plan_text(study_id, version)
        return Plan.model_validate_json(canonical), digest

    def _plan_text(self, study_id: str, version: int | None) -> tuple[str, str]:
        with self._reading() as session:
            wanted = version or _newest_version(session, study_id)
            row = None if wanted is None else session.get(PlanRow, (study_id, wanted))
            if row is None:
                raise NotFound(f"study {study_id} has no plan{_NEVER_FROZEN if version is None else f' {version} yet'}")
            return row.canonical, row.digest

    def altered_rows(self, study_id: str, plan: Plan) -> dict[str, list[tuple[str, Any, Any]]]:
        """Hypotheses and stages whose rows differ from the plan that they were written from: column, as stored, as planned."""
        found: dict[str, list[tuple[str, Any, Any]]] = {}
        with self._reading() as session:
            for kind, table, parts in (
                ("hypothesis", HypothesisRow, plan.hypotheses),
                ("stage", StageRow, plan.stages),
            ):
                here = select(table.id).where(table.study_id == study_id, table.plan_version == plan.version)
                for extra in {*session.scalars(here)} - {part.id for part in parts}:
                    found[f"{kind} {extra}"] = [("id", extra, None)]
                for part in parts:
                    row = session.get(table, (study_id, plan.version, part.id))
                    for column, planned in _columns(table, part).items():
                        stored = getattr(row, column, None)
                        if stored != planned:
                            found.setdefault(f"{kind} {part.id}", []).append((column, stored, planned))
        return found

    def set_stage_status(self, study_id: str, stage: str, status: str) -> None:
        """`running` stamps its start, `done` its end. Other words are refused."""
        if status not in ("running", "done"):
            raise ValueError(f"a stage is running or done, not {status!r}")
        now = self._clock.now()
        with self._owning(study_id) as session:
            version = _newest_version(session, study_id)
            row = None if version is None else session.get(StageRow, (study_id, version, stage))
            if row is None:
                raise NotFound(f"the plan of {study_id} has no stage {stage!r}")
            row.status = status
            row.started_at = row.started_at or now
            row.ended_at = now if status == "done" else None
            self._tell(session, study_id, "stage", stage)

    def stage_status(self, study_id: str) -> dict[str, str]:
        """`planned`, `running` or `done` for each stage of the newest plan, in the plan's order."""
        with self._reading() as session:
            version = _newest_version(session, study_id)
            rows = session.scalars(
                select(StageRow)
                .where(StageRow.study_id == study_id, StageRow.plan_version == version)
                .order_by(StageRow.position)
            )
            return {row.id: row.status for row in rows}

    def stage_times(self, study_id: str) -> dict[str, tuple[float | None, float | None]]:
        """When each stage of the newest plan began and ended; None where it has not."""
        with self._reading() as session:
            version = _newest_version(session, study_id)
            chosen = select(StageRow).where(StageRow.study_id == study_id, StageRow.plan_version == version)
            return {row.id: (row.started_at, row.ended_at) for row in session.scalars(chosen)}

    def largest_seed(self) -> int:
        """That any arm of any study plans, with its seeds at the most; -1 where there is none."""
        with self._reading() as session:
            largest = session.scalar(select(func.max(StageRow.first_seed + StageRow.max_seeds - 1)))
            apart = session.scalars(select(PlanRow.canonical).where(PlanRow.canonical.contains('"seed_offset":')))
            own = [Plan.model_validate_json(canonical).last_seed for canonical in apart]
            return max([-1 if largest is None else largest, *own])


def _newest_version(session: Session, study_id: str) -> int | None:
    return session.scalar(select(func.max(PlanRow.version)).where(PlanRow.study_id == study_id))


def _study(session: Session, row: StudyRow) -> StudyRecord:
    return StudyRecord(
        id=row.id,
        topic=row.topic,
        options=row.options,
        status=StudyStatus(row.status),
        reason=row.reason,
        plan_version=_newest_version(session, row.id),
        stop_requested=row.stop_requested,
        pause_requested=row.pause_requested,
        created_at=row.created_at,
        updated_at=row.updated_at,
        ended_at=row.ended_at,
    )


def _add_plan(session: Session, study_id: str, plan: Plan, digest: str, now: float) -> None:
    session.add(
        PlanRow(study_id=study_id, version=plan.version, digest=digest, canonical=plan.canonical(), created_at=now)
    )
    session.flush()
    for hypothesis in plan.hypotheses:
        session.add(HypothesisRow(study_id=study_id, plan_version=plan.version, **_columns(HypothesisRow, hypothesis)))
    for position, stage in enumerate(plan.stages):
        fields = _columns(StageRow, stage)
        row = StageRow(study_id=study_id, plan_version=plan.version, position=position, status="planned", **fields)
        session.add(row)


def _columns(table: type[Base], record: BaseModel) -> dict[str, Any]:
    """The fields of `record` that have a column of their own; the plan's canonical JSON holds all of them."""
    return {name: value for name, value in record.model_dump(mode="json").items() if name in table.__table__.columns}
