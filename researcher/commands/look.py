"""Commands that look: list, status, show."""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime

from foundation.commandline import UsageError
from foundation.streams import one_line
from researcher.commands import DONE, FAILED, OUT_OF_BUDGET, WAITING
from researcher.commands.home import Home, open_home, say, say_json
from researcher.commands.plan_text import plan_lines
from researcher.gates import unanswered_gate
from researcher.models import (
    EXCUSED,
    KINDS,
    MODELS_KEPT,
    MODELS_NOT_KEPT,
    OVER_BUDGET,
    Attrition,
    Event,
    RepairRecord,
    StudyRecord,
    StudyStatus,
    TrialRecord,
)
from researcher.ownership import living_owner
from researcher.schedule.timetable import Timetable
from researcher.store.errors import NotFound
from researcher.study.plan import PlanModel
from researcher.view import losses_by_arm, losses_text, sparkline

_SHORTEST_HASH = 8
_SHOWN_TOPIC = 120


def list_command(args: argparse.Namespace) -> int:
    """Every study, newest first."""
    studies = open_home().store.studies()
    if args.json:
        say_json([study.model_dump(mode="json") for study in studies])
        return DONE
    for study in studies:
        say(f"{study.id}  {study.status:8}  {when(study.created_at)}  {one_line(study.topic)[:_SHOWN_TOPIC]}")
    if not studies:
        say('no studies yet; begin with `researcher start --topic "..."`')
    return DONE


def status_command(args: argparse.Namespace) -> int:
    """How a study is doing: its trials, decisions, verdicts, and who works on it."""
    home = open_home()
    study = home.store.study(home.store.resolve_study(args.study))
    if args.json:
        say_json(status_json(home, study))
    else:
        for line in _as_lines(home, study):
            say(line)
    return exit_code(home, study)


def show_command(args: argparse.Namespace) -> int:
    """A study's plan, or one trial with its blueprint."""
    home = open_home()
    if "/" in args.what:
        return _show_trial(home, args)
    study_id = _with_plan(home, args.what)
    plan, repairs = home.store.plan(study_id), home.store.repairs(study_id)
    if args.json:
        said = [record.model_dump(mode="json") for record in repairs]
        say_json({"hash": plan.digest(), **plan.model_dump(mode="json"), "repairs": said})
    else:
        for line in [*plan_lines(plan), *(line for record in repairs for line in repair_lines(record))]:
            say(line)
    return DONE


def _with_plan(home: Home, what: str) -> str:
    """A study, by itself or by the hash of its plan or the beginning of it. Raises: NotFound; what `resolve_study` raises."""
    try:
        return home.store.resolve_study(what)
    except NotFound:
        if len(what) < _SHORTEST_HASH:
            raise
        for study in home.store.studies():
            if study.plan_version is not None and home.store.plan(study.id).digest().startswith(what):
                return study.id
        raise


def repair_lines(record: RepairRecord) -> list[str]:
    """A change of the code while the study ran, whole."""
    return [
        f"repaired    {when(record.at)} by {record.by}: {record.reason}",
        f"            code {record.old[:12]} → {record.new[:12]} ({', '.join(record.files)}), after {record.trial}",
        f"            failed: {record.failed}",
        f"            {record.rehearsed}",
        *(f"    {line}" for line in record.diff.splitlines()),
    ]


def _show_trial(home: Home, args: argparse.Namespace) -> int:
    trial = _named(home, args.what)
    attempts = home.store.attempts(trial.study_id, trial.key)
    failures = home.store.events(trial.study_id, limit=100_000, kind="client_failed")
    repairs = home.store.repairs(trial.study_id)
    say_json(
        {
            **trial.model_dump(mode="json"),
            "attempts": [attempt.model_dump(mode="json") for attempt in attempts],
            "failures": [each.detail for each in failures if each.detail.get("trial") == trial.key],
            "repairs": [each.model_dump(mode="json") for each in repairs if each.trial == trial.key],
        }
    )
    return DONE


