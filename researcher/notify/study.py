"""Notices about a study, made from its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from researcher.halts import Cause
from researcher.models import BudgetState, Notice, OpenGate, StudyRecord, TrialRecord, TrialStatus
from researcher.notify.words import DAY_S, Subject, budget_text, digest_notice, failure_notice, gate_notice

_ENDINGS: Mapping[Cause, str] = {
    "days": "The study ended without a conclusion, because its days are over.",
    "repair": "The code of its instrument keeps failing and could not be repaired.",
}


def subject_of(study: StudyRecord) -> Subject:
    return Subject(study.id, study.topic)


def study_gate(study: StudyRecord, gate: OpenGate) -> Notice:
    """Say that the plan or a stage waits for a person's answer."""
    if "stage" in gate.question:
        arms = ", ".join(gate.question["arms"])
        asked = f"stage {gate.question['stage']}: {gate.question['seeds']} seeds of {arms}"
    else:
        asked = f"its plan, {str(gate.question.get('hash', ''))[:16]} (`researcher show {study.id}`)"
    how = f'`researcher approve {study.id}` or `researcher reject {study.id} --because "…"`'
    return gate_notice(subject_of(study), gate.name, f"The study waits for your decision on {asked}.", how)


def halt_notice(study: StudyRecord, cause: Cause, gate: OpenGate | None, at: float) -> Notice | None:
    """Say why the study has stopped or is waiting. Returns None if a person asked for that, or if the study only waits for its
    window."""
    if cause == "gate" and gate is not None:
        return study_gate(study, gate)
    said = _ENDINGS.get(cause)
    return None if said is None else failure_notice(subject_of(study), said, at)


def study_digest(
    study: StudyRecord,
    day: int,
    trials: Sequence[TrialRecord],
    budgets: Sequence[BudgetState],
    now: float,
    picture: Path | None,
) -> Notice:
    """Summarize the day before `now`: what ran, and what is left."""
    states = Counter(trial.status for trial in trials)
    under_way = sum(states[each] for each in (TrialStatus.SUBMITTED, TrialStatus.RUNNING, TrialStatus.PAUSED))
    lately = [trial for trial in trials if trial.ended_at is not None and trial.ended_at > now - DAY_S]
    ran = Counter(trial.arm for trial in lately)
    by_arm = f": {', '.join(f'{count} of {arm}' for arm, count in sorted(ran.items()))}" if ran else ""
    lines = [
        f"{len(trials)} trials so far: {states[TrialStatus.DONE]} done, {states[TrialStatus.FAILED]} failed, {under_way} in progress.",
        f"{len(lately)} ended in the last day{by_arm}.",
        *(f"Left of the budget: {budget_text(each)}." for each in budgets),
    ]
    return digest_notice(subject_of(study), day, lines, picture)


def advanced_at(trials: Sequence[TrialRecord], heartbeats: Mapping[str, float], began: float) -> float:
    """Return when a study last made progress.

    `began` is when its worker started. `heartbeats` are those of the attempts, by trial key.
    """
    ended = [trial.ended_at for trial in trials if trial.ended_at is not None]
    return max([began, *ended, *heartbeats.values()])
