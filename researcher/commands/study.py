"""`researcher start` and `researcher resume`: plan, then conduct."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foundation import logs
from foundation.clock import SystemClock
from foundation.commandline import UsageError
from foundation.ids import RandomIds
from researcher.analysis.metrics import finals
from researcher.commands import DONE, FAILED
from researcher.commands.home import Home, open_home, say, say_json
from researcher.commands.look import plan_lines
from researcher.conduct import Conduct, Outcome
from researcher.executor.blueprint import Setup
from researcher.executor.local_server import LocalServer
from researcher.executor.servers import ServerPool
from researcher.executor.trials import Executor
from researcher.models import LlmCall, Plan, StudyStatus
from researcher.ownership import owned
from researcher.planner.graph import BuiltinPlanner, Planner, PlanOptions, plan_study
from researcher.planner.instruments import InstrumentFolder, open_instrument
from researcher.planner.llm.endpoint import OpenAIEndpoint
from researcher.planner.llm.planner import LlmPlanner
from researcher.planner.llm.settings import llm_settings
from researcher.store.database import default_url
from researcher.store.mlflow_sink import MlflowSink
from researcher.view import View, silence, view_for

_TIME = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
_UNITS_S = (86_400.0, 3600.0, 60.0, 1.0)


def start_command(args: argparse.Namespace) -> int:
    """Plan, freeze, conduct, report."""
    topic = _topic(args.topic)
    for url in args.server:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--server {url!r} is no address; write it as http://host:8642")
    options = PlanOptions(
        instrument=args.instrument,
        planner=args.planner,
        seeds=args.seeds,
        budget_s=None if args.budget is None else seconds(args.budget),
        servers=max(1, len(args.server)),
        looks=args.looks,
        fine=args.fine,
    )
    home = open_home()
    place = RandomIds().new("plan")
    known = home.store.findings()
    calls: list[LlmCall] = []
    llm = _llm_planner(args, place, calls)
    plan = asyncio.run(plan_study(topic, options, known=known, llm=llm, checkpoints=default_url(), thread=place))
    if args.dry_run:
        say_json(plan.model_dump(mode="json")) if args.json else say("\n".join(plan_lines(plan)))
        return DONE
    choices = {
        "instrument": _place(args.instrument),
        "planner": args.planner,
        "servers": args.server,
        "engine": args.engine,
        "max_parallel": args.max_parallel,
    }
    study_id = home.store.create_study(topic, choices)
    for call in calls:
        home.store.record_llm_call(study_id, call)
    return _conduct(home, study_id, as_json=args.json, plan=plan)


def _llm_planner(args: argparse.Namespace, place: str, calls: list[LlmCall]) -> Planner | None:
    """The planner that asks an LLM, where one is configured and wanted. calls: what was asked and answered is put there."""
    settings = None if args.planner == "builtin" else llm_settings(os.environ)
    if settings is None:
        return None
    fallback = BuiltinPlanner(default_url(), place)
    tell: Callable[[str], None] = (lambda _: None) if args.json else say
    return LlmPlanner(OpenAIEndpoint(settings), settings, SystemClock(), fallback, keep=calls.append, tell=tell)


def resume_command(args: argparse.Namespace) -> int:
    """Go on with a study, wherever it was left."""
    home = open_home()
    study_id = home.store.resolve_study(args.study)
    study = home.store.study(study_id)
    if study.status is StudyStatus.DONE:
        say(f"{study_id} is done; its report: {home.studies / study_id / 'report.md'}")
        return DONE
    home.store.plan(study_id)
    home.store.clear_requests(study_id)
    return _conduct(home, study_id, as_json=args.json)


def seconds(text: str) -> float:
    """`8h`, `90m`, `1h30m`, `2d`, or plain seconds.

    Raises: UsageError.
    """
    found = _TIME.fullmatch(text)
    if re.fullmatch(r"\d+(\.\d+)?", text):
        total = float(text)
    elif text and found is not None:
        total = sum(float(part) * unit for part, unit in zip(found.groups(), _UNITS_S, strict=True) if part)
    else:
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
    return given.strip()


def _place(instrument: str | None) -> str | None:
    """A folder's whole path, so that `resume` finds it from anywhere; a name as it is."""
    return str(Path(instrument).resolve()) if instrument and Path(instrument).is_dir() else instrument


def _conduct(home: Home, study_id: str, *, as_json: bool, plan: Plan | None = None) -> int:
    logs.configure("WARNING")
    view = view_for(as_json=as_json)
    try:
        outcome = asyncio.run(_carry_out(home, study_id, view, plan))
    finally:
        view.close()
    return _close(outcome, study_id, as_json=as_json)


async def _carry_out(home: Home, study_id: str, view: View, plan: Plan | None) -> Outcome:
    clock = SystemClock()
    async with owned(home.store, study_id, clock) as store:
        if plan is not None:
            store.save_plan(study_id, plan)
        frozen = store.plan(study_id)
        choices = store.study(study_id).options
        view.say(f"{study_id}: plan {frozen.digest()[:16]} by the {frozen.planner} planner; records in {home.root}")
        folder = open_instrument(choices.get("instrument") or frozen.instrument)
        pool = ServerPool(
            store,
            f"study {study_id}",
            urls=choices["servers"],
            local=_local_server(home, study_id, frozen, choices),
            at_most=choices.get("max_parallel"),
            clock=clock,
            tell=view.say,
        )
        view.say(f"waiting for {', '.join(choices['servers']) or 'the swarm server that starts on this machine'} ...")
        async with pool:
            executor = Executor(store, pool, _setup(home, folder))
            conduct = Conduct(store, executor, MlflowSink(store), view, clock, home.studies)
            outcome = await conduct.carry_out(study_id)
        if outcome.status is StudyStatus.DONE:
            pool.discard_state()
        return outcome


def _local_server(home: Home, study_id: str, plan: Plan, choices: dict[str, Any]) -> LocalServer | None:
    if choices["servers"]:
        return None
    engine = choices.get("engine", "local")
    return LocalServer(model=plan.model.name, folder=home.studies / study_id / "server", engine=engine)


def _setup(home: Home, folder: InstrumentFolder) -> Setup:
    return Setup(
        instrument=folder.instrument,
        instrument_dir=folder.path,
        code_version=folder.code,
        finals=finals,
        studies=home.studies,
    )


def _close(outcome: Outcome, study_id: str, *, as_json: bool) -> int:
    try:
        _tell(outcome, study_id, as_json=as_json)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads how it ended; the exit code says it all the same
        silence(sys.stdout)
    return DONE if outcome.status is StudyStatus.DONE else FAILED


def _tell(outcome: Outcome, study_id: str, *, as_json: bool) -> None:
    if as_json:
        say_json({"study": study_id, "status": outcome.status, "reason": outcome.reason, "report": outcome.report})
        return
    say(f"{study_id}: {outcome.status}. {outcome.reason}")
    if outcome.report is not None:
        say(f"report: {outcome.report / 'report.md'}\n        {outcome.report / 'report.html'}")
        say("`researcher verify` recomputes every number in it; `researcher ui` opens MLflow")
