"""`researcher campaign`: start a campaign of studies, follow it, send it messages, and verify its results."""

from __future__ import annotations

import argparse
import functools
import getpass
import json
import os
import shutil
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from foundation import logs
from foundation.commandline import UsageError
from foundation.streams import one_line
from researcher.attendance import carrier, of_campaign
from researcher.campaign import people
from researcher.campaign.goal import CampaignGoal, goal_in
from researcher.campaign.people import open_question
from researcher.campaign.records import observe
from researcher.campaign.report import write_campaign_report
from researcher.campaign.seen import Left
from researcher.campaign.verify import verify_campaign
from researcher.cli import DONE, FAILED, WAITING, answer, say
from researcher.cli.goals import check_not_pursued, ready_goal, record_campaign
from researcher.cli.request import Asking, check_addresses, seconds
from researcher.cli.start import home_to_look_at, keep_calls
from researcher.describe import when
from researcher.home import Home, open_home
from researcher.models import CampaignRecord, CampaignStatus, LlmCall, StudyStatus
from researcher.orphans import halt_newest
from researcher.ownership import living_owner, owned_at_rest, owned_now
from researcher.store.errors import LeaseHeld, NotFound
from researcher.study.file import Lines, read_data_file
from researcher.view import duration

_SHOWN_GOAL = 120
_LOOK_EVERY_S = 2.0


def campaign_command(args: argparse.Namespace) -> int:
    """Call the function for the chosen action."""
    return int(_ACTIONS[args.action](args))


def start(args: argparse.Namespace) -> int:
    """Check and record the goal, then run the campaign here or hand it to the daemon."""
    goal, lines = _goal(args)
    check_addresses(args.server)
    if args.server and args.engine == "echo":
        raise UsageError("--engine only applies to a server started here, and --server names others: drop one of them")
    home = home_to_look_at(args)
    with lines.named():
        ready = ready_goal(goal, home, args.server, args.engine, max_parallel=args.max_parallel, runs=not args.dry_run)
    if args.dry_run:
        first = None if ready.first is None else ready.first.row()
        return answer(args.json, {**ready.document, "engine": args.engine, "first": first}, *ready.lines())
    assert home is not None
    if not args.again:
        with lines.named():
            check_not_pursued(home, goal, args.engine, "--again starts another one")
    campaign_id = record_campaign(home, ready, carried=args.detach)
    if args.detach:
        from researcher.schedule.daemon import ensure_daemon

        ensure_daemon()
        who = carrier(command=f"researcher campaign resume {campaign_id}")
        text = f"{campaign_id}: {who}; `researcher campaign watch {campaign_id}` follows it"
        return answer(args.json, {"campaign": campaign_id, **ready.document}, text)
    return _carry_on(home, campaign_id, as_json=args.json, wait=True)


def _goal(args: argparse.Namespace) -> tuple[CampaignGoal, Lines]:
    if (args.file is None) == (args.topic is None):
        raise UsageError("give either a goal file or --topic TEXT: `researcher campaign start GOAL.yaml`")
    if args.file is not None:
        if args.instruments:
            raise UsageError("the goal file names the instruments (`instruments: [A, B]`): drop --instrument")
        fields, lines = read_data_file(Path(args.file), "a goal file")
        with lines.named():
            return goal_in(fields), lines
    from researcher.campaign.topic import goal_of

    args.instrument = next(iter(args.instruments), None)
    calls, lines = list[LlmCall](), Lines("the topic")
    try:
        draft = Asking(args, open_home(), calls).wanted().draft
    finally:
        keep_calls(calls)
    with lines.named():
        return goal_of(draft, args.instruments), lines


def _carry_on(home: Home, campaign_id: str, *, as_json: bool, wait: bool) -> int:
    from researcher.cli.campaign_worker import work_on_campaign
    from researcher.cli.resume import run_interruptibly
    from researcher.view import view_for

    logs.configure("WARNING")
    view = view_for(as_json=as_json)
    try:
        outcome = run_interruptibly(work_on_campaign(home, campaign_id, view, wait=wait))
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; `researcher campaign resume {campaign_id}` continues it\n")
        return 130
    finally:
        view.close()
    document = {"campaign": campaign_id, "status": outcome.status, "reason": outcome.reason, "report": outcome.report}
    lines = [f"{campaign_id}: {outcome.status}. {outcome.reason}"]
    if outcome.report is not None:
        lines.append(f"report: {outcome.report / 'report.md'}\n        {outcome.report / 'report.html'}")
        lines.append(f"`researcher campaign verify {campaign_id}` recomputes the input of every decision")
    answer(as_json, document, *lines)
    if outcome.status is CampaignStatus.WAITING:
        return WAITING
    return DONE if outcome.status is CampaignStatus.DONE else FAILED


