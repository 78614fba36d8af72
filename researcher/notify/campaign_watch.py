"""Watches a campaign while it runs: sends notices when it stalls and at the end of each day."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foundation.clock import Clock
from researcher.models import CampaignRecord, StudyStatus
from researcher.notify.campaign import subject_of
from researcher.notify.picture import SERIES, curves_png
from researcher.notify.study import advanced_at
from researcher.notify.watching import STALLED_S
from researcher.notify.words import DAY_S, budget_text, digest_notice, stalled_notice
from researcher.store.store import Store


class CampaignWatch:
    """Records a notice when the campaign stalls and at the end of each day.

    `services` are names. Each notice is recorded once, whichever process makes it; the sinks send it.
    """

    def __init__(self, store: Store, campaign_id: str, services: Sequence[str], folder: Path, clock: Clock) -> None:
        self._store = store
        self._id = campaign_id
        self._services = services
        self._folder = folder
        self._clock = clock
        self._began = clock.now()

    def look(self) -> None:
        """Check once. Call this regularly, from a thread."""
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
            self._store.notices.record(stalled_notice(subject_of(record), since, now), self._services)

    def _look_for_day(self, record: CampaignRecord, studies: Sequence[str]) -> None:
        day = int((self._clock.now() - record.created_at) // DAY_S)
        if day < 1 or f"digest/{day}" in {notice.key for notice in self._store.notices.of(self._id)}:
            return
        trials = self._store.trials.all(studies[-1], series=(SERIES,))
        picture = curves_png(trials, self._folder / "digests" / f"day-{day}.png")
        ended = sum(self._store.studies.get(each).status.ended for each in studies)
        lines = [f"{len(studies)} studies so far, {ended} of them ended; the newest is {studies[-1]}."]
        lines += [
            f"Left of the newest study's budget: {budget_text(each)}." for each in self._store.budgets.all(studies[-1])
        ]
        self._store.notices.record(digest_notice(subject_of(record), day, lines, picture), self._services)
