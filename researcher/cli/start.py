"""`researcher start` and `researcher draft`: turn a request into a spec, a frozen plan, and a study.

Imports only what a dry run needs, so that a dry run answers quickly.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foundation.clock import SystemClock
from foundation.commandline import UsageError
from foundation.gpus import why_no_gpu
from foundation.paths import user_data_dir, write_atomically
from foundation.strict import StrictModel
from researcher.attendance import unattended
from researcher.cli import DONE, OUT_OF_BUDGET, USAGE, WAITING, answer, say, say_json
from researcher.cli.request import (
    ECHO_APART,
    Asking,
    DraftToEdit,
    Knowledge,
    QuestionOpen,
    Wanted,
    check_addresses,
    teller,
    topic_of,
)
from researcher.design.planning import plan_of
from researcher.design.pricing import Price, price_of
from researcher.design.question import named
from researcher.home import DATABASE, Home, data_dir, open_home
from researcher.instruments.catalogue import OWN_STUDIES, InstrumentFolder, open_instrument
from researcher.instruments.levels import level_text
from researcher.models import LlmCall, StudyOptions, StudyRecord
from researcher.refusals import BudgetTooSmall, PlanningRefused, Refusals, SpecRefused
from researcher.schedule.timetable import Timetable
from researcher.study.draft import Draft, study_text
from researcher.study.file import checked_spec
from researcher.study.plan import Plan
from researcher.study.spec import SpecSchedule, StudySpec

NEW = "new"


def start_command(args: argparse.Namespace) -> int:
    """Plan the study, freeze the plan, conduct the study, and report it."""
    _check_places(args)
    home, calls = home_to_look_at(args), list[LlmCall]()
    folder = _written(args, home, calls) if args.instrument == NEW else None
    try:
        asking = Asking(args, home, calls)
        wanted = asking.wanted()
        spec, timetable, folder, plan = planned(
            wanted, asking.knowledge, folder, servers=max(1, len(args.server)), runs=True
        )
        plan = with_tasks(plan, folder, home, dry_run=args.dry_run)
    except DraftToEdit as draft:
        if not args.json:
            say(draft.text.rstrip("\n"))
        return _to_edit(args, draft)
    except QuestionOpen as question:
        return _asked(question, as_json=args.json)
    finally:
        keep_calls(calls)
    same = [] if home is None else same_spec(home, spec, args.engine)
    if args.dry_run:
        _show(wanted.draft, spec, plan, folder, same, args)
        return DONE
    assert home is not None
    if not args.again:
        check_not_asked(home, same, "--again starts another one")
    return _begin(args, home, wanted.draft, spec, plan, folder, timetable, calls, same)


def same_spec(home: Home, spec: StudySpec, engine: str) -> list[StudyRecord]:
    """Return the planned studies here with exactly this spec and engine, newest first."""
    document = spec.document()
    return [
        study
        for study in home.store.studies.all()
        if study.request is not None
        and study.request.spec == document
        and study.options.engine == engine
        and study.plan_version is not None
    ]


def check_not_asked(home: Home, same: Sequence[StudyRecord], how: str) -> None:
    """Refuse to repeat a study that has not ended. `how` says how to start another one anyway. Raises: UsageError."""
    for study in same:
        if not study.status.ended:
            who = "worked on" if home.worker(study.id) else unattended(home, study)
            raise UsageError(
                f"{study.id} asks the same question and is {study.status} ({who}): `researcher status {study.id}`; {how}"
            )


def same_lines(same: Sequence[StudyRecord]) -> list[str]:
    """Describe earlier studies with the same spec, as lines for people."""
    return [f"asked before: {study.id} has the same spec, and is {study.status}" for study in same]


def same_json(same: Sequence[StudyRecord]) -> list[dict[str, str]]:
    return [{"study": study.id, "status": study.status} for study in same]


def draft_command(args: argparse.Namespace) -> int:
    """Write the study file for a topic or options. Returns 2 if a person has to finish it."""
    if args.output is not None:
        _check_output(Path(args.output), force=args.force)
    home, calls = home_to_look_at(args), list[LlmCall]()
    try:
        asking = Asking(args, home, calls)
        wanted = asking.wanted()
        planned(wanted, asking.knowledge, None, servers=1)
        code, text, fields = DONE, study_text(wanted.draft), wanted.draft.fields
        uncovered = wanted.draft.uncovered
    except DraftToEdit as draft:
        code, text, fields, uncovered = _to_edit(args, draft), draft.text, draft.fields, ()
    except QuestionOpen as question:
        return _asked(question, as_json=args.json)
    finally:
        keep_calls(calls)
    if args.output is not None:
        file = Path(args.output)
        write_atomically(file, text.encode())
        how = f"researcher start {file}{' --engine echo' if ECHO_APART in uncovered else ''}"
        said = f"wrote {file}; `{how}` runs it" if code == DONE else f"wrote {file}"
        answer(args.json, {"file": str(file), "fields": fields}, said)
    else:
        answer(args.json, {"fields": fields, "text": text}, text.rstrip("\n"))
    return code


def _check_output(file: Path, *, force: bool) -> None:
    """Check the output file before a planner is asked. Raises: UsageError."""
    if file.suffix not in (".yaml", ".yml"):
        raise UsageError(f"drafts are YAML: name the file {file.with_suffix('.yaml')}")
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}")
    if file.is_dir() or (file.exists() and not force):
        raise UsageError(f"{file} is a folder" if file.is_dir() else f"{file} exists; --force overwrites it")


def schema_command(args: argparse.Namespace) -> int:
    """Print the JSON Schema of a study file, or of a goal file."""
    if args.campaign:
        from researcher.campaign.goal import CampaignGoal

        say_json(_schema(CampaignGoal, "Goal file"))
    else:
        say_json(schema_of_study_files())
    return DONE


def schema_of_study_files() -> dict[str, Any]:
    """Return the JSON Schema of study files."""
    return _schema(StudySpec, "Study file")


def _schema(model: type[StrictModel], title: str) -> dict[str, Any]:
    schema = model.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}


def home_to_look_at(args: argparse.Namespace) -> Home | None:
    """Return the home; None for a dry run or draft without a database, since those must not create one."""
    only_looks = args.command == "draft" or args.dry_run
    if only_looks and not os.environ.get("RESEARCHER_DATABASE_URL") and not (user_data_dir() / DATABASE).exists():
        return None
    return open_home()


def _check_places(args: argparse.Namespace) -> None:
    """Check servers, sinks and clients before anything is planned. Raises: UsageError."""
    check_addresses(args.server)
    if args.server and args.engine == "echo":
        raise UsageError("--engine only applies to a server started here, and --server names others: drop one of them")
    if args.keep_models and args.engine == "echo":
        raise UsageError("--keep-models with --engine echo: the echo engine trains no model; drop one of them")
    if args.keep_models and args.server:
        raise UsageError(
            "--keep-models only works on servers that the study starts; for servers given with --server, run this where they run: "
            "`swarm models export RUN --to DIR`"
        )
    if args.instrument == NEW and args.topic is None:
        raise UsageError("--instrument new needs --topic: the instrument is written for that topic")
    if args.sink:
        from researcher.store.sinks import check_installed

        check_installed(args.sink)
    if args.clients != "local":
        from researcher.cli.clients import check_clients

        check_clients(args.clients, args.instrument)


def _written(args: argparse.Namespace, home: Home | None, calls: list[LlmCall]) -> InstrumentFolder:
    """Have the LLM write an instrument for the topic, and make the spec use it."""
    import asyncio

    from researcher.cli.instrument_llm import new_instrument, settings_for_writing

    settings = settings_for_writing()
    made = new_instrument(topic_of(args.topic), home or open_home(), settings, calls, calls.append, teller(args))
    folder = asyncio.run(made)
    args.instrument = str(folder.path)
    return folder


def planned(
    wanted: Wanted,
    knowledge: Knowledge,
    folder: InstrumentFolder | None,
    *,
    servers: int,
    runs: bool = False,
) -> tuple[StudySpec, Timetable, InstrumentFolder, Plan]:
    """Plan a draft.

    Args:
        folder: the instrument, if it is already open.
        runs: whether the study runs here, so that its notices are sent from here.

    Raises: PlanningRefused, with the line of the study file if one of its settings is wrong.
    """
    spec, wrong = checked_spec(wanted.draft.fields)
    refusals, timetable, plan = Refusals(wrong), None, None
    if spec is not None:
        with refusals.kept():
            timetable = timetable_of(spec.schedule)
        if runs and spec.notify:
            from researcher.notify.services import check_names

            with refusals.kept():
                check_names(spec.notify, os.environ)
        with refusals.kept():
            folder = folder or instrument_of("instrument", spec.instrument)
            if wrong:
                named(spec, folder.instrument)
            else:
                made = plan_of(
                    spec, folder, known=knowledge.known, paces=knowledge.paces, servers=servers, kept=knowledge.kept
                )
                plan = labelled(made, folder)
    with nullcontext() if wanted.lines is None else wanted.lines.named():
        refusals.raise_any()
    assert spec is not None
    assert timetable is not None
    assert folder is not None
    assert plan is not None
    return spec, timetable, folder, plan


def timetable_of(schedule: SpecSchedule) -> Timetable:
    """Parse the windows and days of a schedule. Raises: SpecRefused."""
    try:
        return Timetable.of(schedule.windows, schedule.days, SystemClock().now())
    except UsageError as error:
        raise SpecRefused("schedule.windows", str(error)) from error


def instrument_of(field: str, name: str) -> InstrumentFolder:
    """Open the instrument that a field of a file names. Raises: SpecRefused."""
    try:
        return open_instrument(name)
    except PlanningRefused as error:
        raise SpecRefused(field, str(error), error.nearest) from error


def with_tasks(plan: Plan, folder: InstrumentFolder, home: Home | None, *, dry_run: bool) -> Plan:
    """Fit the plan to the available tasks. A dry run skips this if the instrument's packages are not installed.

    Raises: PlanningRefused.
    """
    from researcher.environments import check_tasks, interpreter

    try:
        python = interpreter(folder, user_data_dir() if home is None else home.root)
    except PlanningRefused:
        if dry_run:
            return plan
        raise
    return check_tasks(plan, folder, python)


def _show(
    draft: Draft,
    spec: StudySpec,
    plan: Plan,
    folder: InstrumentFolder,
    same: Sequence[StudyRecord],
    args: argparse.Namespace,
) -> None:
    """Print a dry run: the spec, the plan and its price."""
    from researcher.describe import engine_lines, plan_lines

    if args.json:
        price = price_of(plan, folder.instrument, servers=max(1, len(args.server)))
        said = priced(draft, spec, plan, price)
        said |= {"engine": args.engine, "same_spec": same_json(same), "campaign": campaign_offer(args.topic, spec)}
        said |= {"calibration": calibration_offer(args, spec, plan)}
        say_json({**said, "plan": plan.model_dump(mode="json")})
        return
    say(study_text(draft))
    say("\n".join([*engine_lines(plan, args.engine), *plan_lines(plan), *same_lines(same)]))
    for offer in filter(None, (calibration_offer(args, spec, plan), campaign_offer(args.topic, spec))):
        say(offer)


def priced(draft: Draft, spec: StudySpec, plan: Plan, price: Price) -> dict[str, Any]:
    """Return the plan's hash, the request and the price."""
    return {"hash": plan.digest(), **request_of(draft, spec), "price": asdict(price)}


