"""`researcher start` and `researcher resume`: plan, then conduct."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

from foundation import logs
from foundation.clock import SystemClock
from foundation.commandline import UsageError
from foundation.durations import duration_s
from foundation.ids import RandomIds
from foundation.streams import read_or_not
from researcher.commands import DONE, FAILED, WAITING, Interrupted
from researcher.commands.clients import check_clients, check_cluster
from researcher.commands.given_servers import check_servers
from researcher.commands.home import Home, open_home, say, say_json
from researcher.commands.look import plan_lines
from researcher.commands.sitting import keep, sit
from researcher.commands.writing import labelled, new_instrument, settings_for_writing
from researcher.conduct import Outcome
from researcher.environments import check_tasks, interpreter
from researcher.executor.keeping import Keeping
from researcher.executor.leftovers import end_left_of
from researcher.executor.weights import weights_seen
from researcher.instruments.catalogue import OWN_STUDIES, InstrumentFolder, open_instrument
from researcher.llm.asking import Purse
from researcher.llm.endpoint import OpenAIEndpoint
from researcher.llm.settings import llm_settings
from researcher.models import LONGEST_TOPIC, LlmCall, StudyStatus
from researcher.ownership import owned, owned_now
from researcher.planner.graph import BuiltinPlanner, Planner, PlanOptions, plan_study
from researcher.planner.llm.planner import LlmPlanner
from researcher.refusals import PlanningRefused
from researcher.schedule.daemon import ensure_daemon
from researcher.schedule.timetable import Timetable
from researcher.store.database import default_url
from researcher.store.errors import DatabaseAway, WrongState
from researcher.store.outages import waiting
from researcher.store.sinks import check_installed
from researcher.study.plan import Plan
from researcher.view import view_for
from researcher.workshop.writing import NEW


def start_command(args: argparse.Namespace) -> int:
    """Plan, freeze, conduct, report."""
    topic = _topic(args.topic)
    _check_addresses(args.server)
    if args.server and args.engine == "echo":
        raise UsageError(
            "--engine is of a server that is started here, and --server names others: leave one of the two out"
        )
    check_installed(args.sink)
    check_clients(args.clients, args.instrument)
    _check_keeping(args)
    timetable = Timetable.of(args.window, args.days, SystemClock().now())
    home, calls = open_home(), list[LlmCall]()
    if args.instrument == NEW:
        settings = settings_for_writing()
        args.instrument = str(asyncio.run(new_instrument(topic, home, settings, calls, _teller(args))).path)
    options = PlanOptions(
        instrument=args.instrument,
        planner=args.planner,
        seeds=args.seeds,
        budget_s=None if args.budget is None else seconds(args.budget),
        servers=max(1, len(args.server)),
        looks=args.looks,
        first_seed=args.first_seed,
        fine=args.fine,
    )
    place = RandomIds().new("plan")
    known = home.store.findings()
    llm = _llm_planner(args, place, calls)
    plan = asyncio.run(plan_study(topic, options, known=known, llm=llm, checkpoints=default_url(), thread=place))
    folder = open_instrument(args.instrument or plan.instrument)
    plan = _with_tasks(labelled(plan, folder), folder, home, dry_run=args.dry_run)
    if args.dry_run:
        say_json(plan.model_dump(mode="json")) if args.json else say("\n".join(plan_lines(plan)))
        return DONE
    choices = {
        "instrument": _place(folder),
        "planner": args.planner,
        "servers": args.server,
        "engine": args.engine,
        "clients": args.clients,
        "max_parallel": args.max_parallel,
        "sinks": list(dict.fromkeys(args.sink)),
        "approve": args.approve or ("never" if folder.instrument.generated is None else "plan"),
        "repairs": args.repairs,
        "keep_models": args.keep_models,
    }
    check_servers(plan, args.server)
    check_cluster(args.clients, plan, folder, args.server, _teller(args))
    study_id = home.store.create_study(topic, choices)
    for call in calls:
        home.store.record_llm_call(study_id, call)
    home.store.save_schedule(study_id, {"timetable": timetable.model_dump(mode="json"), "carried": args.detach})
    if args.detach:
        return _detach(home, study_id, plan, as_json=args.json)
    return _conduct(home, study_id, as_json=args.json, plan=plan)


def _with_tasks(plan: Plan, folder: InstrumentFolder, home: Home, *, dry_run: bool) -> Plan:
    """The plan, fitted to the tasks that there are. A dry run does without where the instrument's packages are not installed.

    Raises: PlanningRefused.
    """
    try:
        python = interpreter(folder, home.root)
    except PlanningRefused:
        if dry_run:
            return plan
        raise
    return check_tasks(plan, folder, python)


def _check_keeping(args: argparse.Namespace) -> None:
    """Raises: UsageError where there will be no model to keep."""
    if args.keep_models and args.engine == "echo":
        raise UsageError("--keep-models: the echo engine trains no model; leave one of the two out")
    if args.keep_models and args.server:
        raise UsageError(
            "--keep-models is for servers that the study starts itself; those of --server keep their checkpoints: "
            "`swarm models export RUN --to DIR`, where they run"
        )


def _llm_planner(args: argparse.Namespace, place: str, calls: list[LlmCall]) -> Planner | None:
    """The planner that asks an LLM, where one is configured and wanted. calls: those made for the study so far; its own are
    put there."""
    settings = None if args.planner == "builtin" else llm_settings(os.environ)
    if settings is None:
        return None
    return LlmPlanner(
        OpenAIEndpoint(settings),
        settings,
        SystemClock(),
        BuiltinPlanner(default_url(), place),
        keep=calls.append,
        tell=_teller(args),
        spent=Purse.of(calls),
        checkpoints=default_url(),
        thread=place,
    )


def _teller(args: argparse.Namespace) -> Callable[[str], None]:
    return (lambda _: None) if args.json else say


def _detach(home: Home, study_id: str, plan: Plan, *, as_json: bool) -> int:
    """Freeze the plan and hand the study to the daemon."""
    with owned_now(home.store, study_id) as store:
        store.save_plan(study_id, plan)
    ensure_daemon()
    if as_json:
        say_json({"study": study_id, "hash": plan.digest(), "log": home.studies / study_id / "daemon.log"})
    else:
        say(f"{study_id}: the daemon carries it on; `researcher watch {study_id}` follows it")
    return DONE


def resume_command(args: argparse.Namespace) -> int:
    """Go on with a study, wherever it was left."""
    home = open_home()
    study_id = home.store.resolve_study(args.study)
    study = home.store.study(study_id)
    if study.status is StudyStatus.DONE or (args.scheduled and study.status.ended):
        return _close(_to_its_end(study_id, _wound_up(home, study_id, _teller(args))), study_id, as_json=args.json)
    home.store.plan(study_id)
    if home.store.events(study_id, limit=1, kind="reproduces"):
        raise WrongState(f"{study_id} runs one trial of an archive again: `researcher reproduce` begins it anew")
    if args.server:
        _move(home, study_id, args.server)
    if not args.scheduled:
        home.store.clear_requests(study_id)
    return _conduct(home, study_id, as_json=args.json, wait=not args.scheduled)


def _move(home: Home, study_id: str, urls: list[str]) -> None:
    """Have the study go on with these servers. Trials under way elsewhere begin anew on them.

    Raises: UsageError; LeaseHeld when another process works on the study.
    """
    _check_addresses(urls)
    plan, options = home.store.plan(study_id), home.store.study(study_id).options
    if options.get("keep_models"):
        raise UsageError(
            "--server: the study keeps its models, which only servers that it starts itself do; leave it out"
        )
    check_servers(plan, urls, weights_seen(home.store, study_id))
    if options.get("clients", "local") != "local":
        folder = open_instrument(options["instrument"])
        check_cluster(options["clients"], plan, folder, urls, say)
    with owned_now(home.store, study_id) as store:
        store.move(study_id, urls)


def _check_addresses(urls: list[str]) -> None:
    """Raises: UsageError."""
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--server {url!r} is no address; write it as http://host:8642")


async def _wound_up(home: Home, study_id: str, tell: Callable[[str], None]) -> Outcome:
    """Of a study that has ended: what an earlier call did not get to."""
    study, folder, models = home.store.study(study_id), home.studies / study_id, None
    async with owned(home.store, study_id, SystemClock()) as store:
        if study.status is StudyStatus.DONE:
            models = await keep(Keeping(store, study_id, folder, SystemClock(), os.environ), study.options, tell)
        else:
            for line in await end_left_of(store, study_id, folder, SystemClock()):
                tell(line)
    written = study.status is StudyStatus.DONE or (folder / "report.md").exists()
    return Outcome(study.status, study.reason or "nothing is left to do", folder if written else None, models=models)


def seconds(text: str) -> float:
    """`8h`, `90m`, `1h30m`, `2d`, or plain seconds.

    Raises: UsageError.
    """
    total = float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else duration_s(text)
    if total is None:
        raise UsageError(f"{text!r} is no time; write 8h, 90m, 1h30m or seconds")
    if total <= 0:
        raise UsageError(f"{text!r} is no time to spend; write 8h, 90m, 1h30m or seconds")
    return total


def _topic(given: str) -> str:
    if given.startswith("@"):
        file = Path(given[1:])
        try:
            given = file.read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"the topic file {str(file)!r} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"the topic file {str(file)!r} is not text in UTF-8") from error
    if not given.strip():
        raise UsageError("the topic is empty; ask a question, such as those of `researcher instruments`")
    if len(given.strip()) > LONGEST_TOPIC:
        raise UsageError(f"the topic has {len(given.strip())} characters, and at most {LONGEST_TOPIC} are taken")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise UsageError("the topic is not text in UTF-8") from error
    return given.strip()


def _place(folder: InstrumentFolder) -> str | None:
    """The whole path of an instrument of one's own, so that `resume` and the daemon find it from anywhere; None for one of ours."""
    return None if folder.path.parent == OWN_STUDIES else str(folder.path)


