"""What became of a study as a whole: its answer, none yet, or an end without one. No wording but what the records hold."""

from __future__ import annotations

from dataclasses import dataclass

from researcher.models import OVER_BUDGET, StudyData, StudyStatus
from researcher.report.records import Records

_ANSWERED = ("answered", "answer_given")
_WITHOUT_ANSWER = (StudyStatus.STOPPED, StudyStatus.FAILED)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a study ended. kind: `budget`, `rejected`, `failed` (a person has to mend it), `repeated` (one trial of another
    study, run again), or `stopped`."""

    kind: str
    reason: str


def outcome_of(records: Records) -> str:
    """`decided`, `underpowered`, `halted` (a rule could not be evaluated), `ended` without an answer, or `open` while stages are not over."""
    last = records.path[-1] if records.path else None
    if last is None or last.action == "stage":
        return "open" if records.data.status not in _WITHOUT_ANSWER else "ended"
    if last.action == "underpowered":
        return "underpowered"
    return "decided" if last.by_plan else "halted"


def ending_of(data: StudyData) -> Ending | None:
    """None where the study did not stop or fail."""
    if data.status not in _WITHOUT_ANSWER:
        return None
    reason = data.reason or "no reason was recorded"
    if data.status is StudyStatus.FAILED:
        return Ending("failed", reason)
    spent = [event.detail.get("because") for event in data.events if event.kind == OVER_BUDGET]
    answers = [event.detail.get("verdict") for event in data.events if event.kind in _ANSWERED]
    if spent and spent[-1] == data.reason:
        return Ending("budget", reason)
    if answers and answers[-1] == "reject":
        return Ending("rejected", reason)
    return Ending("repeated" if any(event.kind == "reproduces" for event in data.events) else "stopped", reason)


def ended_or_went_on(data: StudyData) -> bool:
    """Whether the study stopped or failed, or went on from there, after its newest report was written."""
    reports = [event.seq for event in data.events if event.kind == "report"]
    told = [event for event in data.events if event.kind == "study"]
    if not reports:
        return False
    before = [event for event in told if event.seq < reports[-1]][-1:]
    since = [event for event in told if event.seq > reports[-1]]
    return bool(since) and any(event.detail.get("status") in _WITHOUT_ANSWER for event in (*before, *since))


def rule_of(records: Records) -> str | None:
    """What the plan's rule said, in its words, where it asks for an order of the arms or for what goes on: or that it told nothing."""
    chosen = [one for one in records.path if one.to is not None and len(records.plan.alternatives(one.to)) > 1]
    if chosen:
        return chosen[-1].reason
    asked = [branch for branch in records.plan.branches if branch.when.kind == "order"]
    if not asked or outcome_of(records) != "decided":
        return None
    last = records.path[-1]
    held = any((branch.stage, branch.reason) == (last.after, last.reason) for branch in asked)
    return last.reason if held else "no order of the arms can be told from these trials"
