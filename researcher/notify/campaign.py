"""Notices about a campaign, made from its records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from researcher.models import CampaignRecord, Notice
from researcher.notify.words import Subject, conclusion_notice, failure_notice, gate_notice


def campaign_gate(record: CampaignRecord, decision: int, asked: str, how: str) -> Notice:
    """Say that the campaign waits for a person's answer. `asked` is the question, as a sentence; `how` lists the commands that
    answer it."""
    return gate_notice(subject_of(record), str(decision), asked, how)


def campaign_failure(record: CampaignRecord, decisions: int, at: float) -> Notice:
    """Say that the campaign cannot continue by itself. `decisions` is the number of decisions so far; `at` is the current time."""
    return failure_notice(subject_of(record), f"The campaign cannot continue after decision {decisions}.", at)


def campaign_stuck(record: CampaignRecord, said: str, at: float) -> Notice:
    """Say that the campaign waits, because something is missing. `said` is the reason, as a sentence; `at` is the current time."""
    return failure_notice(subject_of(record), said, at)


def campaign_conclusion(record: CampaignRecord, answer: Sequence[str], report: Path) -> Notice:
    """Say that the campaign is concluded. `answer` is a list of sentences; `report` is the file."""
    return conclusion_notice(subject_of(record), " ".join(answer), report)


def subject_of(record: CampaignRecord) -> Subject:
    return Subject.of_campaign(record.id, str(record.goal["goal"]))
