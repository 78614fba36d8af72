"""What people are told without asking: a gate, a failure, a standstill, a conclusion, the day's digest."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from foundation.strict import StrictModel


class NoticeKind(StrEnum):
    GATE = "gate"
    """A person's word is waited for."""
    FAILURE = "failure"
    """It failed, or cannot go on by itself."""
    STALLED = "stalled"
    """Nothing has advanced for some time."""
    CONCLUSION = "conclusion"
    DIGEST = "digest"
    """Once a day."""
    TEST = "test"
    """A person tries whether notices arrive."""


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
    """A PNG to attach. Without the file the notice is sent all the same."""