def campaign_offer(topic: str | None, spec: StudySpec) -> str:
    """Say what a campaign would add if the topic asks more than one study can answer; else return an empty string."""
    if topic is None:
        return ""
    if spec.design == "screen":
        why = "the topic is open, and a screen only shows which factors matter; a campaign then finds the best levels and confirms them"
    elif spec.schedule.days is not None and spec.schedule.days > 1:
        why = "the topic allows several days, and this is one study; a campaign spends them on follow-up studies"
    else:
        return ""
    return f"{why[0].upper()}{why[1:]}: `researcher campaign start --topic {shlex.quote(topic)}`."


def calibration_offer(args: argparse.Namespace, spec: StudySpec, plan: Plan) -> str:
    """Say how to time a trial, if the price is an estimate and the study may run on something other than two CPU cores; else
    return an empty string."""
    if plan.trial_s_measured or args.engine == "echo" or not (args.server or why_no_gpu(os.environ) is None):
        return ""
    given: dict[str, Sequence[str]]
    if args.topic is None:
        given = {name: [each] for name in ("instrument", "design") if (each := getattr(args, name))}
        given |= {name: getattr(args, name) for name in ("model", "vary", "arm", "set", "evaluate_on")}
    else:
        settings = [f"{name}={level_text(level)}" for name, level in spec.set.items()]
        given = {
            "instrument": [spec.instrument],
            "model": spec.models,
            "set": settings,
            "evaluate_on": spec.evaluate_on,
        }
    words = [args.file] if args.file else []
    for name, values in (given | {"server": args.server}).items():
        words += [word for value in values for word in (f"--{name.replace('_', '-')}", value)]
    where = "these servers" if args.server else "this machine's GPU"
    return f"The price is an estimate for two CPU cores: `researcher calibrate {shlex.join(words)}` measures a trial on {where}."


