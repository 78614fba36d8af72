"""`researcher list`, `status`, `show` and `watch`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from foundation.clock import SystemClock
from foundation.commandline import UsageError
from foundation.nearest import nearest
from foundation.streams import one_line
from researcher.attendance import goes_on, unattended
from researcher.cli import DONE, FAILED, OUT_OF_BUDGET, WAITING, answer, say, say_json
from researcher.describe import engine_lines, event_text, plan_lines, repair_lines, when
from researcher.gates import waits_for_an_answer
from researcher.home import Home, open_home
from researcher.instruments.instrument import HELDOUT_REWARD, HELDOUT_SUCCESS
from researcher.models import (
    MODELS_KEPT,
    MODELS_NOT_KEPT,
    OVER_BUDGET,
    StudyRecord,
    StudyStatus,
    TrialRecord,
)
from researcher.notify.services import variable_of
from researcher.notify.words import budget_text
from researcher.store.errors import NotFound, owner_text
from researcher.store.journal import JournalReader
from researcher.study.plan import PlanModel
from researcher.view import losses_by_arm, losses_text, sparkline

_SHORTEST_HASH = 8
_SHOWN_TOPIC = 120


def list_command(args: argparse.Namespace) -> int:
    """List every study, newest first."""
    home = open_home()
    studies = home.store.studies.all()
    if args.json:
        say_json(list_json(home, studies))
        return DONE
    return answer(False, None, *list_lines(home, studies))


def list_json(home: Home, studies: Sequence[StudyRecord]) -> list[dict[str, Any]]:
    """Return each study's record with its worker."""
    return [{**study.model_dump(mode="json"), **attendance_json(home, study)} for study in studies]


def list_lines(home: Home, studies: Sequence[StudyRecord]) -> Iterator[str]:
    """Yield a line for each study, and who will continue those without a worker."""
    for study in studies:
        yield f"{study.id}  {study.status:8}  {when(study.created_at)}  {one_line(study.topic)[:_SHOWN_TOPIC]}"
        if not study.status.ended and home.worker(study.id) is None:
            yield f"    {unattended(home, study)}"
    if not studies:
        yield 'no studies yet; start one with `researcher start --topic "..."`'


def status_command(args: argparse.Namespace) -> int:
    """Show a study's trials, decisions, verdicts and worker."""
    home = open_home()
    study = home.store.studies.get(home.store.studies.resolve(args.study))
    if args.json:
        say_json(status_json(home, study))
    else:
        answer(False, None, *status_lines(home, study))
    return exit_code(home, study)


def show_command(args: argparse.Namespace) -> int:
    """Show a study's plan, or one trial with its blueprint."""
    home = open_home()
    if "/" in args.what:
        return _show_trial(home, args)
    study_id = _with_plan(home, args.what)
    plan, repairs = home.store.plans.get(study_id), home.store.journal.repairs(study_id)
    if args.json:
        said = [record.model_dump(mode="json") for record in repairs]
        say_json({"hash": plan.digest(), **plan.model_dump(mode="json"), "repairs": said})
    else:
        engine = home.store.studies.get(study_id).options.engine
        for line in [
            *engine_lines(plan, engine),
            *plan_lines(plan),
            *(line for record in repairs for line in repair_lines(record)),
        ]:
            say(line)
    return DONE


def _with_plan(home: Home, what: str) -> str:
    """Return the id of a study, given a reference to the study or a prefix of its plan's hash.

    Raises: NotFound; also what `resolve_study` raises.
    """
    try:
        return home.store.studies.resolve(what)
    except NotFound:
        if len(what) < _SHORTEST_HASH:
            raise
        for study in home.store.studies.all():
            if study.plan_version is not None and home.store.plans.get(study.id).digest().startswith(what):
                return study.id
        raise


def _show_trial(home: Home, args: argparse.Namespace) -> int:
    trial = _named(home, args.what)
    attempts = home.store.trials.attempts(trial.study_id, trial.key)
    failures = home.store.journal.events(trial.study_id, "client_failed", trial=trial.key)
    repairs = home.store.journal.repairs(trial.study_id)
    say_json(
        {
            **trial.model_dump(mode="json"),
            "attempts": [attempt.model_dump(mode="json") for attempt in attempts],
            "failures": [each.detail for each in failures],
            "repairs": [each.model_dump(mode="json") for each in repairs if each.trial == trial.key],
        }
    )
    return DONE