def resume(args: argparse.Namespace) -> int:
    """Continue a campaign from wherever it stopped."""
    home, record = _named(args)
    if record.status is CampaignStatus.DONE or (args.scheduled and record.status.ended):
        # Release it, if its worker was killed at the end.
        with suppress(LeaseHeld), owned_at_rest(home.store, record.id):
            halt_newest(home, record.id, "stop")
        return answer(
            args.json,
            {"campaign": record.id, "status": record.status},
            f"{record.id}: {record.status}. {record.reason}",
        )
    if not args.scheduled:
        people.withdraw_requests(home.store, record.id, owned_now)
    return _carry_on(home, record.id, as_json=args.json, wait=not args.scheduled)


def list_campaigns(args: argparse.Namespace) -> int:
    """List all campaigns, newest first."""
    records = open_home().store.campaigns.all()
    lines = [
        f"{each.id}  {each.status:8}  {when(each.created_at)}  {one_line(each.goal['goal'])[:_SHOWN_GOAL]}"
        for each in records
    ]
    rows = [each.model_dump(mode="json") for each in records]
    return answer(
        args.json, rows, *(lines or ["no campaigns yet; start one with `researcher campaign start GOAL.yaml`"])
    )


def status(args: argparse.Namespace) -> int:
    """Show what the campaign is doing, its results, the remaining budget, and how many trials that pays for."""
    home, record = _named(args)
    document = status_json(home, record)
    answer(args.json, document, *status_lines(document))
    if record.status.ended:
        return FAILED if record.status is CampaignStatus.FAILED else DONE
    if document["worker"] is not None:
        return WAITING if document["waits_for"] is not None else DONE
    return DONE if of_campaign(home, record, asks=document["waits_for"] is not None).goes_on else WAITING


def status_json(home: Home, record: CampaignRecord) -> dict[str, Any]:
    """Build the JSON document that `status` shows."""
    store = home.store
    seen, decisions = observe(store, record.id), store.campaigns.decisions(record.id)
    left = seen.left.model_dump(mode="json")
    ran = [study for study in seen.studies if study.trials]
    per_trial_s = sum(study.wall_s for study in ran) / sum(study.trials for study in ran) if ran else None
    trials_left = [seen.left.trials] if seen.left.trials is not None else []
    if seen.left.wall_s is not None and per_trial_s:
        trials_left.append(int(seen.left.wall_s / per_trial_s))
    asked = None if record.status.ended else open_question(store.campaigns.events(record.id))
    worker = living_owner(store, record.id, time.time())
    rests = worker is None and not record.status.ended
    return {
        **record.model_dump(mode="json", exclude={"aim", "options"}),
        "worker": worker,
        "unattended": of_campaign(home, record, asks=asked is not None).text if rests else None,
        "waits_for": None if asked is None else asked.detail,
        "incumbent": seen.on().incumbent,
        "instruments": [
            {"instrument": view.instrument, "metric": view.aim.metric, "incumbent": view.incumbent}
            for view in seen.views
        ],
        "left": left,
        "trials_left": min(trials_left, default=None),
        "hypotheses": [each.model_dump(mode="json") for each in seen.hypotheses],
        "studies": [each.model_dump(mode="json") for each in seen.studies],
        "decisions": [
            each.model_dump(mode="json", exclude={"saw", "plan", "llm_calls", "proposals"}) for each in decisions
        ],
        "said": [each.model_dump(mode="json") for each in seen.said],
    }


def _amounts(left: Left) -> list[str]:
    """Describe what is left of each budget limit."""
    limits = (
        (left.wall_s, left.reserved_wall_s, "of trials", duration),
        (left.trials, left.reserved_trials, "trials", _number),
        (left.tokens, 0.0, "tokens of agents' calls", _number),
        (left.llm_tokens, 0.0, "tokens of the strategist's LLM", _number),
        (left.money, 0.0, "of money for the strategist's LLM", _number),
    )
    return [
        f"{words(value)} {what}" + (f" ({words(min(value, reserved))} for confirmations only)" if reserved else "")
        for value, reserved, what, words in limits
        if value is not None
    ]


def _number(value: float) -> str:
    return f"{value:,.10g}"


