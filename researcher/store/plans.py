"""Frozen plans with their hypotheses and stages, and the status of each stage."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from researcher.store.errors import NotFound, PlanFrozen, PlanTampered
from researcher.store.retries import retried
from researcher.store.tables import Base, HypothesisRow, PlanRow, StageRow
from researcher.store.transactions import Part
from researcher.study.plan import Plan

_NEVER_FROZEN = (
    ": `researcher start` is still planning it, or was interrupted before it froze a plan (then start again)"
)


class Plans(Part):
    """The plans in the store. Only a study's owner may write. A plan is never changed; an amendment is a new version."""

    @retried
    def save(self, study_id: str, plan: Plan, *, amended: Mapping[str, Any] | None = None) -> str:
        """Freeze a plan with its hypotheses and stages, and return its digest. Saving the same plan again changes nothing.

        `amended` says who changed what, and why; it becomes a journal entry in the same transaction. A study's first plan may have
        any version, because a reproduction of an amended plan keeps the plan's hash.

        Raises: PlanFrozen when that version exists with other content, or does not follow the newest one.
        """
        digest = plan.digest()
        with self._db.owning(study_id) as session:
            self._db.study_row(session, study_id)
            stored = session.get(PlanRow, (study_id, plan.version))
            if stored is not None:
                if stored.digest != digest:
                    raise PlanFrozen(
                        f"plan {plan.version} of {study_id} is frozen; amend it as version {plan.version + 1}"
                    )
                return digest
            newest = newest_version(session, study_id)
            if newest is not None and plan.version != newest + 1:
                raise PlanFrozen(f"the next plan of {study_id} is version {newest + 1}, not {plan.version}")
            _add_plan(session, study_id, plan, digest, self._db.clock.now())
            if amended is not None:
                self._db.note(session, study_id, "amended", **amended)
            self._db.announce(session, study_id, "study", study_id)
        return digest

    @retried
    def get(self, study_id: str, version: int | None = None) -> Plan:
        """Return the plan of that version, by default the newest.

        Raises: NotFound; PlanTampered when the stored plan no longer matches the hash it was frozen with.
        """
        canonical, digest = self._plan_text(study_id, version)
        if hashlib.sha256(canonical.encode()).hexdigest() != digest:
            raise PlanTampered(f"the plan of {study_id} was changed after it was frozen as {digest[:16]}")
        return Plan.model_validate_json(canonical)

    @retried
    def frozen(self, study_id: str, version: int | None = None) -> tuple[Plan, str]:
        """Return the stored plan and the hash it was frozen with. The caller has to check that they match."""
        canonical, digest = self._plan_text(study_id, version)
        return Plan.model_validate_json(canonical), digest

    def _plan_text(self, study_id: str, version: int | None) -> tuple[str, str]:
        with self._db.reading() as session:
            wanted = version or newest_version(session, study_id)
            row = None if wanted is None else session.get(PlanRow, (study_id, wanted))
            if row is None:
                raise NotFound(f"study {study_id} has no plan{_NEVER_FROZEN if version is None else f' {version} yet'}")
            return row.canonical, row.digest

    @retried
    def altered_rows(self, study_id: str, plan: Plan) -> dict[str, list[tuple[str, Any, Any]]]:
        """Return the hypotheses and stages whose rows differ from the plan, each with (column, stored value, planned value)."""
        found: dict[str, list[tuple[str, Any, Any]]] = {}
        with self._db.reading() as session:
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

    @retried
    def set_stage_status(self, study_id: str, stage: str, status: str) -> None:
        """Set a stage's status: `running` also records its start, `done` its end. No other status can be set."""
        if status not in ("running", "done"):
            raise ValueError(f"a stage can be set to running or done, not {status!r}")
        now = self._db.clock.now()
        with self._db.owning(study_id) as session:
            version = newest_version(session, study_id)
            row = None if version is None else session.get(StageRow, (study_id, version, stage))
            if row is None:
                raise NotFound(f"the plan of {study_id} has no stage {stage!r}")
            row.status = status
            row.started_at = row.started_at or now
            row.ended_at = now if status == "done" else None
            self._db.announce(session, study_id, "stage", stage)

    @retried
    def stage_status(self, study_id: str) -> dict[str, str]:
        """Return the status (`planned`, `running` or `done`) of each stage of the newest plan, in the plan's order."""
        with self._db.reading() as session:
            version = newest_version(session, study_id)
            rows = session.scalars(
                select(StageRow)
                .where(StageRow.study_id == study_id, StageRow.plan_version == version)
                .order_by(StageRow.position)
            )
            return {row.id: row.status for row in rows}

    @retried
    def stage_times(self, study_id: str) -> dict[str, tuple[float | None, float | None]]:
        """Return when each stage of the newest plan began and ended, in Unix time. None means not yet."""
        with self._db.reading() as session:
            version = newest_version(session, study_id)
            chosen = select(StageRow).where(StageRow.study_id == study_id, StageRow.plan_version == version)
            return {row.id: (row.started_at, row.ended_at) for row in session.scalars(chosen)}

    @retried
    def largest_seed(self) -> int:
        """Return the largest seed that any plan may use; -1 if there are no plans."""
        with self._db.reading() as session:
            largest = session.scalar(select(func.max(StageRow.first_seed + StageRow.max_seeds - 1)))
            apart = session.scalars(select(PlanRow.canonical).where(PlanRow.canonical.contains('"seed_offset":')))
            own = [Plan.model_validate_json(canonical).last_seed for canonical in apart]
            return max([-1 if largest is None else largest, *own])


def newest_version(session: Session, study_id: str) -> int | None:
    return session.scalar(select(func.max(PlanRow.version)).where(PlanRow.study_id == study_id))


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
    """Return the fields of `record` that have a column in `table`. The plan's canonical JSON holds all fields."""
    return {name: value for name, value in record.model_dump(mode="json").items() if name in table.__table__.columns}
