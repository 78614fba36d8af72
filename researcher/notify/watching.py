"""Watches a study while it runs: sends notices when it stalls and at the end of each day."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from foundation.clock import Clock
from researcher.executor.attempts import TrialLimits
from researcher.instruments.instrument import HELDOUT_REWARD
from researcher.models import StudyRecord
from researcher.notify.picture import SERIES, curves_png
from researcher.notify.study import advanced_at, study_digest, subject_of
from researcher.notify.words import DAY_S, stalled_notice
from researcher.store.store import Store
from researcher.study.plan import Plan

STALLED_S = 3600.0
"""Minimum time without progress after which a study counts as stalled. Twice a trial's own stall limit applies if that is
longer."""


class Watch:
    """Records notices about a study. Call `look` regularly.

    Each notice is recorded once, whichever process makes it; the sinks send it. `folder` is the study's folder. `stalled_s` is the
    time without progress after which the study counts as stalled.
    """

    def __init__(
        self, store: Store, study: StudyRecord, folder: Path, clock: Clock, stalled_s: float = STALLED_S
    ) -> None:
        self._store = store
        self._study = study
        self._names = study.options.notify
        self._folder = folder
        self._clock = clock
        self._stalled_s = max(STALLED_S, stalled_s)
        self._began = clock.now()
        self._day = 0
        """Last day for which a digest is recorded."""

    @classmethod
    def of(cls, store: Store, study: StudyRecord, plan: Plan, folder: Path, clock: Clock) -> Self | None:
        """Return the watch of a study; None if the study names no notification service."""
        if not study.options.notify:
            return None
        return cls(store, study, folder, clock, 2 * TrialLimits.expecting(plan).stall_s)

    def look(self) -> None:
        self._look_for_standstill()
        self._look_for_day()

    def _look_for_standstill(self) -> None:
        attempts = self._store.trials.attempts_of_study(self._study.id)
        beats = {key: each[-1].heartbeat_at for key, each in attempts.items()}
        since = advanced_at(self._store.trials.all(self._study.id, series=()), beats, self._began)
        if (now := self._clock.now()) - since >= self._stalled_s:
            self._store.notices.record(stalled_notice(subject_of(self._study), since, now), self._names)

    def _look_for_day(self) -> None:
        now = self._clock.now()
        day = int((now - self._study.created_at) // DAY_S)
        if day <= self._day:
            return
        known = {notice.key for notice in self._store.notices.of(self._study.id)}
        if f"digest/{day}" not in known:
            trials = self._store.trials.all(self._study.id, series=(SERIES, HELDOUT_REWARD))
            picture = curves_png(trials, self._folder / "digests" / f"day-{day}.png")
            budgets = self._store.budgets.all(self._study.id)
            self._store.notices.record(study_digest(self._study, day, trials, budgets, now, picture), self._names)
        self._day = day
