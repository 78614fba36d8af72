"""`swarm join judge|play|talk`: the manual client. A person takes part in episodes at a terminal; the rewards count like any others."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from foundation.commandline import UsageError
from swarm.cli.options import task_of, token_of, url_of
from swarm.client import LeaseLost, OverLimit, Patience, Rollout, SwarmClient, Task, WorkflowFault
from swarm.client.join import PersonLeft, Session, TooLate
from swarm.client.join.model import ask_once
from swarm.client.join.person import InputEnded, Terminal
from swarm.client.join.session import judge, talk
from swarm.client.workflow import load_rollout, load_workflow
from swarm.protocol.episodes import MOST_REWARD
from swarm.protocol.errors import SwarmError

Part = Callable[[Session, Task], Awaitable[None]]


def join_run(args: argparse.Namespace) -> int:
    """Take part in a run. Returns exit code 0 if the person finished all tasks or left, 1 if an error stopped them."""
    if not 0 < args.max_episode_s < math.inf or args.tasks < 1 or (args.times is not None and args.times < 1):
        raise UsageError("--max-episode-s must be positive and finite, and --tasks and --times must be at least 1")
    if not abs(getattr(args, "refused_reward", 0.0)) <= MOST_REWARD:
        raise UsageError(f"--refused-reward must be a number with an absolute value of at most {MOST_REWARD:g}")
    chosen, rollout = _chosen(args)
    part = _part(args, rollout)
    try:
        return asyncio.run(_joined(args, chosen, part))
    except InputEnded as error:
        sys.stderr.write(f"swarm join: {error}; open episodes were given back\n")
        return 1
    except PersonLeft:
        return 0
    except asyncio.CancelledError:
        sys.stderr.write("swarm join: stopped; open episodes were given back\n")
        return 1


def _chosen(args: argparse.Namespace) -> tuple[Iterable[Task], Rollout | None]:
    """Return the tasks and the rollout that the options name. Raises: UsageError, WorkflowFault."""
    reference = getattr(args, "workflow", None)
    if reference is None:
        if args.task is None:
            raise UsageError("no task given; add --task QUERY, or name a study's workflow.py")
        return [task_of(args)], None
    if ":" in reference:
        if args.task is None:
            raise UsageError(f"{reference} is a rollout without tasks; add --task QUERY")
        return [task_of(args)], load_rollout(reference)
    path = Path(reference).expanduser()
    workflow = load_workflow(path.parent, path.name)
    stream = workflow.tasks("train", args.seed, args.tasks)
    if not isinstance(stream, Iterable):
        raise UsageError(
            f"the tasks of {reference} are an async stream, which is not supported; name a rollout and --task instead"
        )
    return ([task_of(args)] if args.task is not None else stream), workflow.rollout


async def _joined(args: argparse.Namespace, chosen: Iterable[Task], part: Part) -> int:
    _stop_on_signals()
    patience = Patience(connect_s=10.0, later_s=30.0)
    name = f"join-{args.mode}"
    async with SwarmClient(
        url_of(args),
        token_of(args),
        client_id=args.client_id or os.environ.get("SWARM_CLIENT_ID") or name,
        client_version=args.client_version or name,
        patience=patience,
    ) as swarm:
        run = await swarm.run(args.run_id or await swarm.current_run_id())
        size, each = run.spec.batch.group_size, 2 if args.mode == "judge" else 1
        if size < each:
            raise UsageError(
                f"run {run.run_id} cannot be judged: its batch.group_size is {size}, but a judge compares two episodes of "
                "one group; start a run with groups of at least 2, or take part with `swarm join talk`"
            )
        editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
        out = sys.stderr if args.json else sys.stdout
        session = Session(
            swarm=swarm,
            person=Terminal(0, out, editor=editor),
            run_id=run.run_id,
            max_episode_s=args.max_episode_s,
            mix=args.mix,
            kind="eval" if getattr(args, "by_hand", False) else "train",
        )
        times = args.times or max(1, size // each)
        try:
            await _all(session, chosen, times, part)
        finally:
            _report(args, session)
    return 0


def _part(args: argparse.Namespace, rollout: Rollout | None) -> Part:
    """Return the function that plays one task with the person. Raises: UsageError if a package is missing."""
    if args.mode == "talk":
        return talk
    if args.mode == "judge":
        return lambda session, task: judge(session, task, rollout or ask_once)
    try:
        from swarm.client.join.play import play
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise UsageError("swarm join play needs an HTTP server: pip install 'swarm-researcher[join]'") from error
    return lambda session, task: play(
        session,
        task,
        rollout or ask_once,
        by_hand=args.by_hand,
        ask_reward=args.ask_reward or rollout is None,
        refused_reward=args.refused_reward,
    )


async def _all(session: Session, chosen: Iterable[Task], times: int, part: Part) -> None:
    """Play each task `times` times.

    If an episode exceeds its time limit, only that episode is lost. If the rollout crashes, the session ends.
    """
    for task in chosen:
        for _ in range(times):
            try:
                await part(session, task)
            except (TooLate, LeaseLost) as error:
                session.person.show(f"\ntoo late: {error}; only this episode is lost")
            except OverLimit as error:
                session.person.show(f"\nthe run is over: {error}")
                return
            except SwarmError:
                raise
            except Exception as error:  # the rollout is the user's own code, so show its traceback
                session.person.show(f"\n{traceback.format_exc()}")
                raise WorkflowFault("the rollout crashed; its traceback is above") from error


def _report(args: argparse.Namespace, session: Session) -> None:
    tally = session.tally
    if args.json:
        print(json.dumps({"ended": tally.ended, "given_up": tally.given_up, "rewards": tally.rewards}))
        return
    mean = f", mean reward {sum(tally.rewards) / len(tally.rewards):.3f}" if tally.rewards else ""
    print(f"\n{tally.ended} episodes ended, {tally.given_up} abandoned{mean}")


def _stop_on_signals() -> None:
    """Make SIGHUP and SIGTERM give back open episodes, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
