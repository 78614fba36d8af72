"""`researcher resume` and `researcher daemon`. `researcher start` also uses this to run its study, in this process or in the
daemon."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

from foundation import logs
from foundation.clock import SystemClock
from foundation.commandline import UsageError
from foundation.streams import read_or_not
from researcher.attendance import carrier
from researcher.cli import DONE, FAILED, WAITING, Interrupted, answer, say, say_json
from researcher.cli.clients import check_cluster
from researcher.cli.request import check_addresses, teller
from researcher.cli.servers import check_servers
from researcher.cli.worker import wind_up, work_on
from researcher.conduct import Outcome
from researcher.executor.cleanup import leave_servers, unresumable
from researcher.executor.slots import weights_seen
from researcher.home import Home, open_home
from researcher.instruments.catalogue import open_instrument
from researcher.models import StudyStatus
from researcher.ownership import owned_now
from researcher.schedule.daemon import carry, ensure_daemon, only_daemon
from researcher.store.errors import DatabaseAway, WrongState
from researcher.store.retries import waiting
from researcher.study.plan import Plan
from researcher.view import view_for

T = TypeVar("T")


def detach(
    home: Home, study_id: str, plan: Plan, same: list[dict[str, str]], lines: list[str], *, as_json: bool
) -> int:
    """Hand the study to the daemon and print who runs it. `same` lists studies with the same spec; `lines` are messages about them."""
    hand_over(home, study_id, plan)
    log = home.studies / study_id / "daemon.log"
    document = {"study": study_id, "hash": plan.digest(), "log": log, "same_spec": same}
    return answer(as_json, document, *lines, f"{study_id}: {carrier()}; `researcher watch {study_id}` follows it")


def hand_over(home: Home, study_id: str, plan: Plan) -> None:
    """Freeze the plan and hand the study to the daemon."""
    with owned_now(home.store, study_id) as store:
        store.plans.save(study_id, plan)
    ensure_daemon()


def resume_command(args: argparse.Namespace) -> int:
    """Continue a study from wherever it stopped."""
    home = open_home()
    study_id = home.store.studies.resolve(args.study)
    study = home.store.studies.get(study_id)
    if study.status is StudyStatus.DONE or (args.scheduled and study.status.ended):
        return _close(_to_its_end(study_id, wind_up(home, study_id, teller(args))), study_id, as_json=args.json)
    if (reason := unresumable(home.store, study)) is not None:
        if study.status.ended or study.campaign_id is None:
            _to_its_end(study_id, wind_up(home, study_id, teller(args)))
        raise WrongState(reason)
    home.store.plans.get(study_id)
    if args.server:
        _move(home, study_id, args.server, teller(args))
    if not args.scheduled:
        home.store.studies.clear_requests(study_id)
    return conduct(home, study_id, as_json=args.json, wait=not args.scheduled)


def _move(home: Home, study_id: str, urls: list[str], tell: Callable[[str], None]) -> None:
    """Continue the study on these servers. Trials that run on other servers start over, and their runs there are stopped.

    Raises: UsageError; LeaseHeld when another process works on the study.
    """
    check_addresses(urls)
    plan, options = home.store.plans.get(study_id), home.store.studies.get(study_id).options
    if options.keep_models:
        raise UsageError(
            "--server: the study keeps its models, which only works on servers that it starts; leave it out"
        )
    check_servers(plan, urls, weights_seen(home.store, study_id))
    if options.clients != "local":
        folder = open_instrument(options.instrument or plan.instrument)
        check_cluster(options.clients, plan, folder, urls, say)
    with owned_now(home.store, study_id) as store:
        for line in asyncio.run(leave_servers(store, study_id, home.studies / study_id, urls, SystemClock())):
            tell(line)
        store.studies.move(study_id, urls)


def conduct(home: Home, study_id: str, *, as_json: bool, plan: Plan | None = None, wait: bool = True) -> int:
    logs.configure("WARNING")
    view = view_for(as_json=as_json)
    try:
        outcome = _to_its_end(study_id, work_on(home, study_id, view, plan, wait=wait))
    finally:
        view.close()
    return _close(outcome, study_id, as_json=as_json)


def _to_its_end(study_id: str, work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run the study's work until it ends. Raises: Interrupted; what the work raises."""
    try:
        return run_interruptibly(work)
    except KeyboardInterrupt:
        raise Interrupted(study_id) from None


def run_interruptibly(work: Coroutine[Any, Any, T]) -> T:
    """Run the work until it ends. Raises: KeyboardInterrupt on Ctrl-C, SIGTERM or a closed terminal; what the work raises."""
    try:
        return asyncio.run(_until_interrupted(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except DatabaseAway:
        if waiting.ended:
            raise KeyboardInterrupt from None
        raise
    finally:
        waiting.ended = False


async def _until_interrupted(work: Coroutine[Any, Any, T]) -> T:
    """Handle SIGTERM like Ctrl-C: stop our own servers and leave the study resumable. Handle SIGHUP too, unless it is ignored
    (`nohup`). This also works while this thread waits for the database."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def end() -> None:
        """Cancel only once: a second signal, as from a closing terminal, must not cut the shutdown short."""
        if not task.cancelling():
            task.cancel()

    def interrupted(number: int, frame: FrameType | None) -> None:
        """Handle the signal immediately, even while this thread is outside the event loop."""
        waiting.end()
        if number == signal.SIGINT and callable(interrupt):
            interrupt(number, frame)

    interrupt = signal.getsignal(signal.SIGINT)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, end)
            signal.signal(number, interrupted)
    if not callable(interrupt):
        return await work
    signal.signal(signal.SIGINT, interrupted)
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
        ended = {"study": study_id, "status": outcome.status, "reason": outcome.reason, "report": outcome.report}
        say_json(ended | {"models": outcome.models})
        return
    say(f"{study_id}: {outcome.status}. {outcome.reason}")
    if outcome.report is not None:
        say(f"report: {outcome.report / 'report.md'}\n        {outcome.report / 'report.html'}")
        if outcome.models is not None:
            say(f"models: {outcome.models}/*/*; `swarm serve --model DIR` hosts one")
        say("`researcher verify` recomputes every number of the report; `researcher ui` shows it in a browser")


_GLANCE_S = 0.5
"""Seconds that a new daemon waits for the lock, because a check for a live daemon holds it for a moment."""
_HANDOVER_S = 5.0
"""Seconds that a new daemon with `--until-idle` waits for the lock of an old one that may be ending."""


def daemon_command(args: argparse.Namespace) -> int:
    """Run the daemon until interrupted; with `--until-idle`, until no study is left to run."""
    logs.configure("WARNING")
    open_home().store.close()
    with only_daemon(_HANDOVER_S if args.until_idle else _GLANCE_S) as alone:
        if not alone:
            text = "a daemon already runs the studies of this data directory and database"
            answer(args.json, {"carries": False, "reason": text}, text)
            return DONE if args.until_idle else FAILED
        asyncio.run(carry(until_idle=args.until_idle))
    if args.json:
        say_json({"carries": False, "reason": "no study is left to run"})
    return DONE