def _named(home: Home, what: str) -> TrialRecord:
    """The trial with the key `what`, or `STUDY/KEY`: studies that carry out the same plan have trials of the same keys.

    Raises: NotFound; UsageError where the key alone means several.
    """
    studies = home.store.studies()
    found = [
        trial
        for study in studies
        for trial in home.store.trials(study.id)
        if what in (trial.key, f"{trial.study_id}/{trial.key}")
    ]
    if not found:
        raise NotFound(f"no trial has the key {what!r}; `researcher status` prints the keys")
    if len(found) > 1:
        these = ", ".join(f"`researcher show {trial.study_id}/{trial.key}`" for trial in found)
        raise UsageError(f"several studies have a trial {what!r}: {these}")
    return found[0]


def status_json(home: Home, study: StudyRecord) -> dict[str, object]:
    """All that `status` says of a study, as a document."""
    trials, worker = home.store.trials(study.id), worker_of(home, study.id)

    def told(*kinds: str) -> list[dict[str, object]]:
        events = [event for kind in kinds for event in home.store.events(study.id, limit=100_000, kind=kind)]
        return [{"at": event.at, **event.detail} for event in sorted(events, key=lambda event: event.seq)]

    return {
        **study.model_dump(mode="json"),
        "worker": worker,
        "goes_on": None if study.status.ended or worker else unattended(home, study),
        "amendments": told("amended"),
        "repairs": told("repaired"),
        "decisions": told("decision"),
        "trains": [model.model_dump(mode="json") for model in _trained(home, study)],
        "models": next(iter(told(MODELS_KEPT, MODELS_NOT_KEPT)[-1:]), None),
        "trials": [trial.model_dump(mode="json", exclude={"series", "evidence"}) for trial in trials],
        "attrition": {arm: found.model_dump(mode="json") for arm, found in losses_by_arm(trials).items()},
        "verdicts": [record.model_dump(mode="json") for record in home.store.verdicts(study.id)],
    }


def _as_lines(home: Home, study: StudyRecord) -> list[str]:
    worker = worker_of(home, study.id)
    lines = [f"{study.id}  {study.status}{f' ({study.reason})' if study.reason else ''}", one_line(study.topic)]
    lines += [f"trains {model.title}{f' from {model.path}' if model.path else ''}" for model in _trained(home, study)]
    trials = home.store.trials(study.id)
    lines += [_trial_line(trial) for trial in trials]
    lines += [f"{arm}: {said}" for arm, found in losses_by_arm(trials).items() if (said := losses_text(found))]
    for kind in ("amended", "repaired", "decision"):
        lines += [event_text(event) for event in home.store.events(study.id, limit=100_000, kind=kind)]
    for record in home.store.verdicts(study.id):
        effect = record.effect
        shown = f"{effect.diff:+.4g} [{effect.low:+.4g}, {effect.high:+.4g}]" if effect else "no effect"
        lines.append(f"{record.hypothesis}: {record.verdict}  {shown}  {record.reason}")
    lines += _kept(home, study)
    if not study.status.ended:
        lines.append(f"worked on by {worker}" if worker else unattended(home, study))
    return lines


def _trained(home: Home, study: StudyRecord) -> tuple[PlanModel, ...]:
    """The models of its plan, as far as there is one."""
    return () if study.plan_version is None else home.store.frozen_plan(study.id)[0].hosted


def _kept(home: Home, study: StudyRecord) -> list[str]:
    """Where the models of its trials are, or why not."""
    events = [event for kind in (MODELS_KEPT, MODELS_NOT_KEPT) for event in home.store.events(study.id, kind=kind)]
    return [event_text(max(events, key=lambda event: event.seq))] if events else []


