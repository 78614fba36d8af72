"""Verdicts on hypotheses, and reports with their claims."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import delete, func, select

from researcher.models import SEAL, Claim, ReportSeal, VerdictRecord
from researcher.store.journal import newest
from researcher.store.retries import retried
from researcher.store.tables import ClaimRow, EventRow, PlanRow, VerdictRow
from researcher.store.transactions import Part, readable


class Verdicts(Part):
    """Verdicts on hypotheses. Only the study's owner may write."""

    @retried
    def record(self, study_id: str, stage: str, record: VerdictRecord) -> None:
        """Store the verdict on one hypothesis after `stage`, replacing an earlier verdict after the same stage."""
        with self._db.owning(study_id) as session:
            version = session.scalar(select(func.max(PlanRow.version)).where(PlanRow.study_id == study_id)) or 0
            at = (study_id, version, stage, record.hypothesis)
            position = session.scalar(select(func.count()).where(VerdictRow.study_id == study_id)) or 0
            old = session.get(VerdictRow, at)
            fields = record.model_dump(mode="json") | {"sentinels": list(record.sentinels)}
            fields |= {"study_id": study_id, "plan_version": version, "stage": stage}
            position = position if old is None else old.position
            session.merge(VerdictRow(**fields, position=position, at=self._db.clock.now()))
            self._db.announce(session, study_id, "verdict", record.hypothesis)

    @retried
    def all(self, study_id: str, stage: str | None = None) -> list[VerdictRecord]:
        """Return the newest verdict on each hypothesis, in the order in which the hypotheses were first judged.

        If `stage` is given, return only verdicts that were given after that stage.
        """
        with self._db.reading() as session:
            chosen = select(VerdictRow).where(VerdictRow.study_id == study_id)
            if stage is not None:
                chosen = chosen.where(VerdictRow.stage == stage)
            last: dict[str, VerdictRow] = {}
            for row in session.scalars(chosen.order_by(VerdictRow.plan_version, VerdictRow.position)):
                last[row.hypothesis] = row
            return [VerdictRecord.model_validate(row, from_attributes=True) for row in last.values()]

    @retried
    def stages(self, study_id: str) -> dict[str, list[str]]:
        """Return, for each hypothesis, the stages after which a verdict was recorded."""
        with self._db.reading() as session:
            chosen = select(VerdictRow.hypothesis, VerdictRow.stage).where(VerdictRow.study_id == study_id)
            found: dict[str, list[str]] = defaultdict(list)
            for hypothesis, stage in session.execute(chosen.order_by(VerdictRow.plan_version, VerdictRow.position)):
                found[hypothesis].append(stage)
        return dict(found)


class Reports(Part):
    """Claims and files of the newest report. Only the study's owner may write."""

    @retried
    def save_claims(self, study_id: str, claims: Iterable[Claim]) -> None:
        """Store the report's claims, replacing those of an earlier report."""
        with self._db.owning(study_id) as session:
            session.execute(delete(ClaimRow).where(ClaimRow.study_id == study_id))
            for position, claim in enumerate(claims):
                session.add(ClaimRow(study_id=study_id, position=position, **claim.model_dump(mode="json")))

    @retried
    def claims(self, study_id: str) -> list[Claim]:
        with readable("the rows of claims"), self._db.reading() as session:
            rows = session.scalars(select(ClaimRow).where(ClaimRow.study_id == study_id).order_by(ClaimRow.position))
            return [Claim.model_validate(row, from_attributes=True) for row in rows]

    @retried
    def record(self, study_id: str, files: Mapping[str, str], seal: ReportSeal) -> None:
        """Store the paths of the report's files (`{"markdown": path, "html": path}`) and their seal, and announce the report to
        the sinks."""
        detail = {**files, SEAL: seal.model_dump()}
        with self._db.owning(study_id) as session:
            session.add(EventRow(study_id=study_id, at=self._db.clock.now(), kind="report", detail=detail))
            self._db.announce(session, study_id, "report", study_id)

    @retried
    def files(self, study_id: str) -> dict[str, str]:
        """Return the paths of the newest report's files, or an empty dict if there is no report yet."""
        return {name: str(path) for name, path in self._newest_report(study_id).items() if name != SEAL}

    @retried
    def seal(self, study_id: str) -> ReportSeal | None:
        """Return the newest report's seal, or None if there is no report or it has no seal."""
        seal = self._newest_report(study_id).get(SEAL)
        return None if seal is None else ReportSeal.model_validate(seal)

    def _newest_report(self, study_id: str) -> dict[str, Any]:
        with readable("the rows of events"), self._db.reading() as session:
            report = newest(session, study_id, "report")
        return {} if report is None else report.detail
