"""What people are told of a campaign: from its id, its brief, verdicts and counts alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foundation.clock import Clock
from foundation.streams import one_line
from researcher.models import CampaignRecord, Notice, NoticeKind, StudyStatus
from researcher.notify.picture import SERIES, curves_png
from researcher.notify.study import DAY_S, advanced_at, left_text
from researcher.notify.watching import STALLED_S
from researcher.store.store import Store
from researcher.view import duration

_SHOWN_GOAL = 300


def campaign_gate(record: CampaignRecord, decision: int, asked: str) -> Notice:
    """A person's word is waited for. asked: on what, in a sentence with the command that answers."""
    return _notice(record, NoticeKind.GATE, f"gate/{decision}", f"{record.id} waits for your word", asked)


def campaign_failure(record: CampaignRecord, decision: int, then: str) -> Notice:
    """It cannot go on by itself. then: what to do."""
    said = f"It cannot go on after decision {decision}."
    return _notice(record, NoticeKind.FAILURE, f"failure/{decision}", f"{record.id} needs attention", said, then)


def campaign_conclusion(record: CampaignRecord, answer: Sequence[str], report: Path) -> Notice:
    """answer: in sentences; the first two are told."""
    told = " ".join(answer[:2])
    return _notice(
        record, NoticeKind.CONCLUSION, "conclusion", f"{record.id} is done", told, f"Report: {report / 'report.md'}"
    )


def campaign_digest(record: CampaignRecord, day: int, lines: Sequence[str], picture: Path | None) -> Notice:
    """Once a day. lines: what ran, and what is left. picture: of the effects so far."""
    made = _notice(record, NoticeKind.DIGEST, f"digest/{day}", f"{record.id}, day {day}", *lines)
    return made.model_copy(update={"picture": picture})


def campaign_stalled(record: CampaignRecord, study_id: str, since: float, now: float) -> Notice:
    """since: when a trial of its study last advanced. A standstill is told once."""
    said = f"No trial of {study_id} has made a step, an episode or an end for {duration(now - since)}."
    then = f"`researcher status {study_id}` shows where it stands."
    return _notice(record, NoticeKind.STALLED, f"stalled/{since:.0f}", f"{record.id} stands still", said, then)


class CampaignWatch:
    """What the clock notices of a campaign while it is worked on: a standstill, and that another day is over.

    names: services. What it notices is recorded once, whichever process notices it, and sent by the sinks.
    """

    def __init__(self, store: Store, campaign_id: str, names: Sequence[str], folder: Path, clock: Clock) -> None:
        self._store = store
        self._id = campaign_id
        self._names = names
        self._folder = folder
        self._clock = clock
        self._began = clock.now()

    def look(self) -> None:
        """Now and then, from a thread."""
        decisions = self._store.campaigns.decisions(self._id)
        studies = [each.study_id for each in decisions if each.study_id is not None]
        if studies:
            record = self._store.campaigns.get(self._id)
            self._look_for_standstill(record, studies[-1])
            self._look_for_day(record, studies)

    def _look_for_standstill(self, record: CampaignRecord, study_id: str) -> None:
        if self._store.studies.get(study_id).status is not StudyStatus.RUNNING:
            self._began = self._clock.now()
            return
        attempts = self._store.trials.attempts_of_study(study_id)
        beats = {key: each[-1].heartbeat_at for key, each in attempts.items()}
        since, now = advanced_at(self._store.trials.all(study_id, series=()), beats, self._began), self._clock.now()
        if now - since >= STALLED_S:
            self._store.notices.record(campaign_stalled(record, study_id, since, now), self._names)

    def _look_for_day(self, record: CampaignRecord, studies: Sequence[str]) -> None:
        day = int((self._clock.now() - record.created_at) // DAY_S)
        if day < 1 or f"digest/{day}" in {notice.key for notice in self._store.notices.of(self._id)}:
            return
        trials = self._store.trials.all(studies[-1], series=(SERIES,))
        picture = curves_png(trials, self._folder / "digests" / f"day-{day}.png")
        ended = sum(self._store.studies.get(each).status.ended for each in studies)
        lines = [f"{len(studies)} studies so far, {ended} of them over; the newest is {studies[-1]}."]
        lines += [f"Left of its budget: {left_text(each)}." for each in self._store.budgets.all(studies[-1])]
        self._store.notices.record(campaign_digest(record, day, lines, picture), self._names)


def _notice(record: CampaignRecord, kind: NoticeKind, key: str, title: str, *lines: str) -> Notice:
    goal = one_line(str(record.goal["goal"]))[:_SHOWN_GOAL]
    return Notice(kind=kind, subject_id=record.id, key=key, title=title, body="\n".join([goal, *filter(None, lines)]))
