"""Texts of notices about studies and campaigns, a few lines each.

They contain only ids, questions, verdicts and counts. The text of a failure may quote a client or a model, so it stays in the
records.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from foundation.logs import redact
from foundation.streams import one_line
from researcher.models import BudgetState, Notice, NoticeKind
from researcher.view import duration

DAY_S = 86_400.0
_SHOWN_QUESTION = 300
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_SENTENCES = 2
_UNITS = {"wall_s": "wall time"}


@dataclass(frozen=True, slots=True)
class Subject:
    """A study or campaign. `question` is its question or goal; `command` is the prefix of its `status` and `resume` commands."""

    id: str
    question: str
    command: str = "researcher"

    @classmethod
    def of_campaign(cls, campaign_id: str, goal: str) -> Subject:
        return cls(campaign_id, goal, "researcher campaign")


def gate_notice(subject: Subject, gate: str, asked: str, how: str) -> Notice:
    """Say that the subject waits for a person's answer.

    `gate` is its name, with one notice per gate. `asked` is a sentence. `how` lists the commands that answer it.
    """
    title = f"{subject.id} waits for your decision"
    return _notice(subject, NoticeKind.GATE, f"gate/{gate}", title, [asked, f"Answer with {how}."])


def failure_notice(subject: Subject, what: str, at: float, then: str = "") -> Notice:
    """Say that the subject failed, stopped without an answer, or cannot continue.

    `what` is a sentence; the same one is sent at most once a day (UTC). `at` is the current time. `then` says what to do; by
    default, where to find the reason.
    """
    event = hashlib.sha256(what.encode()).hexdigest()[:12]
    day = datetime.fromtimestamp(at, UTC).date().isoformat()
    then = (
        then
        or f"`{subject.command} status {subject.id}` says why, `{subject.command} resume {subject.id}` continues it."
    )
    title = f"{subject.id} needs attention"
    return _notice(subject, NoticeKind.FAILURE, f"failure/{day}/{event}", title, [redact(what), then])


def stalled_notice(subject: Subject, since: float, now: float) -> Notice:
    """Say that the subject has stalled. `since` is when it last made progress. One notice is sent per stall."""
    said = f"Nothing has advanced for {duration(now - since)}: no step, no episode, no finished trial."
    where = f"`{subject.command} status {subject.id}` shows its state."
    title = f"{subject.id} has stalled"
    return _notice(subject, NoticeKind.STALLED, f"stalled/{since:.0f}", title, [said, where])


def conclusion_notice(subject: Subject, answer: str, report: Path) -> Notice:
    """Say that the subject is concluded. `answer` is the report's answer, of which the first two sentences are sent. `report`
    is the file."""
    said = " ".join(_SENTENCE.split(answer)[:_SENTENCES])
    title = f"{subject.id} is done"
    return _notice(subject, NoticeKind.CONCLUSION, "conclusion", title, [said, f"Report: {report}"])


def digest_notice(subject: Subject, day: int, lines: Iterable[str], picture: Path | None = None) -> Notice:
    """Say what ran and what is left. `day` counts from 1, since the subject began; one notice is sent per day."""
    title = f"{subject.id}, day {day}"
    return _notice(subject, NoticeKind.DIGEST, f"digest/{day}", title, lines, picture)


def budget_text(budget: BudgetState) -> str:
    """Format what is left of a budget, such as `3 h 20 min of 8 h 00 min wall time` or `12 of 60 trials`."""
    left = max(0.0, budget.limit - budget.spent)
    shown = [duration(each) if budget.kind == "wall_s" else f"{each:,.0f}" for each in (left, budget.limit)]
    return f"{shown[0]} of {shown[1]} {_UNITS.get(budget.kind, budget.kind)}"


def _notice(
    subject: Subject, kind: NoticeKind, key: str, title: str, lines: Iterable[str], picture: Path | None = None
) -> Notice:
    question = one_line(redact(subject.question))[:_SHOWN_QUESTION]
    body = "\n".join([question, "", *lines])
    return Notice(kind=kind, subject_id=subject.id, key=key, title=title, body=body, picture=picture)
