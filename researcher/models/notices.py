"""Notices to people: a gate, a failure, a standstill, a conclusion, the daily digest."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from foundation.strict import StrictModel


class NoticeKind(StrEnum):
    GATE = "gate"
    """The study or campaign waits for a person's answer."""
    FAILURE = "failure"
    """The study or campaign failed, or cannot continue without help."""
    STALLED = "stalled"
    """Nothing has progressed for some time."""
    CONCLUSION = "conclusion"
    DIGEST = "digest"
    """A summary that is sent once a day."""
    TEST = "test"
    """A person tests whether notices arrive."""


class Notice(StrictModel):
    """One message to people about a study (`st-…`) or a campaign (`ca-…`).

    Notices leave this machine. They may contain ids, questions, verdicts and counts, but never keys, addresses with passwords,
    tasks or what a client or a model said.
    """

    kind: NoticeKind
    subject_id: str
    key: str
    """Identifies the event within its subject. A notice is recorded once per key."""
    title: str
    body: str
    picture: Path | None = None
    """A PNG to attach. If the file is missing, the notice is sent without it."""
