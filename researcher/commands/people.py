"""What a person decides: pause, approve, reject, amend."""

from __future__ import annotations

import argparse
import getpass
from contextlib import suppress

from foundation.commandline import UsageError
from researcher.commands import DONE
from researcher.commands.home import Home, open_home, say, say_json
from researcher.commands.look import plan_lines, worker_of
from researcher.commands.study import seconds
from researcher.gates import Gates, Halted, open_gate
from researcher.models import Plan, StudyRecord
from researcher.ownership import owned_now
from researcher.planner.gate import Answer, Gate
from researcher.store.database import default_url
from researcher.store.errors import WrongState


def pause_command(args: argparse.Namespace) -> int:
    """Leave the wish to pause: trials that run keep a checkpoint and go on from there after `resume`."""
    home, study = _study(args)
    if study.status.ended:
        raise WrongState(f"{study.id} is {study.status}; there is nothing to pause")
    home.store.request_pause(study.id)
    working = worker_of(home, study.id)
    _say(args, study, f"asked {working} to pause" if working else "nobody works on it; it stays where it is")
    return DONE


def approve_command(args: argparse.Namespace) -> int:
    """Answer yes where the study waits."""
    return _answer(args, Answer(verdict="approve", words=args.because or "", by=getpass.getuser()))


def reject_command(args: argparse.Namespace) -> int:
    """Answer no where the study waits, with the reason."""
    return _answer(args, Answer(verdict="reject", words=args.because, by=getpass.getuser()))


def amend_command(args: argparse.Namespace) -> int:
    """Make a new version of a plan of which no trial has begun; a gate that was open asks about the new version."""
    home, study = _study(args)
    plan = home.store.plan(study.id)
    if study.status.ended:
        raise WrongState(f"{study.id} is {study.status}; what it found stays as it is. Start another study")
    if home.store.trials(study.id):
        raise WrongState(
            f"trials of {study.id} have begun: their plan is what makes their numbers evidence. Stop it and start another study"
        )
    amended = _amended(plan, args)
    with owned_now(home.store, study.id) as store:
        digest = store.save_plan(study.id, amended)
        store.record_event(
            study.id, "amended", {"version": amended.version, "because": args.because, "by": getpass.getuser()}
        )
        if open_gate(store, study.id) is not None:  # what was asked about is no more: ask about what is now
            with suppress(Halted):
                Gates(store, lambda name, asked: Gate(default_url(), study.id, name).ask(asked)).before_plan(
                    study.id, amended
                )
    if args.json:
        say_json({"study": study.id, "version": amended.version, "hash": digest})
    else:
        say("\n".join(plan_lines(amended)))
    return DONE


def _amended(plan: Plan, args: argparse.Namespace) -> Plan:
    if args.seeds is None and args.budget is None:
        raise UsageError("say what to amend: --seeds N, --budget TIME")
    stages, budget = plan.stages, plan.budget
    if args.seeds is not None:
        most = {"seeds": args.seeds, "max_seeds": args.seeds}
        stages = tuple(stage.model_copy(update=most) for stage in stages)
        trials = max(len(stage.arms) for stage in stages) * args.seeds
        budget = budget.model_copy(update={"trials": max(budget.trials, trials)})
    if args.budget is not None:
        budget = budget.model_copy(update={"wall_s": seconds(args.budget)})
    return plan.model_copy(update={"version": plan.version + 1, "stages": stages, "budget": budget})


def _answer(args: argparse.Namespace, answer: Answer) -> int:
    home, study = _study(args)
    name = open_gate(home.store, study.id)
    if name is None:
        raise WrongState(f"{study.id} waits for no answer; it is {study.status}")
    given = Gate(default_url(), study.id, name).give(answer)
    if given != answer:
        raise WrongState(f"{name} of {study.id} was answered already: {given.verdict} {given.words}".strip())
    carried = (home.store.schedule(study.id) or {}).get("carried")
    then = "the daemon goes on with it" if carried else "`researcher resume` goes on with it"
    word = "approved" if answer.verdict == "approve" else "rejected"
    _say(args, study, f"{name} {word}; {then}")
    return DONE


def _study(args: argparse.Namespace) -> tuple[Home, StudyRecord]:
    home = open_home()
    return home, home.store.study(home.store.resolve_study(args.study))


def _say(args: argparse.Namespace, study: StudyRecord, text: str) -> None:
    say_json({"study": study.id, "told": text}) if args.json else say(f"{study.id}: {text}")