def status_lines(document: dict[str, Any]) -> list[str]:
    """Format the status document as lines for people."""
    reason = f" ({document['reason']})" if document["reason"] else ""
    lines = [f"{document['id']}  {document['status']}{reason}", one_line(document["goal"]["goal"])]
    for each in document["decisions"]:
        study = f" [{each['study_id']}]" if each["study_id"] else ""
        lines.append(f"  {each['seq']}. {each['action']}{study}: {one_line(each['because'])}")
    lines += [f"  {each['id']} {each['status']}: {one_line(each['claim'])}" for each in document["hypotheses"]]
    buys = "" if document["trials_left"] is None else f", enough for about {document['trials_left']} more trials"
    lines.append(f"left: {', '.join(_amounts(Left.model_validate(document['left'])))}{buys}")
    for each in document["instruments"]:
        at = f" on {each['instrument']}" if len(document["instruments"]) > 1 else ""
        best = ", ".join(f"{name}={level}" for name, level in each["incumbent"].items())
        lines.append(f"best confirmed{at}: {best}" if best else f"nothing is confirmed{at} yet")
    for each in document["said"]:
        by = f" by {each['by']}" if each["by"] else ""
        lines.append(f"{each['kind']}{by}: {one_line(each['words'])}")
    return [*lines, document["unattended"]] if document["unattended"] else lines


def watch(args: argparse.Namespace) -> int:
    """Follow a campaign until it ends or until nobody continues it, with a line for each decision and change. --json: print one object per line."""
    home, record = _named(args)
    shown_decisions, shown = 0, ""
    while True:
        record = home.store.campaigns.get(record.id)
        for each in home.store.campaigns.decisions(record.id)[shown_decisions:]:
            shown_decisions += 1
            row = each.model_dump(mode="json", exclude={"saw", "plan", "llm_calls", "proposals"})
            say(
                json.dumps({"decision": row})
                if args.json
                else f"{when(each.at)}  decision {each.seq}: {each.action}. {one_line(each.because)}"
            )
        line = f"{record.status}: {record.reason}"
        if line != shown:
            shown = line
            say(
                json.dumps({"status": record.status, "reason": record.reason})
                if args.json
                else f"{when(record.updated_at)}  {line}"
            )
        sys.stdout.flush()
        if record.status.ended:
            return FAILED if record.status is CampaignStatus.FAILED else DONE
        if living_owner(home.store, record.id, time.time()) is None:
            attendance = of_campaign(home, record, asks=people.waits_for_a_person(home.store, record))
            if not attendance.goes_on:
                if not args.json:
                    say(f"{record.id}: {attendance.text}")
                return WAITING
        time.sleep(_LOOK_EVERY_S)


def tell(args: argparse.Namespace) -> int:
    """Send a message to the next decision, which quotes it.

    `--study` asks the next decision to run that study if possible. `--leave` names factors to keep fixed from then on.
    """
    home, record = _named(args)
    if args.study is not None and args.leave is not None:
        raise UsageError("--study and --leave exclude each other: give one at a time")
    if args.study is not None:
        spec, lines = read_data_file(Path(args.study), "a study")
        with lines.named():
            people.request_study(home.store, record.id, spec, args.words, getpass.getuser())
        text = f"{record.id}: the next decision runs it, or says what is wrong with it"
        return answer(args.json, {"campaign": record.id, "told": args.words, "study": spec}, text)
    leave = None if args.leave is None else people.names_in(args.leave)
    people.tell(home.store, record.id, args.words, getpass.getuser(), leave=leave)
    instead = (
        "--leave FACTOR keeps a factor fixed, --study FILE asks for a study, and `researcher campaign veto` stops one"
    )
    text = people.telling_text(home.store, record.id, leave, instead)
    return answer(args.json, {"campaign": record.id, "told": args.words, "leave": leave}, f"{record.id}: {text}")


def veto(args: argparse.Namespace) -> int:
    """Veto the waiting or running study, or the waiting instrument; the next decision sees the reason.

    `--decision` names the decision that the person saw. If the campaign has decided again, nothing is vetoed.
    """
    home, record = _named(args)
    decision = people.veto(home.store, record.id, args.because, getpass.getuser(), decision=args.decision)
    what = f"({decision.action} {decision.study_id})" if decision.study_id else f"({decision.action})"
    then = "its study stops" if decision.study_id else "the instrument is not used"
    text = f"{record.id}: decision {decision.seq} {what} is vetoed; {then}"
    return answer(args.json, {"campaign": record.id, "decision": decision.seq, "study": decision.study_id}, text)


def approve_study(args: argparse.Namespace) -> int:
    """Approve what waits for a person: a study, or an instrument that an LLM wrote. `--decision` is as in `veto`."""
    home, record = _named(args)
    number = people.approve(home.store, record.id, args.because or "", getpass.getuser(), decision=args.decision)
    return answer(args.json, {"campaign": record.id, "decision": number}, f"{record.id}: decision {number} is approved")


