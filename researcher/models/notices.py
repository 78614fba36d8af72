"""Notices to people: a gate, a failure, a standstill, a conclusion, the daily digest."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from foundation.strict import StrictModel


class NoticeKind(StrEnum):
    GATE = "gate"
    """It waits for a person's answer."""
    FAILURE = "failure"
    """It failed, or cannot continue by itself."""
    STALLED = "stalled"
    """Nothing has advanced for some time."""
    CONCLUSION = "conclusion"
    DIGEST = "digest"
    """Once a day."""
    TEST = "test"
    """A person tests whether notices arrive."""


class Notice(StrictModel):
    """One message to people about a study (`st-…`) or a campaign (`ca-…`).

    It leaves this machine: ids, questions, verdicts and counts are fit for it; keys, addresses with passwords, tasks and
    what a client or a model said are not.
    """

    kind: NoticeKind
    subject_id: str
    key: str
    """Names the event within its subject: a notice is recorded once for each."""
    title: str
    body: str
    picture: Path | None = None
    """A PNG to attach. If the file is missing, the notice is sent without it."""
