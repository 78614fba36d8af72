"""What people are told of a study. Written from its id, question, verdicts and counts alone: a failure's own words, which may
quote what a client or a model said, stay in the records.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from foundation.logs import redact
from foundation.streams import one_line
from researcher.halts import Cause
from researcher.models import BudgetState, Notice, NoticeKind, OpenGate, StudyRecord, TrialRecord, TrialStatus
from researcher.view import duration

DAY_S = 86_400.0
_SHOWN_QUESTION = 300
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_SENTENCES = 2
_ENDINGS: Mapping[Cause, str] = {
    "days": "It has ended without a conclusion, as its days are over.",
    "repair": "Its instrument's code keeps failing, and could not be mended.",
}
_UNITS = {"wall_s": "wall time", "trials": "trials", "tokens": "tokens"}


def gate_notice(study: StudyRecord, gate: OpenGate) -> Notice:
    """A person's word is waited for."""
    if "stage" in gate.question:
        arms = ", ".join(gate.question["arms"])
        asked = f"stage {gate.question['stage']}: {gate.question['seeds']} seeds of {arms}"
    else:
        asked = f"its plan, {str(gate.question.get('hash', ''))[:16]} (`researcher show {study.id}`)"
    how = f'`researcher approve {study.id}` or `researcher reject {study.id} --because "…"`'
    return _notice(
        study,
        NoticeKind.GATE,
        f"gate/{gate.name}",
        f"{study.id} waits for your word",
        f"It waits for a person's word on {asked}.",
        f"Answer with {how}.",
    )


def failure_notice(study: StudyRecord, what: str, at: float, then: str = "") -> Notice:
    """The study failed, stopped without an answer, or cannot go on. what: a sentence. The same is told once a day.

    then: what to do; without it, where the reason is shown.
    """
    event = hashlib.sha256(what.encode()).hexdigest()[:12]
    day = datetime.fromtimestamp(at, UTC).date().isoformat()
    then = then or f"`researcher status {study.id}` says why, `researcher resume {study.id}` goes on."
    return _notice(
        study, NoticeKind.FAILURE, f"failure/{day}/{event}", f"{study.id} needs attention", redact(what), then
    )


def halt_notice(study: StudyRecord, cause: Cause, gate: OpenGate | None, at: float) -> Notice | None:
    """Of a study that stops or rests; None where people asked for that themselves, or it only waits for its window."""
    if cause == "gate" and gate is not None:
        return gate_notice(study, gate)
    said = _ENDINGS.get(cause)
    return None if said is None else failure_notice(study, said, at)


def stalled_notice(study: StudyRecord, since: float, now: float) -> Notice:
    """since: when it last advanced. A standstill is told once."""
    return _notice(
        study,
        NoticeKind.STALLED,
        f"stalled/{since:.0f}",
        f"{study.id} stands still",
        f"No trial has made a step, an episode or an end for {duration(now - since)}.",
        f"`researcher status {study.id}` shows where it stands.",
    )


def conclusion_notice(study: StudyRecord, answer: str, report: Path) -> Notice:
    """answer: as the report gives it; its first two sentences are told."""
    said = " ".join(_SENTENCE.split(answer)[:_SENTENCES])
    return _notice(
        study, NoticeKind.CONCLUSION, "conclusion", f"{study.id} is done", said, f"Report: {report / 'report.md'}"
    )


def digest_notice(
    study: StudyRecord,
    day: int,
    trials: Sequence[TrialRecord],
    budgets: Sequence[BudgetState],
    now: float,
    picture: Path | None,
) -> Notice:
    """What ran in the day before `now`, and what is left. day: since the study began, from 1."""
    states = Counter(trial.status for trial in trials)
    under_way = sum(states[each] for each in (TrialStatus.SUBMITTED, TrialStatus.RUNNING, TrialStatus.PAUSED))
    lately = [trial for trial in trials if trial.ended_at is not None and trial.ended_at > now - DAY_S]
    ran = Counter(trial.arm for trial in lately)
    by_arm = f": {', '.join(f'{count} of {arm}' for arm, count in sorted(ran.items()))}" if ran else ""
    lines = [
        f"{len(trials)} trials so far: {states[TrialStatus.DONE]} done, {states[TrialStatus.FAILED]} failed, {under_way} under way.",
        f"{len(lately)} ended in the last day{by_arm}.",
        *(f"Left of the budget: {left_text(each)}." for each in budgets),
    ]
    found = _notice(study, NoticeKind.DIGEST, f"digest/{day}", f"{study.id}, day {day}", *lines)
    return found.model_copy(update={"picture": picture})


def left_text(budget: BudgetState) -> str:
    """`3 h 20 min of 8 h 00 min wall time`, `12 of 60 trials`."""
    left = max(0.0, budget.limit - budget.spent)
    shown = [duration(each) if budget.kind == "wall_s" else f"{each:,.0f}" for each in (left, budget.limit)]
    return f"{shown[0]} of {shown[1]} {_UNITS.get(budget.kind, budget.kind)}"


def advanced_at(trials: Sequence[TrialRecord], heartbeats: Mapping[str, float], began: float) -> float:
    """When a study last advanced. began: when its worker began. heartbeats: of attempts, by the trial's key."""
    ended = [trial.ended_at for trial in trials if trial.ended_at is not None]
    return max([began, *ended, *heartbeats.values()])


def _notice(study: StudyRecord, kind: NoticeKind, key: str, title: str, *lines: str) -> Notice:
    question = one_line(redact(study.topic))[:_SHOWN_QUESTION]
    return Notice(kind=kind, subject_id=study.id, key=key, title=title, body="\n".join([question, "", *lines]))
