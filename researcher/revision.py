"""What another version of this program concluded from a study's trials, concluded anew: the records say what it was before."""

from __future__ import annotations

from typing import Any

from researcher.analysis.decide import Decision
from researcher.analysis.knowledge import findings_of
from researcher.models import VerdictRecord
from researcher.report.records import Records
from researcher.report.verify import reworded
from researcher.store.store import Store

CONCLUDED_ANEW = "concluded_anew"
"""The journal's word for it: by hypothesis, the verdict before and now."""
_PATH = ("action", "to", "seeds")


def conclude_anew(store: Store, study_id: str, now: float) -> bool:
    """Give the verdicts, findings and grounds of decisions of a study that is over as this version gives them; whether any changed.

    Only where another version wrote the newest report, and only where the stages that were run are those that this one would
    have run: a past that it would not have chosen is left as it is.

    Raises: RecordsDisagree.
    """
    seal = store.report_seal(study_id)
    if not store.report_files(study_id) or (seal is not None and not reworded(seal)):
        return False
    data = store.study_data(study_id)
    records = Records(data)
    path = records.path
    decided = {str(event.detail.get("after")): event.detail for event in data.events if event.kind == "decision"}
    if not path or path[-1].action == "stage" or not _as_taken(path, decided):
        return False
    then, verdicts = {record.hypothesis: record for record in data.verdicts}, records.conclusions.verdicts
    changed = [record for record in verdicts if record != then.get(record.hypothesis)]
    if changed:
        told = {each.hypothesis: f"{_said(then.get(each.hypothesis))} -> {_said(each)}" for each in changed}
        store.record_event(study_id, CONCLUDED_ANEW, told)
    for record in changed:
        store.record_verdict(study_id, path[-1].after, record)
    for decision in path:
        detail = {name: getattr(decision, name) for name in ("after", *_PATH, "seeds_needed", "power", "reason")}
        if detail != decided[decision.after]:
            store.record_event(study_id, "decision", detail)
    store.save_findings(study_id, findings_of(study_id, data.plan, verdicts, now, data.trials))
    return bool(changed)


def _as_taken(path: tuple[Decision, ...], decided: dict[str, dict[str, Any]]) -> bool:
    return [decision.after for decision in path] == list(decided) and all(
        decided[decision.after].get(name) == getattr(decision, name) for decision in path for name in _PATH
    )


def _said(record: VerdictRecord | None) -> str:
    if record is None:
        return "no verdict"
    effect = record.effect
    return f"{record.verdict}{f' {effect.diff:+.4g} [{effect.low:+.4g}, {effect.high:+.4g}]' if effect else ''}"
