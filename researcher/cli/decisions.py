"""Commands for people to intervene in a study: stop, pause, approve, reject, amend."""

from __future__ import annotations

import argparse
import getpass
from typing import Literal

from foundation.commandline import UsageError
from researcher.attendance import carrier
from researcher.cli import DONE, answer
from researcher.cli.request import seconds
from researcher.describe import plan_lines
from researcher.gates import Amendment, amend, answer_gate
from researcher.home import Home, open_home
from researcher.models import Answer, StudyRecord, StudyStatus
from researcher.orphans import end_left, halt
from researcher.store.errors import LeaseHeld, WrongState, owner_text
from researcher.study.draft import seeds_of


def stop_command(args: argparse.Namespace) -> int:
    """Ask the study's worker to stop. Without a worker, stop the study here, along with anything a dead worker left running."""
    home, study = _study(args)
    _say(args, study, stop(home, study))
    return DONE


def stop(home: Home, study: StudyRecord) -> str:
    """Stop the study and say what was done. Raises: WrongState for an unfinished study of a campaign."""
    _check_alone(study)
    if study.status.ended:
        return "; ".join([f"{study.status} already", *_left_of_ended(home, study)])
    home.store.studies.request_stop(study.id)
    return _told_or_done(home, study, "stop")


def pause_command(args: argparse.Namespace) -> int:
    """Request a pause: running trials keep a checkpoint, from which `resume` continues them. If no process works on the study,
    end what a dead worker left running."""
    home, study = _study(args)
    _check_alone(study)
    if study.status.ended:
        raise WrongState(f"{study.id} is {study.status}; there is nothing to pause")
    home.store.studies.request_pause(study.id)
    _say(args, study, _told_or_done(home, study, "pause"))
    return DONE


def _check_alone(study: StudyRecord) -> None:
    """Refuse to change a campaign's study on its own.

    Raises: WrongState for an unfinished study of a campaign, because the campaign would not learn of the change.
    """
    if study.campaign_id is not None and not study.status.ended:
        raise WrongState(
            f"{study.id} is part of {study.campaign_id}: use `researcher campaign veto` to reject it, "
            "or `researcher campaign stop` or `pause` for both"
        )


def approve_command(args: argparse.Namespace) -> int:
    """Approve the study at the gate where it waits. If `--gate` names another one, the answer is refused."""
    return _answer(args, Answer(verdict="approve", words=args.because or "", by=getpass.getuser()))


def reject_command(args: argparse.Namespace) -> int:
    """Reject the study at the gate where it waits, with the reason. `--gate` is as in `approve`."""
    return _answer(args, Answer(verdict="reject", words=args.because, by=getpass.getuser()))


def amend_command(args: argparse.Namespace) -> int:
    """Make a new version of a plan whose trials have not begun; an open gate then asks about the new version."""
    home, study = _study(args)
    if args.seeds is None and args.budget is None:
        raise UsageError("say what to amend: --seeds N, --budget TIME")
    try:
        change = Amendment(seeds=_seeds(args.seeds), wall_s=None if args.budget is None else seconds(args.budget))
    except ValueError as error:
        raise UsageError(str(error)) from error
    amended = amend(home.store, study.id, change, because=args.because, by=getpass.getuser())
    document = {"study": study.id, "version": amended.version, "hash": amended.digest()}
    return answer(args.json, document, *plan_lines(amended))


def _seeds(given: str | None) -> int | None:
    """Parse `--seeds` as one number. Raises: UsageError."""
    if given is None:
        return None
    seeds = seeds_of(given)
    if seeds["min"] != seeds["max"]:
        raise UsageError(
            f"--seeds {given}: an amended plan has a fixed number of seeds per arm; write --seeds {seeds['max']}"
        )
    return seeds["min"]


def _answer(args: argparse.Namespace, answer: Answer) -> int:
    home, study = _study(args)
    name = answer_gate(home.store, study.id, answer, gate=args.gate)
    carried = (home.store.studies.schedule(study.id) or {}).get("carried")
    goes_on = carried and not study.status.ended and not study.pause_requested
    then = carrier() if goes_on else "`researcher resume` continues it"
    if answer.verdict == "reject" and home.store.studies.get(study.id).status is StudyStatus.STOPPED:
        then = "the study is stopped"
    word = "approved" if answer.verdict == "approve" else "rejected"
    _say(args, study, f"{name} {word}; {then}")
    return DONE


def _told_or_done(home: Home, study: StudyRecord, wish: Literal["stop", "pause"]) -> str:
    """Ask the worker to stop or pause, or do it here if there is no worker. Returns what was done."""
    try:
        left = halt(home, study.id, wish)
    except LeaseHeld as held:
        return f"asked {owner_text(held.owner)} to {wish}"
    if wish == "pause":
        return "; ".join(["no process works on it; it stays where it is", *left])
    report = home.studies / study.id / "report.md"
    written = [f"report: {report}"] if study.plan_version is not None and report.exists() else []
    return "; ".join([home.store.studies.get(study.id).reason or "stopped", *left, *written])


def _left_of_ended(home: Home, study: StudyRecord) -> list[str]:
    """End what a dead worker of an ended study left running. Returns a line for each thing done."""
    left = end_left(home, study.id)
    if left is None:
        return []
    then = [f"`researcher resume {study.id}` frees its disk"] if study.status is StudyStatus.DONE else []
    return ["ended what was left running", *then, *left]


def _study(args: argparse.Namespace) -> tuple[Home, StudyRecord]:
    home = open_home()
    return home, home.store.studies.get(home.store.studies.resolve(args.study))


def _say(args: argparse.Namespace, study: StudyRecord, text: str) -> None:
    answer(args.json, {"study": study.id, "told": text}, f"{study.id}: {text}")