def request_of(draft: Draft, spec: StudySpec) -> dict[str, Any]:
    """Return the request as stored with the study: spec, author, source of each setting, and what the spec does not cover."""
    return {
        "spec": spec.document(),
        "author": draft.author,
        "sources": draft.sources,
        "because": draft.because,
        "uncovered": list(draft.uncovered),
    }


def _begin(
    args: argparse.Namespace,
    home: Home,
    draft: Draft,
    spec: StudySpec,
    plan: Plan,
    folder: InstrumentFolder,
    timetable: Timetable,
    calls: list[LlmCall],
    same: Sequence[StudyRecord],
) -> int:
    """Record the study, and run it here or hand it to the daemon."""
    from researcher.cli.clients import check_cluster
    from researcher.cli.resume import conduct, detach

    options = StudyOptions(
        **common_options(draft, spec, folder),
        servers=args.server,
        engine=args.engine,
        clients=args.clients,
        max_parallel=args.max_parallel,
        sinks=list(dict.fromkeys(args.sink)),
        repairs=args.repairs,
        keep_models=args.keep_models,
    )
    check_cluster(args.clients, plan, folder, args.server, teller(args))
    study_id = recorded(home, spec, plan, options, timetable, calls, carried=args.detach)
    if args.detach:
        return detach(home, study_id, plan, same_json(same), same_lines(same), as_json=args.json)
    if args.json and same:
        say(json.dumps({"same_spec": same_json(same)}))
    if not args.json:
        for line in same_lines(same):
            say(line)
        for each in draft.uncovered:
            say(f"not covered: {each}")
        for offer in filter(None, (calibration_offer(args, spec, plan), campaign_offer(args.topic, spec))):
            say(offer)
    return conduct(home, study_id, as_json=args.json, plan=plan)


