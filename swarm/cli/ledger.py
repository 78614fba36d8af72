"""`swarm ledger`: shows the outcome of each episode, page by page or, with --summary, why the run didn't learn."""

from __future__ import annotations

import argparse
import json
from itertools import islice

from foundation.commandline import UsageError
from swarm.cli.diagnosis import Evidence, diagnose, diagnosis_text
from swarm.cli.options import choice, connect
from swarm.cli.trace import entry_line
from swarm.client.sync import SwarmClient
from swarm.protocol.episodes import Cause, DropReason, EpisodeState
from swarm.protocol.summary import LedgerFields


def show_ledger(args: argparse.Namespace) -> int:
    """Print one line per episode, or a summary."""
    wanted: LedgerFields = {
        "run_id": args.run_id,
        "step": args.step,
        "client_id": args.client_id,
        "task_id": args.task_id,
        "kind": args.kind,
        "mix": args.mix,
        "reason": choice(DropReason, "--reason", args.reason),
        "cause": choice(Cause, "--cause", args.cause),
        "state": choice(EpisodeState, "--state", args.state),
    }
    for option, value, least in (("--limit", args.limit, 1), ("--step", args.step, 0)):
        if value is not None and value < least:
            raise UsageError(f"{option} must be at least {least}, got {value}")
    with connect(args) as swarm:
        if args.summary:
            return _show_summary(swarm, wanted, args)
        return _show_entries(swarm, wanted, args)


def _show_entries(swarm: SwarmClient, wanted: LedgerFields, args: argparse.Namespace) -> int:
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


def _show_summary(swarm: SwarmClient, wanted: LedgerFields, args: argparse.Namespace) -> int:
    if wanted["run_id"] is None:
        wanted["run_id"] = swarm.status().latest_run_id
    run_id = wanted["run_id"]
    summary = swarm.summary(**wanted)
    evidence = Evidence(
        summary=summary,
        run=None if run_id is None else swarm.run(run_id),
        traces=[swarm.trace(episode_id) for episode_id in islice(summary.recent, max(0, args.traces))],
    )
    diagnosis = diagnose(evidence)
    print(diagnosis.model_dump_json() if args.json else diagnosis_text(diagnosis, detail=args.detail))
    return 0
