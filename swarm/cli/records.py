"""`swarm trace` and `swarm ledger`: what was recorded, and what became of it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from swarm.cli import connection

if TYPE_CHECKING:
    from swarm.protocol.episodes import EpisodeTrace, LedgerEntry, RecordedCall

LONGEST_LINE = 2_000


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The `trace` and `ledger` commands."""
    trace = subparsers.add_parser("trace", help="every LLM call of an episode")
    trace.add_argument("episode_id", metavar="EPISODE")
    connection.add_options(trace)
    trace.set_defaults(run=show_trace)
    ledger = subparsers.add_parser("ledger", help="what became of each episode, and why")
    for option, text in (
        ("--run-id", "of this run"),
        ("--client-id", "of this client"),
        ("--task-id", "of this task"),
        ("--reason", "dropped for this reason"),
        ("--state", "running, ended, in_step, trained or dropped"),
    ):
        ledger.add_argument(option, help=text)
    ledger.add_argument("--kind", choices=("train", "eval"))
    ledger.add_argument("--step", type=int, help="trained in this step")
    connection.add_options(ledger)
    ledger.set_defaults(run=show_ledger)


def show_trace(args: argparse.Namespace) -> int:
    """Print an episode call by call."""
    with connection.connect(args) as swarm:
        trace = swarm.trace(args.episode_id)
    print(trace.model_dump_json() if args.json else trace_text(trace))
    return 0


def show_ledger(args: argparse.Namespace) -> int:
    """Print one line per episode."""
    from swarm.cli.documents import choice
    from swarm.protocol.episodes import DropReason, EpisodeState

    reason, state = choice(DropReason, "--reason", args.reason), choice(EpisodeState, "--state", args.state)
    with connection.connect(args) as swarm:
        for entry in swarm.ledger(
            run_id=args.run_id,
            step=args.step,
            client_id=args.client_id,
            task_id=args.task_id,
            kind=args.kind,
            reason=reason,
            state=state,
        ):
            print(entry.model_dump_json() if args.json else entry_line(entry))
    return 0


def entry_line(entry: LedgerEntry) -> str:
    """One episode in one line."""
    fate = entry.state if entry.step is None else f"{entry.state} at step {entry.step}"
    why = "" if entry.reason is None else f" ({entry.reason})"
    reward = "-" if entry.reward is None else f"{entry.reward:g}"
    return f"{entry.episode_id}  {entry.kind}  task {entry.task_id}  reward {reward}  {entry.calls} calls  {fate}{why}"


def trace_text(trace: EpisodeTrace) -> str:
    """An episode as a person reads it."""
    lines = [entry_line(trace.entry)]
    if trace.entry.detail:
        lines.append(f"  {trace.entry.detail}")
    for call in trace.calls:
        lines += ["", _call_heading(call)]
        lines += [f"  {message_line(message)}" for message in call.request.get("messages", [])]
        for choice in call.answer.get("choices", []):
            lines.append(f"  → {message_line(choice.get('message') or {'content': choice.get('text')})}")
    return "\n".join(lines)


def message_line(message: dict[str, Any]) -> str:
    """A chat message in one line, tool calls included."""
    parts = [str(message.get("role", "answer")) + ":"]
    if message.get("content"):
        parts.append(json.dumps(message["content"], ensure_ascii=False))
    for call in message.get("tool_calls") or []:
        function = call.get("function", {})
        parts.append(f"{function.get('name')}({function.get('arguments')})")
    return " ".join(parts)[:LONGEST_LINE]


def _call_heading(call: RecordedCall) -> str:
    versions = sorted({span.version.step for span in call.versions})
    steps = ", ".join(map(str, versions)) or "?"
    fork = f", forked ({call.fork_cause})" if call.fork_cause else ""
    agent = f" by {call.agent}" if call.agent else ""
    return (
        f"call {call.index}{agent}: {len(call.prompt_ids)} prompt tokens, {len(call.sampled_ids)} sampled at temperature "
        f"{call.sampling.temperature:g}, weights of step {steps}, {call.latency_s:.2f} s, {call.finish_reason}{fork}"
    )
