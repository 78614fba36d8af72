"""Findings: our own, which only their study can replace, and findings imported from other groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from researcher.models import Finding
from researcher.store.errors import FindingConflict
from researcher.store.retries import retried
from researcher.store.tables import FindingRow, StudyRow
from researcher.store.transactions import Part


class Findings(Part):
    """The findings in the store. Only a study's owner may write its findings. Importing needs no lease and changes no study."""

    @retried
    def save(self, study_id: str, findings: Iterable[Finding]) -> None:
        """Replace this study's findings."""
        with self._db.owning(study_id) as session:
            session.execute(delete(FindingRow).where(FindingRow.study_id == study_id, FindingRow.origin.is_(None)))
            for finding in findings:
                session.add(_row(finding))

    @retried
    def all(self, *, study_id: str | None = None, instrument: str | None = None) -> list[Finding]:
        """Return all findings, including imported ones, oldest first; only those of one study or instrument, if given."""
        with self._db.reading() as session:
            chosen = select(FindingRow).order_by(FindingRow.at, FindingRow.id)
            if study_id is not None:
                chosen = chosen.where(FindingRow.study_id == study_id)
            if instrument is not None:
                chosen = chosen.where(FindingRow.instrument == instrument)
            return [_finding(row) for row in session.scalars(chosen)]

    @retried
    def take(self, findings: Sequence[Finding], *, replace: bool = False) -> int:
        """Import all the findings, or none if any of them conflicts. Return how many are new.

        With `replace`, findings of a group replace earlier findings of the same group.
        Raises: FindingConflict if any finding differs from the known one, or claims to be from a study of this database.
        """
        unnamed = [finding.id for finding in findings if finding.origin is None]
        if unnamed:
            raise ValueError(f"imported findings need an origin; these have none: {unnamed}")
        with self._db.writing() as session:
            told = [(finding, _problem(session, finding, replace=replace)) for finding in findings]
            problems = {finding.id: problem for finding, problem in told if problem}
            if problems:
                raise FindingConflict(problems)
            fresh = [finding for finding in findings if not _is_here(session, finding)]
            for finding in fresh:
                session.merge(_row(finding))
        return len(fresh)


def _is_here(session: Session, finding: Finding) -> bool:
    row = session.get(FindingRow, finding.id)
    if row is None or not _says_the_same(_finding(row), finding):
        return False
    return finding.seeds is None or row.seeds is not None


def _problem(session: Session, finding: Finding, *, replace: bool) -> str | None:
    row = session.get(FindingRow, finding.id)
    if row is None:
        if session.get(StudyRow, finding.study_id) is None:
            return None
        return f"claims to be from {finding.study_id}, a study in this database, which has no such finding"
    if _says_the_same(_finding(row), finding):
        return None
    if row.origin is None:
        return "differs from what our own study found; our records take precedence"
    if row.origin != finding.origin:
        return f"came from {row.origin!r} before, and now comes from {finding.origin!r} with other content"
    return None if replace else f"differs from what {row.origin!r} sent before; --replace takes the new version"


def _says_the_same(one: Finding, other: Finding) -> bool:
    """Return whether two findings are equal. Ignore seeds if either has none, as in files of the first schema."""
    unsaid = {"seeds": None} if one.seeds is None or other.seeds is None else {}
    return _said(one).model_copy(update=unsaid) == _said(other).model_copy(update=unsaid)


def _said(finding: Finding) -> Finding:
    """Return the finding without its origin, its import time, and the duration of its trials, which exports leave out."""
    effect = None if finding.effect is None else finding.effect.model_copy(update={"trial_s": None})
    return finding.model_copy(update={"origin": None, "imported_at": None, "effect": effect})


def _row(finding: Finding) -> FindingRow:
    return FindingRow(**finding.model_dump(mode="json"))


def _finding(row: FindingRow) -> Finding:
    return Finding.model_validate(row, from_attributes=True)
