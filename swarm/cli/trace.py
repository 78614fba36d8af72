"""`swarm trace EPISODE`: every call of an episode, token by token, in the terminal or as one HTML file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundation.commandline import UsageError
from foundation.streams import one_line, printable
from swarm.cli import connection

if TYPE_CHECKING:
    from swarm.cli.trace_view import CallView, TokenView
    from swarm.protocol.episodes import EpisodeTrace, LedgerEntry

LONGEST_LINE = 2_000
_COLOURS = {"prompt": "2", "echoed": "36", "trained": "1;32", "untrained": "33"}
_MARKS = {"prompt": ("", ""), "echoed": ("", ""), "trained": ("⟦", "⟧"), "untrained": ("⟨", "⟩")}
_LEGEND = {
    "trained": "sampled here, carries loss",
    "untrained": "sampled here, carries none",
    "echoed": "sampled by an earlier call",
    "prompt": "written, not sampled",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The `trace` command."""
    parser = subparsers.add_parser("trace", help="every LLM call of an episode, token by token")
    parser.add_argument("episode_id", metavar="EPISODE")
    parser.add_argument("--messages", action="store_true", help="messages instead of tokens")
    parser.add_argument("--whole", action="store_true", help="show prompts again that continue an earlier call")
    parser.add_argument("--logprobs", action="store_true", help="list the sampled tokens with logprob and weights")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page instead")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    connection.add_options(parser)
    parser.set_defaults(run=show_trace)


def show_trace(args: argparse.Namespace) -> int:
    """Print an episode call by call."""
    with connection.connect(args) as swarm:
        trace = swarm.trace(args.episode_id, text=True)
    if args.html is not None:
        _write_page(trace, args.html)
        print(json.dumps({"page": str(args.html)}) if args.json else f"{args.html} shows episode {args.episode_id}")
    elif args.json:
        print(trace.model_dump_json())
    elif args.messages:
        print(trace_text(trace))
    else:
        print(tokens_text(trace, colour=_wants_colour(args.color), whole=args.whole, logprobs=args.logprobs))
    return 0


def _write_page(trace: EpisodeTrace, path: Path) -> None:
    from swarm.cli.trace_page import page

    try:
        path.write_text(page(trace), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _wants_colour(choice: str) -> bool:
    return choice == "always" or (choice == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


def entry_line(entry: LedgerEntry) -> str:
    """One episode in one line."""
    fate = entry.state if entry.step is None else f"{entry.state} at step {entry.step}"
    by = "" if entry.cause is None else f", lost by {entry.cause}"
    why = "" if entry.reason is None else f" ({entry.reason}{by})"
    reward = "-" if entry.reward is None else f"{entry.reward:g}"
    return f"{entry.episode_id}  {entry.kind}  task {one_line(entry.task_id)}  reward {reward}  {entry.calls} calls  {fate}{why}"


def trace_text(trace: EpisodeTrace) -> str:
    """An episode as its agent saw it: messages."""
    from swarm.cli.trace_view import views

    lines = _opening(trace)
    for view in views(trace):
        lines += ["", call_line(view)]
        lines += [f"  {message_line(message)}" for message in view.call.request.get("messages") or ()]
        for choice in view.call.answer.get("choices") or ():
            lines.append(f"  → {message_line(choice.get('message') or {'content': choice.get('text')})}")
    return printable("\n".join(lines))


def tokens_text(trace: EpisodeTrace, *, colour: bool, whole: bool = False, logprobs: bool = False) -> str:
    """An episode as the model saw it: tokens, told apart by what they are to training."""
    from swarm.cli.trace_view import views

    lines = _opening(trace)
    for view in views(trace):
        lines += ["", call_line(view)]
        hidden = 0 if whole else view.inherited
        if hidden:
            lines.append(f"  … {hidden} tokens as in call {view.parent}")
        lines += [f"  {line}" for line in _painted(view.tokens[hidden:], colour=colour).split("\n")]
        if view.untrained:
            lines.append(f"  no loss on what it sampled: {view.untrained}")
        if logprobs:
            lines += [_token_line(token) for token in view.sampled]
    shown = ((kind, _painted_text(kind, kind, colour=colour)) for kind in _LEGEND)
    lines += ["", "  ".join(f"{word}: {_LEGEND[kind]}" for kind, word in shown if colour or any(_MARKS[kind]))]
    return "\n".join(lines)


def call_line(view: CallView) -> str:
    """What there is to know of a call beside its tokens."""
    call = view.call
    steps = ", ".join(map(str, view.steps)) or "?"
    fork = ""
    if view.fork is not None:
        where = "" if view.fork.call is None else f" after {view.fork.at} tokens of call {view.fork.call}"
        fork = f", forked{where} ({view.fork.cause})"
    agent = f" by {call.agent}" if call.agent else ""
    chance = f", mean logprob {sum(call.logprobs) / len(call.logprobs):.3f}" if call.logprobs else ""
    return (
        f"call {call.index}{agent}: {len(call.prompt_ids)} prompt tokens, {len(call.sampled_ids)} sampled at temperature "
        f"{call.sampling.temperature:g}{chance}, weights of step {steps}, {call.latency_s:.2f} s, "
        f"{call.finish_reason}{fork}"
    )


def message_line(message: dict[str, Any]) -> str:
    """A chat message in one line, tool calls included."""
    parts = [str(message.get("role", "answer")) + ":"]
    if message.get("content"):
        parts.append(json.dumps(message["content"], ensure_ascii=False))
    for call in message.get("tool_calls") or []:
        function = call.get("function", {})
        parts.append(f"{function.get('name')}({function.get('arguments')})")
    return " ".join(parts)[:LONGEST_LINE]


def _opening(trace: EpisodeTrace) -> list[str]:
    lines = [entry_line(trace.entry)]
    if trace.entry.detail:
        lines += [f"  {printable(line)}" for line in trace.entry.detail.splitlines()]
    if trace.entry.calls and not trace.calls:
        lines.append("  its calls were freed; only their number is kept")
    return lines


def _painted(tokens: list[TokenView], *, colour: bool) -> str:
    runs = groupby(tokens, lambda token: token.origin)
    return "".join(_painted_text(origin, "".join(token.text for token in run), colour=colour) for origin, run in runs)


def _painted_text(origin: str, text: str, *, colour: bool) -> str:
    text = printable(text)
    if colour:
        return "\n".join(f"\x1b[{_COLOURS[origin]}m{line}\x1b[0m" for line in text.split("\n"))
    opening, closing = _MARKS[origin]
    return f"{opening}{text}{closing}"


def _token_line(token: TokenView) -> str:
    logprob = "-" if token.logprob is None else f"{token.logprob:.4f}"
    return f"    {json.dumps(token.text, ensure_ascii=False):<16} id {token.token_id:<8} logprob {logprob:>9}  step {token.step}"