def _named(home: Home, what: str) -> TrialRecord:
    """Find the trial named PLAN/ARM/SEED, STUDY/KEY or STUDY/ARM/SEED. Studies that run the same plan share trial keys.

    Raises: NotFound; UsageError if the key alone is ambiguous.
    """
    reference, _, rest = what.partition("/")
    try:
        trials = home.store.trials.all(home.store.studies.resolve(reference))
    except NotFound:
        trials, rest = [trial for study in home.store.studies.all() for trial in home.store.trials.all(study.id)], what
    found = [trial for trial in trials if rest in (trial.key, trial.key.partition("/")[2])]
    if not found:
        guess = nearest(rest, [name for trial in trials for name in (trial.key, trial.key.partition("/")[2])])
        hint = f"did you mean {guess}?" if guess else "`researcher status` prints the keys"
        raise NotFound(f"no trial is named {what!r}; {hint}")
    if len(found) > 1:
        these = ", ".join(f"`researcher show {trial.study_id}/{trial.key}`" for trial in found)
        raise UsageError(f"several studies have a trial {what!r}: {these}")
    return found[0]


def status_json(home: Home, study: StudyRecord) -> dict[str, Any]:
    """Build the JSON document that `status` shows."""
    trials = home.store.trials.all(study.id)

    def told(*kinds: str) -> list[dict[str, object]]:
        return [{"at": event.at, **event.detail} for event in home.store.journal.events(study.id, *kinds)]

    return {
        **study.model_dump(mode="json"),
        **attendance_json(home, study),
        "gate": _gate(home, study),
        "amendments": told("amended"),
        "repairs": told("repaired"),
        "decisions": told("decision"),
        "trains": [model.model_dump(mode="json") for model in _trained(home, study)],
        "models": next(iter(told(MODELS_KEPT, MODELS_NOT_KEPT)[-1:]), None),
        "trials": [
            trial.model_dump(mode="json", exclude={"series", "evidence"}) | {"curves": curves_of(trial)}
            for trial in trials
        ],
        "attrition": {arm: found.model_dump(mode="json") for arm, found in losses_by_arm(trials).items()},
        "budgets": [state.model_dump(mode="json") for state in home.store.budgets.all(study.id)],
        "notices_waiting": {name: count for name, (count, _) in _unsent(home, study).items()},
        "verdicts": [record.model_dump(mode="json") for record in home.store.verdicts.all(study.id)],
    }


def curves_of(trial: TrialRecord) -> dict[str, list[tuple[int, float]]]:
    """Return the curves to follow while a trial trains, by step: training reward, and held-out results of interim evaluations."""
    return {name: trial.series[name] for name in _CURVES if name in trial.series}


def attendance_json(home: Home, study: StudyRecord) -> dict[str, str | None]:
    """Return the study's worker, or who will continue the study."""
    worker = home.worker(study.id)
    return {"worker": worker, "unattended": None if study.status.ended or worker else unattended(home, study)}


def status_lines(home: Home, study: StudyRecord) -> list[str]:
    """Format the study's status as lines for people."""
    worker = home.worker(study.id)
    lines = [f"{study.id}  {study.status}{f' ({study.reason})' if study.reason else ''}", one_line(study.topic)]
    lines += [f"trains {model.title}{f' from {model.path}' if model.path else ''}" for model in _trained(home, study)]
    trials = home.store.trials.all(study.id)
    lines += [_trial_line(trial) for trial in trials]
    lines += [f"{arm}: {said}" for arm, found in losses_by_arm(trials).items() if (said := losses_text(found))]
    for kind in ("amended", "repaired", "decision"):
        lines += [event_text(event) for event in home.store.journal.events(study.id, kind)]
    for record in home.store.verdicts.all(study.id):
        effect = record.effect
        shown = f"{effect.diff:+.4g} [{effect.low:+.4g}, {effect.high:+.4g}]" if effect else "no effect"
        lines.append(f"{record.hypothesis}: {record.verdict}  {shown}  {record.reason}")
    left = [budget_text(state) for state in home.store.budgets.all(study.id)]
    lines += [f"budget left: {', '.join(left)}"] if left else []
    lines += _kept(home, study)
    lines += [
        f"{count} notices wait for {name}: {why or f'the process that works on it, or the daemon, needs {variable_of(name)}'}"
        for name, (count, why) in _unsent(home, study).items()
    ]
    if (gate := _gate(home, study)) is not None:
        lines.append(f"waits at gate {gate}: `researcher approve {study.id} --gate {gate}` answers only this one")
    if not study.status.ended:
        lines.append(f"worked on by {owner_text(worker)}" if worker else unattended(home, study))
    return lines


def _gate(home: Home, study: StudyRecord) -> str | None:
    """Return the name of the gate where the study waits for an answer, if any."""
    gate = None if study.status.ended else home.store.gates.open(study.id)
    return None if gate is None or gate.answer is not None else gate.name