def _conduct(home: Home, study_id: str, *, as_json: bool, plan: Plan | None = None, wait: bool = True) -> int:
    logs.configure("WARNING")
    view = view_for(as_json=as_json)
    try:
        outcome = _to_its_end(study_id, sit(home, study_id, view, plan, wait=wait))
    finally:
        view.close()
    return _close(outcome, study_id, as_json=as_json)


def _to_its_end(study_id: str, work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Raises: Interrupted by Ctrl-C, SIGTERM or a terminal that was closed; what the work raises."""
    try:
        return asyncio.run(_until_told(work))
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise Interrupted(study_id) from None
    except DatabaseAway:
        if waiting.ended:
            raise Interrupted(study_id) from None
        raise
    finally:
        waiting.ended = False


async def _until_told(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """SIGTERM ends it as Ctrl-C does: servers of our own are stopped, and the study can be resumed. So does SIGHUP, unless it
    is ignored, as under `nohup`. All are heeded also while this thread waits for the database."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def end() -> None:
        """Once: told again, by a terminal that closes after Ctrl-C, its end is not to be cut short."""
        if not task.cancelling():
            task.cancel()

    def told(number: int, frame: FrameType | None) -> None:
        """At once, while the loop hears of it only when this thread is back in it."""
        waiting.end()
        if number == signal.SIGINT and callable(interrupt):
            interrupt(number, frame)

    interrupt = signal.getsignal(signal.SIGINT)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, end)
            signal.signal(number, told)
    if not callable(interrupt):
        return await work
    signal.signal(signal.SIGINT, told)
    try:
        return await work
    finally:
        signal.signal(signal.SIGINT, interrupt)


def _close(outcome: Outcome, study_id: str, *, as_json: bool) -> int:
    with read_or_not():
        _tell(outcome, study_id, as_json=as_json)
    if outcome.status is StudyStatus.WAITING:
        return WAITING
    return DONE if outcome.status is StudyStatus.DONE else FAILED


def _tell(outcome: Outcome, study_id: str, *, as_json: bool) -> None:
    if as_json:
        told = {"study": study_id, "status": outcome.status, "reason": outcome.reason, "report": outcome.report}
        say_json(told | {"models": outcome.models})
        return
    say(f"{study_id}: {outcome.status}. {outcome.reason}")
    if outcome.report is not None:
        say(f"report: {outcome.report / 'report.md'}\n        {outcome.report / 'report.html'}")
        if outcome.models is not None:
            say(f"models: {outcome.models}/*/*; `swarm serve --model DIR` hosts one")
        say("`researcher verify` recomputes every number in it; `researcher ui` shows it in a browser")
