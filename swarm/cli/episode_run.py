"""Options of `swarm episode run -- COMMAND`, which runs an untrusted program for one episode and scores it with another."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from foundation.arguments import port as port_number
from foundation.arguments import seconds
from foundation.commandline import UsageError

SCORER_S = 60.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The `run` command of `swarm episode`."""
    run = commands.add_parser(
        "run",
        help="claim an episode, run an agent in it, score its answer, end it",
        epilog="Exit codes: 0 the reward is stored, 1 failed, 2 not understood, 3 the run is over, 4 not now (server or network; "
        "try again), 5 the lease is gone, 6 agent, scorer or time limit lost the attempt, 130 interrupted.",
    )
    run.add_argument("agent", nargs="*", metavar="-- COMMAND", help="the agent; its standard output is its answer")
    run.add_argument("--task", metavar="ID")
    run.add_argument("--scorer", metavar="COMMAND", help="reads the answer, prints a reward (or JSON) as its last line")
    _add_claim_options(run)
    run.add_argument(
        "--query", default="", metavar="TEXT", help="the agent's standard input; SWARM_QUERY of the scorer"
    )
    run.add_argument("--metadata", metavar="JSON", help="an object to keep with the episode")
    run.add_argument(
        "--timeout", type=seconds, metavar="S", help="how long the agent may run (default: the run's max_episode_s)"
    )
    run.add_argument("--scorer-timeout", type=seconds, default=SCORER_S, metavar="S", help="default: %(default)g")
    for option, whose in (("--env", "the agent"), ("--scorer-env", "the scorer")):
        text = f"pass this environment variable to {whose}; repeatable"
        run.add_argument(option, action="append", default=[], metavar="NAME", help=text)
    for option, text in (
        ("--read", "what the agent may read besides the system, its program and this folder"),
        ("--write", "what the agent may write besides its own home"),
        ("--hide", "what the agent may neither read nor write"),
    ):
        run.add_argument(option, action="append", default=[], type=_path, metavar="PATH", help=f"{text}; repeatable")
    run.add_argument(
        "--port",
        action="append",
        default=[],
        type=port_number,
        metavar="N",
        help="a TCP port it may connect to; repeatable",
    )
    run.add_argument("--despite", metavar="WHY", help="count the episode even if calls failed on the server's side")
    run.add_argument(
        "--unconfined", action="store_true", help="only clean the environment; files, processes and ports stay open"
    )
    run.set_defaults(run=run_episode)


def _add_claim_options(run: argparse.ArgumentParser) -> None:
    run.add_argument("--run-id", metavar="RUN", help="default: the server's current run")
    run.add_argument("--kind", choices=("train", "eval"), default="train")
    run.add_argument("--mix")
    run.add_argument("--client-id", help="default: SWARM_CLIENT_ID, else swarm-cli")
    run.add_argument("--client-version", default="0")
    run.add_argument("--idle-limit-s", type=seconds, default=240.0, metavar="S")
    run.add_argument(
        "--wait-s", type=seconds, default=30.0, metavar="S", help="for a server that is busy (default %(default)g)"
    )


def run_episode(args: argparse.Namespace) -> int:
    """Play one episode, and say what became of it."""
    import asyncio

    from foundation.confinement import adopt_orphans, hide_memory
    from swarm.cli.episode_runner import Runner

    if not args.task:
        raise UsageError("which task? give --task ID")
    if not args.agent:
        raise UsageError(
            "which agent? give its command behind --: swarm episode run --task ID --scorer COMMAND -- COMMAND"
        )
    if not args.scorer:
        raise UsageError("who scores it? give --scorer COMMAND: an agent does not report its own reward")
    hide_memory()
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as place:
        attempt = asyncio.run(Runner(args, Path(place).resolve()).run())
    print(json.dumps(attempt.document()))
    return attempt.exit_code


def _path(text: str) -> Path:
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"there is no {text!r}")
    return Path(text)
