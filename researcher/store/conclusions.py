"""What was concluded and how it came about: verdicts, claims, the journal, LLM calls, schedules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import delete, func, select

from researcher.models import SEAL, Claim, Effect, Event, LlmCall, ReportSeal, VerdictRecord
from researcher.store.reading import readable
from researcher.store.sessions import Sessions
from researcher.store.tables import ClaimRow, EventRow, LlmCallRow, PlanRow, ScheduleRow, VerdictRow
from researcher.study.plan import Verdict


class Conclusions(Sessions):
    """Writes belong to the study's owner."""

    def record_verdict(self, study_id: str, stage: str, record: VerdictRecord) -> None:
        """The verdict on one hypothesis after `stage`; deciding again after the same stage replaces it."""
        with self._owning(study_id) as session:
            version = session.scalar(select(func.max(PlanRow.version)).where(PlanRow.study_id == study_id)) or 0
            at = (study_id, version, stage, record.hypothesis)
            position = session.scalar(select(func.count()).where(VerdictRow.study_id == study_id)) or 0
            old = session.get(VerdictRow, at)
            session.merge(
                VerdictRow(
                    study_id=study_id,
                    plan_version=version,
                    stage=stage,
                    hypothesis=record.hypothesis,
                    position=position if old is None else old.position,
                    verdict=record.verdict,
                    reason=record.reason,
                    effect=None if record.effect is None else record.effect.model_dump(mode="json"),
                    at=self._clock.now(),
                )
            )
            self._tell(session, study_id, "verdict", record.hypothesis)

    def verdicts(self, study_id: str, stage: str | None = None) -> list[VerdictRecord]:
        """The newest verdict on each hypothesis, or those given after `stage`, in the order they were first given."""
        with self._reading() as session:
            chosen = select(VerdictRow).where(VerdictRow.study_id == study_id)
            if stage is not None:
                chosen = chosen.where(VerdictRow.stage == stage)
            newest: dict[str, VerdictRow] = {}
            for row in session.scalars(chosen.order_by(VerdictRow.plan_version, VerdictRow.position)):
                newest[row.hypothesis] = row
            return [
                VerdictRecord(
                    hypothesis=row.hypothesis,
                    verdict=Verdict(row.verdict),
                    reason=row.reason,
                    effect=None if row.effect is None else Effect.model_validate(row.effect),
                )
                for row in newest.values()
            ]

    def decided(self, study_id: str) -> dict[str, list[str]]:
        """The stages after which each hypothesis has a verdict on record, whichever is the newest."""
        with self._reading() as session:
            chosen = select(VerdictRow.hypothesis, VerdictRow.stage).where(VerdictRow.study_id == study_id)
            found: dict[str, list[str]] = defaultdict(list)
            for hypothesis, stage in session.execute(chosen.order_by(VerdictRow.plan_version, VerdictRow.position)):
                found[hypothesis].append(stage)
        return dict(found)

    # -- the report's numbers -----------------------------------------------------------------------------------------

    def save_claims(self, study_id: str, claims: Iterable[Claim]) -> None:
        """All claims of the report as it stands; those of an earlier report are replaced."""
        with self._owning(study_id) as session:
            session.execute(delete(ClaimRow).where(ClaimRow.study_id == study_id))
            for position, claim in enumerate(claims):
                session.add(ClaimRow(study_id=study_id, position=position, **claim.model_dump(mode="json")))

    def claims(self, study_id: str) -> list[Claim]:
        with readable("the rows of claims"), self._reading() as session:
            rows = session.scalars(select(ClaimRow).where(ClaimRow.study_id == study_id).order_by(ClaimRow.position))
            return [Claim.model_validate(row, from_attributes=True) for row in rows]

    def record_report(self, study_id: str, files: Mapping[str, str], seal: ReportSeal) -> None:
        """Where the report's files are (`{"markdown": path, "html": path}`), and what they were; MLflow gets a copy."""
        detail = {**files, SEAL: seal.model_dump()}
        with self._owning(study_id) as session:
            session.add(EventRow(study_id=study_id, at=self._clock.now(), kind="report", detail=detail))
            self._tell(session, study_id, "report", study_id)

    def report_files(self, study_id: str) -> dict[str, str]:
        """Where the newest report's files are; empty before there is one."""
        return {name: str(path) for name, path in self._newest_report(study_id).items() if name != SEAL}

    def report_seal(self, study_id: str) -> ReportSeal | None:
        """None: there is no report, or it was written before seals were kept."""
        seal = self._newest_report(study_id).get(SEAL)
        return None if seal is None else ReportSeal.model_validate(seal)

    def _newest_report(self, study_id: str) -> dict[str, Any]:
        reports = self.events(study_id, limit=100_000, kind="report")
        return reports[-1].detail if reports else {}

    # -- the journal --------------------------------------------------------------------------------------------------

    def record_event(self, study_id: str, kind: str, detail: Mapping[str, Any] | None = None) -> int:
        """Append one line to the journal; returns its number."""
        with self._owning(study_id) as session:
            row = EventRow(study_id=study_id, at=self._clock.now(), kind=kind, detail=dict(detail or {}))
            session.add(row)
            session.flush()
            return row.seq

    def events(self, study_id: str, after: int = 0, limit: int = 1000, kind: str | None = None) -> list[Event]:
        """Lines of the journal with numbers above `after`, oldest first; of one kind only where asked for."""
        chosen = select(EventRow).where(EventRow.study_id == study_id, EventRow.seq > after)
        if kind is not None:
            chosen = chosen.where(EventRow.kind == kind)
        with readable("the rows of events"), self._reading() as session:
            rows = session.scalars(chosen.order_by(EventRow.seq).limit(limit))
            return [Event.model_validate(row, from_attributes=True) for row in rows]

    # -- planner and schedule -----------------------------------------------------------------------------------------

    def record_llm_call(self, study_id: str, call: LlmCall) -> None:
        with self._owning(study_id) as session:
            session.add(LlmCallRow(study_id=study_id, **call.model_dump(mode="json")))

    def llm_calls(self, study_id: str) -> list[LlmCall]:
        with self._reading() as session:
            rows = session.scalars(select(LlmCallRow).where(LlmCallRow.study_id == study_id).order_by(LlmCallRow.id))
            return [LlmCall.model_validate(row, from_attributes=True) for row in rows]

    def save_schedule(self, study_id: str, detail: Mapping[str, Any]) -> None:
        """When this study may run (windows, days), as the schedule room writes it."""
        with self._owning(study_id) as session:
            session.merge(ScheduleRow(study_id=study_id, detail=dict(detail), updated_at=self._clock.now()))

    def schedule(self, study_id: str) -> dict[str, Any] | None:
        with self._reading() as session:
            row = session.get(ScheduleRow, study_id)
            return None if row is None else dict(row.detail)
