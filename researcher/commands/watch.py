"""`researcher watch`: what changes in a study, a line each, until it ends or nobody works on it any more."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from foundation.clock import SystemClock
from researcher.commands import WAITING
from researcher.commands.home import Home, open_home, say
from researcher.commands.look import event_text, exit_code, status_command, status_json, unattended, when, worker_of
from researcher.gates import unanswered_gate
from researcher.models import StudyRecord, TrialRecord
from researcher.schedule.daemon import daemon_lives
from researcher.store.journal import Journal
from researcher.view import sparkline

_LOOK_EVERY_S = 2.0
_STARTING_S = 15.0
"""How long a daemon may take to begin its work."""


def watch_command(args: argparse.Namespace) -> int:
    """Follow a study. With --json: a JSON object per line, `{"event": …}` or `{"trial": …}`, and last `{"study": …}`, as `status --json` has it."""
    home = open_home()
    study_id = home.store.resolve_study(args.study)
    watch = _Watch(home, study_id, as_json=args.json)
    while True:
        watch.look()
        study = home.store.study(study_id)
        if study.status.ended:
            watch.look()
            return watch.close(study) if args.json else status_command(args)
        if worker_of(home, study_id) is None and not watch.will_go_on(study):
            if args.json:
                watch.close(study)
            else:
                say(f"{study_id}: {unattended(home, study)}")
            return WAITING
        time.sleep(_LOOK_EVERY_S)


class _Watch:
    """What has been shown of a study so far."""

    def __init__(self, home: Home, study_id: str, *, as_json: bool) -> None:
        self._home = home
        self._study_id = study_id
        self._as_json = as_json
        self._clock = SystemClock()
        self._journal = Journal(home.store, study_id)
        self._daemon_seen = self._clock.monotonic()
        self._rest = ""
        self._trials: dict[str, tuple[str, int]] = {}

    def will_go_on(self, study: StudyRecord) -> bool:
        """Whether a daemon goes on by itself with a study that nobody works on: at once, or when its window opens."""
        store, now = self._home.store, self._clock.monotonic()
        carried = (store.schedule(study.id) or {}).get("carried") and study.plan_version is not None
        if not carried or study.pause_requested or unanswered_gate(store, study.id) is not None:
            return False
        if daemon_lives():
            self._daemon_seen = now
            self._tell_rest(unattended(self._home, study))
        return now - self._daemon_seen < _STARTING_S

    def _tell_rest(self, text: str) -> None:
        if text != self._rest and not self._as_json:
            say(f"{self._study_id}: {text}")
            sys.stdout.flush()
        self._rest = text

    def look(self) -> None:
        """Show what is new, in the order in which it happened."""
        store, study_id = self._home.store, self._study_id
        now = self._clock.now()
        news: list[tuple[float, str, dict[str, Any], str]] = []
        for trial in store.trials(study_id):
            moved = (trial.status.value, len(trial.series.get("reward_mean", ())))
            if self._trials.get(trial.key) != moved:
                self._trials[trial.key] = moved
                fields = trial.model_dump(mode="json", exclude={"series", "evidence"})
                news.append((trial.ended_at or now, "trial", fields, trial_text(trial)))
        for event in self._journal.look():
            news.append((event.at, "event", event.model_dump(mode="json"), event_text(event)))
        for at, kind, fields, text in sorted(news, key=lambda each: each[0]):
            say(json.dumps({kind: fields}, default=str) if self._as_json else f"{when(at)}  {text}")
        sys.stdout.flush()

    def close(self, study: StudyRecord) -> int:
        say(json.dumps({"study": status_json(self._home, study)}, default=str))
        return exit_code(self._home, study)


def trial_text(trial: TrialRecord) -> str:
    """`learning_rate=1e-5 seed 0: running, step 3 ▂▃▃`."""
    curve = [value for _, value in trial.series.get("reward_mean", ())]
    step = f", step {len(curve)} {sparkline(curve)}" if curve else ""
    return f"{trial.arm} seed {trial.seed}: {trial.status}{step}{f' ({trial.reason})' if trial.reason else ''}"
