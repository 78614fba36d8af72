"""`swarm ledger`: what became of each episode, page by page; with --summary, why it didn't learn."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from typing import TYPE_CHECKING, Any

from foundation.commandline import UsageError
from swarm.cli import connection
from swarm.cli.trace import entry_line

if TYPE_CHECKING:
    from swarm.client.sync import SwarmClient

TRACES_READ = 20


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The `ledger` command."""
    parser = subparsers.add_parser("ledger", help="what became of each episode, and why; --summary adds it up")
    for option, metavar, text in (
        ("--run-id", "RUN", "of this run"),
        ("--client-id", "CLIENT", "of this client"),
        ("--task-id", "TASK", "of this task"),
        ("--reason", "REASON", "dropped for this reason"),
        ("--cause", "CAUSE", "lost by server, network, client, rollout, grader, limit or person"),
        ("--state", "STATE", "running, prepared, ended, in_step, trained or dropped"),
    ):
        parser.add_argument(option, metavar=metavar, help=text)
    parser.add_argument("--kind", choices=("train", "eval"))
    parser.add_argument("--step", type=int, metavar="N", help="trained in this step")
    parser.add_argument("--limit", type=int, metavar="N", help="no more than this many, and where the rest begins")
    parser.add_argument("--after", metavar="NEXT", help="go on where a page ended")
    parser.add_argument("--detail", action="store_true", help="with tracebacks")
    parser.add_argument("--summary", action="store_true", help="why didn't it learn? (default run: the server's own)")
    parser.add_argument(
        "--traces",
        type=int,
        default=TRACES_READ,
        metavar="N",
        help="newest traces read for forks (default %(default)s)",
    )
    connection.add_options(parser)
    parser.set_defaults(run=show_ledger)


def show_ledger(args: argparse.Namespace) -> int:
    """Print one line per episode, or their sum."""
    from swarm.cli.documents import choice
    from swarm.protocol.episodes import Cause, DropReason, EpisodeState

    wanted = {
        "run_id": args.run_id,
        "step": args.step,
        "client_id": args.client_id,
        "task_id": args.task_id,
        "kind": args.kind,
        "reason": choice(DropReason, "--reason", args.reason),
        "cause": choice(Cause, "--cause", args.cause),
        "state": choice(EpisodeState, "--state", args.state),
    }
    for option, value, least in (("--limit", args.limit, 1), ("--step", args.step, 0)):
        if value is not None and value < least:
            raise UsageError(f"{option} must be at least {least}, got {value}")
    with connection.connect(args) as swarm:
        if args.summary:
            return _show_summary(swarm, wanted, args)
        return _show_entries(swarm, wanted, args)


def _show_entries(swarm: SwarmClient, wanted: dict[str, Any], args: argparse.Namespace) -> int:
    if args.limit is None:
        entries, following = swarm.ledger(**wanted, after=args.after), None
    else:
        page = swarm.ledger_page(**wanted, after=args.after, limit=args.limit)
        entries, following = iter(page.entries), page.next
    for entry in entries:
        print(entry.model_dump_json() if args.json else entry_line(entry))
        if args.detail and entry.detail and not args.json:
            print("\n".join(f"    {line}" for line in entry.detail.splitlines()))
    if following is not None:
        print(json.dumps({"next": following}) if args.json else f"more: --after {following}")
    return 0


def _show_summary(swarm: SwarmClient, wanted: dict[str, Any], args: argparse.Namespace) -> int:
    from swarm.cli.diagnosis import Evidence, diagnose, diagnosis_text

    run_id = wanted["run_id"] = wanted["run_id"] or swarm.status().run_id
    summary = swarm.summary(**wanted)
    evidence = Evidence(
        summary=summary,
        run=None if run_id is None else swarm.run(run_id),
        traces=[swarm.trace(episode_id) for episode_id in islice(summary.recent, max(0, args.traces))],
    )
    diagnosis = diagnose(evidence)
    print(diagnosis.model_dump_json() if args.json else diagnosis_text(diagnosis, detail=args.detail))
    return 0
