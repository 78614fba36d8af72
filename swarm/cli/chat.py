"""`swarm chat`: talk to a checkpoint of a run, in this process, without a server."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from foundation.arguments import count, number
from foundation.commandline import UsageError
from swarm.cli import stored_run

if TYPE_CHECKING:
    from swarm.engine.local.trained_model import Chat


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The `chat` command."""
    chat = subparsers.add_parser(
        "chat",
        help="talk to a checkpoint of a run",
        description="Talk to a checkpoint of a run, on this machine's processor. An empty line or Ctrl-D ends it.",
    )
    chat.add_argument("run_at", metavar="RUN[@STEP]", help="STEP: a kept checkpoint, 0 (the hosted model) or 'best'")
    chat.add_argument("--once", metavar="TEXT", help="say this, print the answer, and end")
    chat.add_argument("--system", metavar="TEXT", help="a system message before everything")
    chat.add_argument("--temperature", type=_at_least_zero, metavar="T", help="default: the run's; 0 is greedy")
    chat.add_argument("--max-tokens", type=count, metavar="N", help="of each answer (default: the run's)")
    chat.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed says the same (default 0)")
    stored_run.add_options(chat)
    chat.add_argument("--json", action="store_true", help="with --once: answer as JSON")
    chat.set_defaults(run=talk_to)


def talk_to(args: argparse.Namespace) -> int:
    """One answer, or a conversation until the person ends it."""
    if args.json and args.once is None:
        raise UsageError("--json goes with --once")
    run_id, wanted = stored_run.split(args.run_at)
    run = stored_run.find(args, run_id)
    step = run.step_called(wanted)
    from swarm.engine.local.trained_model import Chat

    chat = Chat.with_checkpoint(
        run.model,
        run.checkpoint(step),
        system=args.system,
        temperature=run.spec.sampling.temperature if args.temperature is None else args.temperature,
        max_tokens=args.max_tokens or run.spec.sampling.max_tokens,
        seed=args.seed,
    )
    if args.once is None:
        return _converse(chat, f"{run.row.run_id}@{step}")
    if args.json:
        answer = "".join(chat.answer(args.once))
        print(json.dumps({"run_id": run.row.run_id, "step": step, "answer": answer}))
    else:
        _say(chat, args.once)
    return 0


def _converse(chat: Chat, name: str) -> int:
    prompt = "> " if sys.stdin.isatty() else ""
    print(f"{name}; an empty line ends the conversation", file=sys.stderr)
    while True:
        try:
            said = input(prompt).strip()
        except EOFError:
            return 0
        if not said:
            return 0
        _say(chat, said)


def _say(chat: Chat, said: str) -> None:
    """Print the answer as it comes."""
    for piece in chat.answer(said):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _at_least_zero(text: str) -> float:
    temperature = number(text)
    if not 0 <= temperature < float("inf"):
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return temperature
