"""Notices about a campaign, made from its records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from researcher.models import CampaignRecord, Notice
from researcher.notify.words import Subject, conclusion_notice, failure_notice, gate_notice


def campaign_gate(record: CampaignRecord, decision: int, asked: str, how: str) -> Notice:
    """The campaign waits for a person's answer. asked: the question, a sentence. how: the commands that answer it."""
    return gate_notice(subject_of(record), str(decision), asked, how)


def campaign_failure(record: CampaignRecord, decisions: int, at: float) -> Notice:
    """The campaign cannot continue by itself. decisions: how many it has made. at: now."""
    return failure_notice(subject_of(record), f"It cannot go on after decision {decisions}.", at)


def campaign_conclusion(record: CampaignRecord, answer: Sequence[str], report: Path) -> Notice:
    """The campaign is concluded. answer: sentences. report: the file."""
    return conclusion_notice(subject_of(record), " ".join(answer), report)


def subject_of(record: CampaignRecord) -> Subject:
    return Subject.of_campaign(record.id, str(record.goal["goal"]))
