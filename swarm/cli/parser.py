"""The options of every `swarm` command except `serve`.

Each command names its function, which is imported only when the command runs. This module imports nothing slow, so that `--help` is
instant.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from foundation.arguments import count, number, seconds, whole
from foundation.arguments import port as port_number

DEFAULT_URL = "http://127.0.0.1:8642"
NEWEST_RUN = "default: the server's newest run"
_TASK = "the task's id; episodes with the same id are compared with each other"
_KIND = "eval episodes are not trained on (default train)"
_MIX = "the task's family, if the run has a mix"
_VERSION = "version of the client's code; episodes are only compared within a version (default 0)"
_IDLE = "seconds without a call after which the lease expires (default 240)"
RUN_AT = "STEP is the step of an existing checkpoint, 0 (the hosted model) or 'best'"
SCORER_S = 60.0
TRACES_READ = 20
JOIN_MODES = {
    "judge": "compare two of the model's answers: the better one gets 1, the other 0",
    "play": "play the agent: accept, edit or replace the model's draft of each turn",
    "talk": "play the model's user and its tools, and give the reward at the end",
}
_Commands = Any  # argparse has no public name for this type


def add_commands(commands: _Commands) -> None:
    """Add all commands. Each sets `run` to the `module:function` that carries it out and returns an exit code."""
    _run(commands)
    _episode(commands)
    _try(commands)
    _join(commands)
    _top(commands)
    _trace(commands)
    _ledger(commands)
    _models(commands)
    _chat(commands)
    _replay(commands)
    _algorithm(commands)


def _group(commands: _Commands, name: str, text: str, metavar: str = "COMMAND", **more: Any) -> _Commands:
    group = commands.add_parser(name, help=text, **{"description": _sentence(text), **more})
    return group.add_subparsers(dest=f"{name}_command", required=True, metavar=metavar)


def _add(commands: _Commands, name: str, run: str, text: str, **more: Any) -> argparse.ArgumentParser:
    made = commands.add_parser(name, help=text, **{"description": _sentence(text), **more})
    parser: argparse.ArgumentParser = made
    parser.set_defaults(run=f"swarm.cli.{run}")
    return parser


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _add_connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help=f"the server (default: SWARM_URL, else {DEFAULT_URL})")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the server's token (default: SWARM_TOKEN, if set)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_task(parser: argparse.ArgumentParser, *, required: bool, default_id: str) -> None:
    text = "the task's query; or a task {id, query, metadata} as JSON, or in @FILE"
    parser.add_argument("--task", required=required, metavar="QUERY", help=text)
    parser.add_argument("--task-id", metavar="ID", help=f"default: {default_id}")
    parser.add_argument("--metadata", metavar="JSON", help="the task's metadata")
    parser.set_defaults(default_task_id=default_id)


def _add_state_dir(parser: argparse.ArgumentParser) -> None:
    text = "state directory given to `swarm serve` (default: search those of all servers that were given none)"
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help=text)
    text = "the model that the server hosted, if its folder has been moved since"
    parser.add_argument("--model", metavar="NAME_OR_PATH", help=text)


def _add_repeatable(parser: argparse.ArgumentParser, option: str, metavar: str, text: str, type: Any = str) -> None:
    parser.add_argument(
        option, action="append", default=[], type=type, metavar=metavar, help=f"{text}; repeatable".removeprefix("; ")
    )


# -- runs -----------------------------------------------------------------------------------------------------------------


def _run(commands: _Commands) -> None:
    run = _group(commands, "run", "start, watch, change and stop a training run")
    start = _add(run, "start", "runs:start_run", "start a run")
    start.add_argument("spec", nargs="?", metavar="SPEC", help="a RunSpec as .json or .toml, or - for standard input")
    _add_repeatable(start, "--set", "PATH=VALUE", "as in optimizer.learning_rate=4e-5")
    start.add_argument(
        "--key", help="idempotency key: the same key and spec return the same run, as long as it is not over"
    )
    start.add_argument("--watch", action="store_true", help="follow the run until it ends")
    status = _add(run, "status", "runs:show_status", "how the server and its run are doing")
    status.add_argument("run_id", nargs="?", metavar="RUN", help=NEWEST_RUN)
    status.add_argument("--since-step", type=int, default=0, metavar="N", help="show the steps after this one")
    status.add_argument("--watch", action="store_true", help="follow the run until it ends")
    patch = _add(run, "patch", "runs:patch_run", "change tunable fields during the run")
    patch.add_argument("patch", nargs="?", metavar="PATCH", help="a merge patch as .json or .toml, or -")
    patch.add_argument("--run-id", metavar="RUN", help=NEWEST_RUN)
    patch.add_argument(
        "--if-version", type=int, metavar="N", help="apply the patch only if the config version is still N"
    )
    _add_repeatable(patch, "--set", "PATH=VALUE", "as in optimizer.learning_rate=4e-5")
    stop = _add(run, "stop", "runs:stop_run", "drain, checkpoint and go idle")
    stop.add_argument("run_id", nargs="?", metavar="RUN", help=NEWEST_RUN)
    stop.add_argument("--wait", action="store_true", help="return only when the run has ended")
    checkpoint = _add(run, "checkpoint", "runs:write_checkpoint", "write a full checkpoint now")
    checkpoint.add_argument("run_id", nargs="?", metavar="RUN", help=NEWEST_RUN)
    restore = _add(run, "restore", "runs:restore_run", "restore a checkpoint on a new branch of the run")
    restore.add_argument(
        "step", type=whole(0), metavar="STEP", help="step of an existing checkpoint; 0 is the hosted model"
    )
    restore.add_argument("--run-id", metavar="RUN", help="default: the run in progress")
    quarantine = _add(run, "quarantine", "runs:quarantine_version", "exclude a client version from training")
    quarantine.add_argument("client_version", metavar="VERSION", help="the client_version that clients send")
    quarantine.add_argument("--reason", default="", help="shown in the ledger and to its clients")
    quarantine.add_argument("--lift", action="store_true", help="admit the version again")
    quarantine.add_argument("--run-id", metavar="RUN", help=NEWEST_RUN)
    for command in (start, patch):
        command.set_defaults(exit_code="swarm.cli.runs:exit_code")
    for command in run.choices.values():
        _add_connection(command)


# -- episodes -------------------------------------------------------------------------------------------------------------


def _episode(commands: _Commands) -> None:
    episode = _group(
        commands,
        "episode",
        "claim, end, abort and renew episodes: JSON in and out",
        epilog="Exit codes: 0 done, 1 failed, 2 bad usage, 3 the run is over, 4 not now (try again), 5 the lease is lost.",
    )
    _episode_run(episode)
    claim = _add(
        episode,
        "claim",
        "episodes:claim_episode",
        "claim an attempt at a task; prints the episode, lease, base_url and api_key",
    )
    claim.add_argument("claim", nargs="?", metavar="CLAIM", help="a claim as .json or .toml, or -")
    claim.add_argument("--task", metavar="ID", help=_TASK)
    claim.add_argument("--run-id", metavar="RUN", help=NEWEST_RUN)
    claim.add_argument("--kind", choices=("train", "eval"), help=_KIND)
    claim.add_argument("--mix", help=_MIX)
    claim.add_argument("--client-id", help="default: SWARM_CLIENT_ID, else swarm-cli")
    claim.add_argument("--client-version", help=_VERSION)
    claim.add_argument("--idle-limit-s", type=float, metavar="S", help=_IDLE)
    claim.add_argument("--max-episode-s", type=float, metavar="S", help="maximum duration of the episode")
    claim.add_argument("--wait-s", type=float, metavar="S", help="how long to wait for a busy server (default 30)")
    text = "print shell lines that export the model's address and key, and set but do not export SWARM_EPISODE and SWARM_LEASE"
    claim.add_argument("--export", action="store_true", help=text)
    end = _add(episode, "end", "episodes:end_episode", "report a reward; exit code 0 means that it is stored")
    abort = _add(episode, "abort", "episodes:abort_episode", "abort an episode; its slot is offered again")
    renew = _add(episode, "renew", "episodes:renew_episode", "extend a lease while the agent makes no calls")
    for command in (end, abort, renew):
        text = "file with the output of `claim`, or - for standard input (default: SWARM_EPISODE and SWARM_LEASE)"
        command.add_argument("grant", nargs="?", metavar="GRANT", help=text)
    end.add_argument("--reward", type=float, metavar="R", help="any finite number; required unless GRANT contains it")
    end.add_argument("--success", choices=("true", "false"), help="whether the task was solved, for success rates")
    _add_repeatable(end, "--metric", "NAME=VALUE", "a number to keep with the episode")
    _add_repeatable(end, "--agent-reward", "AGENT=R", "the reward of one of several agents")
    end.add_argument("--metadata", metavar="JSON", help="an object to keep with the episode")
    text = "how the agent recovered from a call that failed on the server; the episode then counts"
    end.add_argument("--despite", metavar="HOW", help=text)
    abort.add_argument("--reason", required=True, help="kept in the ledger")
    text = "who is to blame: server, network, client, rollout (default), grader, limit or person"
    abort.add_argument("--cause", help=text)
    resolve = _add(
        episode,
        "resolve",
        "episodes:resolve_episode",
        "settle a prepared episode whose decider is gone (needs the admin token)",
    )
    resolve.add_argument("episode", metavar="EPISODE", help="the episode's id")
    resolve.add_argument("--outcome", choices=("committed", "aborted"), required=True)
    resolve.add_argument("--reason", required=True, help="kept in the ledger")
    for command in episode.choices.values():
        _add_connection(command)
        command.set_defaults(exit_code="swarm.cli.episodes:exit_code")


def _episode_run(commands: _Commands) -> None:
    run = _add(
        commands,
        "run",
        "episode_run:run_episode",
        "claim an episode, run an agent in it, score its answer and end it",
        epilog="Exit codes: 0 the reward is stored, 1 failed, 2 bad usage, 3 the run is over, 4 not now (server or network; "
        "try again), 5 the lease is lost, 6 the attempt was lost because of the agent, the scorer or a time limit, 130 interrupted.",
    )
    run.add_argument(
        "agent", nargs="*", metavar="-- COMMAND", help="the agent's command; its standard output is the answer"
    )
    run.add_argument("--task", metavar="ID", help=_TASK)
    run.add_argument(
        "--scorer",
        metavar="COMMAND",
        help="program that reads the answer and prints a reward (or JSON) as its last line",
    )
    run.add_argument("--run-id", metavar="RUN", help=NEWEST_RUN)
    run.add_argument("--kind", choices=("train", "eval"), default="train", help=_KIND)
    run.add_argument("--mix", help=_MIX)
    run.add_argument("--client-id", help="default: SWARM_CLIENT_ID, else swarm-cli")
    run.add_argument("--client-version", default="0", help=_VERSION)
    run.add_argument("--idle-limit-s", type=seconds, default=240.0, metavar="S", help=_IDLE)
    text = "how long to wait for a busy server (default %(default)g)"
    run.add_argument("--wait-s", type=seconds, default=30.0, metavar="S", help=text)
    run.add_argument(
        "--query", default="", metavar="TEXT", help="the agent's standard input, and SWARM_QUERY of the scorer"
    )
    run.add_argument("--metadata", metavar="JSON", help="an object to keep with the episode")
    text = "how long the agent may run (default: the run's max_episode_s)"
    run.add_argument("--timeout", type=seconds, metavar="S", help=text)
    text = "how long the scorer may run (default %(default)g)"
    run.add_argument("--scorer-timeout", type=seconds, default=SCORER_S, metavar="S", help=text)
    _add_repeatable(run, "--env", "NAME", "pass this environment variable to the agent")
    _add_repeatable(run, "--scorer-env", "NAME", "pass this environment variable to the scorer")
    reads = "a path that the agent may read besides the system, its program and this folder"
    _add_repeatable(run, "--read", "PATH", reads, _path)
    _add_repeatable(run, "--write", "PATH", "a path that the agent may write besides its own home", _path)
    _add_repeatable(run, "--hide", "PATH", "a path that the agent may neither read nor write", _path)
    _add_repeatable(run, "--port", "N", "a TCP port that the agent may connect to", port_number)
    run.add_argument("--despite", metavar="WHY", help="count the episode even if calls failed on the server")
    text = "only clean the environment; do not restrict files, processes and ports"
    run.add_argument("--unconfined", action="store_true", help=text)


def _path(text: str) -> Path:
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text!r} does not exist")
    return Path(text)


def _try(commands: _Commands) -> None:
    parser = _add(commands, "try", "attempt:try_rollout", "run a rollout once, without training")
    text = "or path/to/file.py:function; a plain or async function of (episode, task)"
    parser.add_argument("rollout", metavar="MODULE:FUNCTION", help=text)
    _add_task(parser, required=True, default_id="try")
    parser.add_argument(
        "--temperature", type=float, help="temperature in the episode's `sampling` (default: the run's)"
    )
    _add_connection(parser)


def _join(commands: _Commands) -> None:
    modes = _group(commands, "join", "take part yourself: judge, play the agent, or talk to the model", metavar="MODE")
    for mode, text in JOIN_MODES.items():
        parser = _add(modes, mode, "join:join_run", text, description=f"{_sentence(text)} See docs/guides/people.md.")
        if mode != "talk":
            text = "a study's workflow.py, or FILE.py:ROLLOUT with --task"
            parser.add_argument("workflow", nargs="?", metavar="WORKFLOW", help=text)
        _add_task(parser, required=mode == "talk", default_id="join")
        parser.add_argument(
            "--tasks", type=int, default=1, metavar="N", help="number of the workflow's tasks to play (default 1)"
        )
        parser.add_argument("--seed", type=int, default=0, help="seed for the workflow's tasks")
        what = "pairs" if mode == "judge" else "episodes"
        parser.add_argument(
            "--times", type=int, metavar="N", help=f"{what} per task (default: as many as fill a group)"
        )
        parser.add_argument("--run-id", metavar="RUN", help=NEWEST_RUN)
        parser.add_argument("--mix", help=_MIX)
        parser.add_argument("--client-id", help="default: SWARM_CLIENT_ID, else join-MODE")
        text = "version of the client; episodes are only compared within a version (default: join-MODE)"
        parser.add_argument("--client-version", help=text)
        text = "maximum duration of an episode, so that others do not wait for you forever (default 300)"
        parser.add_argument("--max-episode-s", type=float, default=300.0, metavar="S", help=text)
        _add_connection(parser)
        parser.set_defaults(mode=mode)
    play = modes.choices["play"]
    play.add_argument(
        "--by-hand", action="store_true", help="answer without drafts, in an eval episode that trains nothing"
    )
    play.add_argument(
        "--ask-reward", action="store_true", help="give the reward yourself instead of using the workflow's"
    )
    text = "reward of drafts that you refuse (default 0)"
    play.add_argument("--refused-reward", type=float, default=0.0, metavar="R", help=text)


# -- looking at servers and records ---------------------------------------------------------------------------------------


def _top(commands: _Commands) -> None:
    parser = _add(commands, "top", "top:watch_servers", "watch servers: pool, clients, rates, errors, learning curve")
    parser.add_argument("urls", nargs="*", metavar="URL", help="servers (default: --url, SWARM_URL, or this machine's)")
    parser.add_argument("--once", action="store_true", help="print their state once, as text or with --json, and exit")
    _add_connection(parser)


def _trace(commands: _Commands) -> None:
    parser = _add(commands, "trace", "trace:show_trace", "show every LLM call of an episode, token by token")
    parser.add_argument("episode_id", metavar="EPISODE", help="the episode's id, as `swarm ledger` shows it")
    parser.add_argument("--messages", action="store_true", help="show messages instead of tokens")
    parser.add_argument(
        "--whole", action="store_true", help="show prompts in full even if they continue an earlier call"
    )
    parser.add_argument(
        "--logprobs", action="store_true", help="list the sampled tokens with log-probability and step of the weights"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained HTML page instead")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    _add_connection(parser)


def _ledger(commands: _Commands) -> None:
    text = "show what became of each episode and why, or totals with --summary"
    parser = _add(commands, "ledger", "ledger:show_ledger", text)
    for option, metavar, text in (
        ("--run-id", "RUN", "only episodes of this run"),
        ("--client-id", "CLIENT", "only episodes of this client"),
        ("--task-id", "TASK", "only episodes of this task"),
        ("--mix", "MIX", "only episodes of this family of tasks"),
        ("--reason", "REASON", "only episodes dropped for this reason"),
        (
            "--cause",
            "CAUSE",
            "only episodes lost because of: server, network, client, rollout, grader, limit or person",
        ),
        ("--state", "STATE", "only episodes in this state: running, prepared, ended, in_step, trained or dropped"),
    ):
        parser.add_argument(option, metavar=metavar, help=text)
    parser.add_argument("--kind", choices=("train", "eval"))
    parser.add_argument("--step", type=int, metavar="N", help="only episodes trained in this step")
    parser.add_argument("--limit", type=int, metavar="N", help="print at most this many, and the NEXT for --after")
    parser.add_argument("--after", metavar="NEXT", help="continue where a page ended")
    parser.add_argument("--detail", action="store_true", help="show tracebacks and last words too")
    parser.add_argument(
        "--summary", action="store_true", help="explain why the run didn't learn (default run: the server's newest)"
    )
    text = "with --summary: number of the newest traces to search for forks (default %(default)s)"
    parser.add_argument("--traces", type=int, default=TRACES_READ, metavar="N", help=text)
    _add_connection(parser)


# -- models and stored runs, without a server -----------------------------------------------------------------------------


def _models(commands: _Commands) -> None:
    models = _group(commands, "models", "fetch, list and export models")
    get = _add(
        models, "get", "models:get_model", "fetch a model into the cache unless it is there, and print its folder"
    )
    get.add_argument("name", metavar="NAME", help="smollm2-135m, smollm2-81m, a hub name OWNER/NAME, or a folder")
    listing = _add(models, "list", "models:list_models", "list the cached models and the known names")
    export = _add(models, "export", "stored_runs:export_run", "write a checkpoint of a run as a Hugging Face folder")
    export.add_argument("run_at", metavar="RUN[@STEP]", help=RUN_AT)
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")
    text = "write only the adapter, for peft and vLLM (default: merged into the model)"
    export.add_argument("--adapter", action="store_true", help=text)
    _add_state_dir(export)
    for command in (get, listing, export):
        command.add_argument("--json", action="store_true", help="print JSON")


def _chat(commands: _Commands) -> None:
    text = "Talk to a checkpoint of a run, on this machine's CPU. An empty line or Ctrl-D ends it."
    chat = _add(commands, "chat", "stored_runs:chat_with", "talk to a checkpoint of a run", description=text)
    chat.add_argument("run_at", metavar="RUN[@STEP]", help=RUN_AT)
    chat.add_argument("--once", metavar="TEXT", help="say this, print the answer, and exit")
    chat.add_argument("--system", metavar="TEXT", help="a system message to start with")
    chat.add_argument("--temperature", type=_at_least_zero, metavar="T", help="default: the run's; 0 is greedy")
    chat.add_argument(
        "--max-tokens", type=count, metavar="N", help="maximum length of each answer (default: the run's)"
    )
    text = "the same seed gives the same answers (default 0)"
    chat.add_argument("--seed", type=int, default=0, metavar="N", help=text)
    _add_state_dir(chat)
    chat.add_argument("--json", action="store_true", help="with --once: print JSON")


def _at_least_zero(text: str) -> float:
    temperature = number(text)
    if not 0 <= temperature < float("inf"):
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return temperature


def _replay(commands: _Commands) -> None:
    replay = _add(
        commands,
        "replay",
        "replay:replay_run",
        "train the recorded steps of a run again, without an engine",
        description="Train the recorded steps of a run again, from its server's records, without sampling anything. Prints a "
        "JSON line per step with its metrics and the SHA-256 of the weights after it. The same spec, seed and episodes "
        "give the same weights on the same machine and device. The run itself does not change.",
    )
    replay.add_argument("run_id", nargs="?", metavar="RUN", help=NEWEST_RUN)
    replay.add_argument("--from-step", type=int, default=0, metavar="N", help="start from this checkpoint (default: 0)")
    replay.add_argument("--steps", type=int, metavar="N", help="replay at most this many steps")
    replay.add_argument("--check", action="store_true", help="fail if an existing checkpoint has different weights")
    text = "allow executing the run's own algorithm functions"
    replay.add_argument("--allow-algorithms", action="store_true", help=text)
    text = "device to train on (default: the one that made the newest checkpoint, if this machine has it)"
    replay.add_argument("--device", choices=("cpu", "cuda"), help=text)
    _add_state_dir(replay)


# -- algorithms -----------------------------------------------------------------------------------------------------------


def _algorithm(commands: _Commands) -> None:
    algorithm = _group(commands, "algorithm", "check your own functions for an algorithm")
    check = _add(
        algorithm,
        "check",
        "algorithm:check_functions",
        "test functions on random tokens: shapes, masks, invariances, gradients",
        description="Test an advantage, a loss or an importance correction on random ragged batches of tokens. Prints a line per check; "
        "the exit code is 1 if one fails. This command executes the file.",
    )
    check.add_argument(
        "function", metavar="FILE[:NAME]", help="default NAME: every function whose name says what it is"
    )
    text = "kind of function (default: from its name, which ends with one of these, or with correction)"
    check.add_argument("--as", dest="role", choices=("advantage", "loss", "importance_correction"), help=text)
    text = "skip the comparison with finite differences, because the loss detaches a part of itself on purpose"
    check.add_argument("--detached", action="store_true", help=text)
    check.add_argument("--json", action="store_true", help="print JSON")