def amend(args: argparse.Namespace) -> int:
    """Change limits of the budget; the next decision uses them."""
    home, record = _named(args)
    change = {
        "wall": None if args.budget is None else seconds(args.budget),
        "trials": args.trials,
        "tokens": args.tokens,
        "llm_tokens": args.llm_tokens,
        "money": args.money,
    }
    budget = {name: value for name, value in change.items() if value is not None}
    if not budget:
        raise UsageError("say what to amend: --budget TIME, --trials N, --tokens N, --llm-tokens N, --money X")
    words = people.amend_budget(home.store, record.id, budget, args.because, getpass.getuser())
    return answer(args.json, {"campaign": record.id, "budget": budget}, f"{record.id}: {words}")


def pause(args: argparse.Namespace) -> int:
    """Pause the campaign and its study. If no process works on it, end what a dead worker left running."""
    home, record = _named(args)
    text = people.pause(home.store, record.id, owned_at_rest, functools.partial(halt_newest, home))
    return answer(args.json, {"campaign": record.id}, f"{record.id}: {text}")


def stop(args: argparse.Namespace) -> int:
    """Ask the campaign's worker to stop. Without a worker, stop the campaign here, along with anything a dead worker left running."""
    home, record = _named(args)
    text = people.stop(home.store, record.id, home.studies, owned_at_rest, functools.partial(halt_newest, home))
    already = {"status": record.status} if record.status.ended else {}
    return answer(args.json, {"campaign": record.id, **already}, f"{record.id}: {text}")


def report(args: argparse.Namespace) -> int:
    """Rewrite the report from the records."""
    home, record = _named(args)
    folder = write_campaign_report(home.store, record.id, home.studies)
    files = {"markdown": str(folder / "report.md"), "html": str(folder / "report.html")}
    return answer(args.json, {"campaign": record.id, **files}, (folder / "report.md").read_text(), *files.values())


def verify(args: argparse.Namespace) -> int:
    """Recompute every decision's input, check the rules, and verify each study's report. Returns 1 if anything differs."""
    home, record = _named(args)
    found = verify_campaign(home.store, record.id, home.studies / record.id)
    studies = [each.study_id for each in home.store.campaigns.decisions(record.id) if each.study_id]
    for study_id in studies:
        found += [f"{study_id}: {each}" for each in _study_differences(home, study_id)]
    document = {"campaign": record.id, "studies": studies, "differences": found}
    verdict = f"{len(found)} differ" if found else "all recompute"
    answer(
        args.json,
        document,
        *found,
        f"{record.id}: {len(home.store.campaigns.decisions(record.id))} decisions, {len(studies)} studies, {verdict}",
    )
    return FAILED if found else DONE


def _study_differences(home: Home, study_id: str) -> list[str]:
    from researcher.cli.report import differences_of

    try:
        return [str(each) for each in differences_of(home, study_id)]
    except NotFound:
        if home.store.studies.get(study_id).status is StudyStatus.DONE:
            return [f"the study is done but has no report; `researcher report {study_id}` writes one"]
        return []  # stopped before it had a report


def export(args: argparse.Namespace) -> int:
    """Write the campaign's records and report, and its studies' reports, into one archive."""
    home, record = _named(args)
    target = Path(args.to or f"{record.id}.tar.gz")
    if target.exists() and not args.force:
        raise UsageError(f"{target} exists; --force overwrites it")
    folder = write_campaign_report(home.store, record.id, home.studies)
    document = {
        "campaign": record.model_dump(mode="json"),
        "decisions": [each.model_dump(mode="json") for each in home.store.campaigns.decisions(record.id)],
        "hypotheses": [each.model_dump(mode="json") for each in home.store.campaigns.hypotheses(record.id)],
        "events": [each.model_dump(mode="json") for each in home.store.campaigns.events(record.id)],
    }
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    records = folder / "campaign.json"
    records.write_text(json.dumps(document, indent=2) + "\n")
    try:
        with tarfile.open(partial, "w:gz") as archive:
            for name in ("report.md", "report.html", "campaign.json"):
                archive.add(folder / name, f"{record.id}/{name}")
            for each in home.store.campaigns.decisions(record.id):
                own = home.studies / (each.study_id or "-")
                for name in ("report.md", "report.html"):
                    if (own / name).exists():
                        archive.add(own / name, f"{record.id}/{each.study_id}/{name}")
        shutil.move(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return answer(
        args.json,
        {"campaign": record.id, "file": str(target)},
        f"wrote {target}; `researcher export STUDY` writes a complete study",
    )


def _named(args: argparse.Namespace) -> tuple[Home, CampaignRecord]:
    home = open_home()
    return home, home.store.campaigns.get(home.store.campaigns.resolve(args.campaign))


_ACTIONS = {
    "start": start,
    "list": list_campaigns,
    "status": status,
    "watch": watch,
    "tell": tell,
    "veto": veto,
    "approve": approve_study,
    "amend": amend,
    "pause": pause,
    "resume": resume,
    "stop": stop,
    "report": report,
    "verify": verify,
    "export": export,
}