def common_options(draft: Draft, spec: StudySpec, folder: InstrumentFolder) -> dict[str, Any]:
    """Return the options of a study that follow from its request."""
    return {
        "instrument": None if folder.path.parent == OWN_STUDIES else str(folder.path),
        "request": request_of(draft, spec),
        "machine": socket.gethostname(),
        "approve": spec.approve or ("never" if folder.instrument.generated is None else "plan"),
    }


def recorded(
    home: Home,
    spec: StudySpec,
    plan: Plan,
    options: StudyOptions,
    timetable: Timetable,
    calls: list[LlmCall],
    *,
    carried: bool,
) -> str:
    """Record the study before its plan is frozen; returns its id. `carried`: whether the daemon runs it.

    Raises: UsageError for its servers.
    """
    from researcher.cli.servers import check_servers

    check_servers(plan, list(options.servers), engine=options.engine)
    study_id = home.store.studies.create(spec.question, options)
    for call in calls:
        home.store.journal.record_llm_call(study_id, call)
    home.store.studies.save_schedule(study_id, {"timetable": timetable.model_dump(mode="json"), "carried": carried})
    return study_id


def keep_calls(calls: list[LlmCall]) -> None:
    """Save every LLM call with its raw answer, including those of dry runs and refusals."""
    if not calls:
        return
    from foundation.ids import RandomIds
    from researcher.planner.transcripts import save_transcript

    folder = data_dir() / "transcripts"
    folder.mkdir(exist_ok=True)
    save_transcript(folder / f"{RandomIds().new('plan')}.jsonl", calls)


def _to_edit(args: argparse.Namespace, draft: DraftToEdit) -> int:
    """Print why the draft needs a person. Returns 2, or 4 if a larger budget would be enough."""
    if args.json:
        sys.stderr.write(json.dumps({"error": str(draft), "nearest": draft.nearest, "draft": draft.fields}) + "\n")
    else:
        sys.stderr.write(f"researcher {args.command}: {draft}\n")
    return OUT_OF_BUDGET if _lacks_budget(draft) else USAGE


def _lacks_budget(draft: DraftToEdit) -> bool:
    """True if a larger budget is all that the draft needs."""
    try:
        planned(Wanted(Draft(fields=draft.fields, author="")), draft.knowledge, None, servers=draft.servers)
    except BudgetTooSmall as error:
        return draft.problems == (str(error),)
    except PlanningRefused:
        return False
    return False


def _asked(question: QuestionOpen, *, as_json: bool) -> int:
    """Print the planner's question. Returns 3, because a person has to answer."""
    say_json({"asks": str(question)}) if as_json else sys.stderr.write(f"researcher: {question}\n")
    return WAITING


def labelled(plan: Plan, instrument: InstrumentFolder) -> Plan:
    """Add a note to the plan if an LLM wrote its instrument."""
    author = instrument.instrument.generated
    if author is None:
        return plan
    note = (
        f"The instrument {plan.instrument} was written by the LLM {author}, not by a person. It only runs in a sandbox. It passed "
        "a rehearsal and the self-test of its reward: a right answer scored above a wrong one, and a wrong one above an empty one."
    )
    return plan.model_copy(update={"assumptions": (*plan.assumptions, note)})