def _unsent(home: Home, study: StudyRecord) -> dict[str, tuple[int, str | None]]:
    """Return, for each service with unsent notices, their number and the newest error."""
    states = {name: home.store.notices.state(name, study.id) for name in study.options.notify}
    return {name: state for name, state in states.items() if state[0]}


def _trained(home: Home, study: StudyRecord) -> tuple[PlanModel, ...]:
    """Return the models of the study's plan; empty before it has a plan."""
    return () if study.plan_version is None else home.store.plans.frozen(study.id)[0].hosted


def _kept(home: Home, study: StudyRecord) -> list[str]:
    """Say where the trained models are, or why they were not kept."""
    event = home.store.journal.last(study.id, MODELS_KEPT, MODELS_NOT_KEPT)
    return [] if event is None else [event_text(event)]


def _trial_line(trial: TrialRecord) -> str:
    curve = [value for _, value in trial.series.get("reward_mean", [])]
    finals = "  ".join(f"{name}={value:.3g}" for name, value in sorted(trial.finals.items()))
    return f"  {trial.key}  {trial.status:9} {sparkline(curve)}  {finals}{trial.reason or ''}"


def exit_code(home: Home, study: StudyRecord) -> int:
    """Return the exit code for the study's state.

    A stop by a person counts as success here, but not in `start` and `resume`. A study without a worker counts as waiting, unless a
    live daemon will continue it.
    """
    if study.status is StudyStatus.STOPPED:
        spent = home.store.journal.last(study.id, OVER_BUDGET)
        return OUT_OF_BUDGET if spent is not None and spent.detail["because"] == study.reason else DONE
    if study.status.ended:
        return FAILED if study.status is StudyStatus.FAILED else DONE
    return DONE if home.worker(study.id) is not None or goes_on(home, study) else WAITING


_CURVES = ("reward_mean", HELDOUT_REWARD, HELDOUT_SUCCESS)
_LOOK_EVERY_S = 2.0
_STARTING_S = 15.0
"""Seconds that a daemon may take to start."""


def watch_command(args: argparse.Namespace) -> int:
    """Follow a study. With --json, print one JSON object per line: `{"event": …}` or `{"trial": …}`, and last `{"study": …}` as
    in `status --json`."""
    home = open_home()
    study_id = home.store.studies.resolve(args.study)
    watch = _Watch(home, study_id, as_json=args.json)
    while True:
        watch.look()
        study = home.store.studies.get(study_id)
        if study.status.ended:
            watch.look()
            return watch.close(study) if args.json else status_command(args)
        if home.worker(study_id) is None and not watch.will_go_on(study):
            if args.json:
                watch.close(study)
            else:
                say(f"{study_id}: {unattended(home, study)}")
            return WAITING
        time.sleep(_LOOK_EVERY_S)


class _Watch:
    """Prints what is new in a study, and remembers what it has printed."""

    def __init__(self, home: Home, study_id: str, *, as_json: bool) -> None:
        self._home = home
        self._study_id = study_id
        self._as_json = as_json
        self._clock = SystemClock()
        self._journal = JournalReader(home.store.journal, study_id)
        self._daemon_seen = self._clock.monotonic()
        self._rest = ""
        self._trials: dict[str, tuple[str, int]] = {}

    def will_go_on(self, study: StudyRecord) -> bool:
        """True if a daemon will continue the study, now or when its window opens."""
        store, now = self._home.store, self._clock.monotonic()
        carried = (store.studies.schedule(study.id) or {}).get("carried") and study.plan_version is not None
        if not carried or study.pause_requested or waits_for_an_answer(store, study.id):
            return False
        from researcher.schedule.daemon import daemon_lives  # APScheduler takes longer to import than a list takes

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
        """Print new events in the order in which they happened."""
        store, study_id = self._home.store, self._study_id
        now = self._clock.now()
        news: list[tuple[float, str, dict[str, Any], str]] = []
        for trial in store.trials.all(study_id):
            moved = (trial.status.value, sum(map(len, curves_of(trial).values())))
            if self._trials.get(trial.key) != moved:
                self._trials[trial.key] = moved
                fields = trial.model_dump(mode="json", exclude={"series", "evidence"})
                fields["newest"] = {name: line[-1] for name, line in curves_of(trial).items()}
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
    """Describe a trial in a line such as `learning_rate=1e-5 seed 0: running, step 3 ▂▃▃, held out 0.25 at step 2`."""
    curve = [value for _, value in trial.series.get("reward_mean", ())]
    step = f", step {len(curve)} {sparkline(curve)}" if curve else ""
    if held_out := trial.series.get(HELDOUT_REWARD):
        step += f", held out {held_out[-1][1]:.2f} at step {held_out[-1][0]}"
    return f"{trial.arm} seed {trial.seed}: {trial.status}{step}{f' ({trial.reason})' if trial.reason else ''}"