def unattended(home: Home, study: StudyRecord) -> str:
    """Who will go on with a study that nobody works on, and when."""
    if study.plan_version is None:
        return "nobody works on it, and it has no plan: `researcher start` asks anew, `researcher stop` ends this one"
    detail = home.store.schedule(study.id)
    carried = detail is not None and detail.get("carried") and not study.pause_requested
    if unanswered_gate(home.store, study.id) is not None:
        return f"{carrier()} once there is an answer" if carried else "nobody works on it until there is an answer"
    if detail is None or not carried:
        return "nobody works on it; `researcher resume` goes on"
    now = time.time()
    opening = Timetable.of_record(detail).next_opening(now)
    if opening is None:
        return f"its days are over; {carrier('ends')}"
    return carrier() + (f" at {when(opening)}" if opening > now else "")


def carrier(does: str = "goes on with") -> str:
    """Who goes on with a study in the daemon's care (or `does` else): the daemon, or what a person has to start where there is none."""
    from researcher.schedule.daemon import daemon_lives  # APScheduler takes longer to import than a list takes

    who = "the daemon" if daemon_lives() else "no daemon runs here: `researcher daemon` or `researcher resume`"
    return f"{who} {does} it"


def event_text(event: Event) -> str:
    """An entry of the journal as a sentence."""
    detail = event.detail
    if event.kind == "decision":
        to = f" {detail['to']}" if detail.get("to") else ""
        seeds = f" on {detail['seeds']} seeds per arm" if detail.get("seeds") else ""
        return f"after {detail['after']}: {detail['action']}{to}{seeds} ({detail['reason']})"
    if event.kind == "repaired":
        files = ", ".join(detail.get("files", ()))
        return f"the code was mended by {detail['by']} ({files}) after {detail['trial']}: {detail['reason']}"
    if event.kind == "amended":
        changed = f" ({detail['changed']})" if detail.get("changed") else ""
        return f"the plan was amended by {detail['by']} to version {detail['version']}{changed}: {detail['because']}"
    if event.kind == "moved":
        before = ", ".join(detail["before"]) or "servers of its own"
        return f"it goes on with {', '.join(detail['after'])} in place of {before}"
    if event.kind == EXCUSED:
        lost = Attrition.model_validate(detail["attrition"])
        count = sum(sum(lost.of(kind).lost.values()) for kind in KINDS)
        return f"{count} attempts of {detail['trial']} were lost to code that was mended since"
    if event.kind == MODELS_KEPT:
        return f"{detail['models']} models are kept in {detail['in']}"
    if event.kind == MODELS_NOT_KEPT:
        return str(detail["because"])
    if event.kind == "report":
        return f"report written: {detail.get('markdown', '')}"
    told = ", ".join(f"{name} {value}" for name, value in detail.items() if value is not None)
    return f"{event.kind.replace('_', ' ')}{f': {told}' if told else ''}"


def _trial_line(trial: TrialRecord) -> str:
    curve = [value for _, value in trial.series.get("reward_mean", [])]
    finals = "  ".join(f"{name}={value:.3g}" for name, value in sorted(trial.finals.items()))
    return f"  {trial.key}  {trial.status:9} {sparkline(curve)}  {finals}{trial.reason or ''}"


def worker_of(home: Home, study_id: str) -> str | None:
    """The living owner of the study, if any."""
    return living_owner(home.store, study_id, time.time())


def exit_code(home: Home, study: StudyRecord) -> int:
    """How the study stands; one that a person stopped stands well. (`start` and `resume`, which were to end it, fail then.)
    One that nobody works on waits, whatever it was doing when it was left."""
    if study.status is StudyStatus.STOPPED:
        spent = home.store.events(study.id, limit=100_000, kind=OVER_BUDGET)
        return OUT_OF_BUDGET if spent and spent[-1].detail["because"] == study.reason else DONE
    if study.status.ended:
        return FAILED if study.status is StudyStatus.FAILED else DONE
    return WAITING if study.status is StudyStatus.WAITING or worker_of(home, study.id) is None else DONE


def when(at: float) -> str:
    """A time as a person reads it, in this machine's zone; one that no calendar has, as the seconds since 1970 that it is."""
    try:
        return datetime.fromtimestamp(at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # beyond the years 1 to 9999, or what the machine counts in
        return f"{at:g} s after 1970"
