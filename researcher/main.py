"""The `researcher` command: start here. Parses arguments and dispatches; heavy imports happen inside the command that needs them.

Exit codes: 0 done, 1 failed, 2 usage, 3 waiting for a person, 4 out of budget.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from foundation.arguments import count, number, port, said, whole
from foundation.commandline import Parser
from foundation.imports import uncollected

LATEST = "latest"


def parser() -> Parser:
    """Return the parser of the whole command line. Imports no command."""
    root = Parser(
        prog="researcher", description="Turns a topic into an experiment, runs it, and reports what can be recomputed."
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_start(commands)
    for name, text in (
        ("list", "every study, newest first"),
        ("doctor", "is this machine fit to run studies?"),
    ):
        _json(commands.add_parser(name, help=text, description=text))
    for name, text in (
        ("status", "how a study is doing, and what happens next"),
        ("watch", "follow a study until it ends"),
        ("stop", "ask a study to stop at the next safe point"),
        ("pause", "pause a study: its running trials save a checkpoint and continue with `resume`"),
        ("approve", "approve what a study waits for"),
        ("reject", "reject what a study waits for, and say why"),
        ("amend", "make a new version of a plan before its first trial, and say why"),
        ("resume", "continue a study from where it stopped"),
        ("report", "write the report again from the records, and say where it is"),
        ("verify", "recompute every number of the report from SQL, offline"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("study", nargs="?", default=LATEST, help="an id, its beginning, or `latest` (default)")
        _json(command)
        if name in ("approve", "reject", "amend"):
            because = command.add_argument("--because", "--reason", type=said, metavar="TEXT", help="your reason")
            because.required = name != "approve"
        if name in ("approve", "reject"):
            command.add_argument(
                "--gate",
                metavar="NAME",
                help="answer only at this gate, such as plan/1 (`status` names it): refused if the study now waits at another",
            )
        if name == "amend":
            command.add_argument("--seeds", metavar="N", help="seeds per arm")
            command.add_argument("--budget", metavar="TIME", help="wall time such as 90m or 8h")
        if name == "resume":
            command.add_argument(
                "--server",
                action="append",
                default=[],
                metavar="URL",
                help="continue with this swarm server instead of those used so far; may be repeated (default: those used so far)",
            )
            command.add_argument(
                "--scheduled",
                action="store_true",
                help="resume as the daemon does: obey requests to stop or pause, and end when a window closes",
            )
    notify = commands.add_parser(
        "notify",
        help="test whether notices arrive",
        description="Send a test notice to the service whose apprise URL is in RESEARCHER_NOTIFY_NAME.",
    )
    notify.add_argument("name", metavar="NAME", help="as in a study file's `notify`, such as SLACK")
    _json(notify)
    _add_campaign(commands)
    _add_copy(commands)
    _add_archives(commands)
    _add_instruments(commands)
    _add_findings(commands)
    daemon = commands.add_parser(
        "daemon",
        help="run studies in the background",
        description="Continue every study that was started with --detach, in its windows, until interrupted.",
    )
    daemon.add_argument("--until-idle", action="store_true", help="exit when no study is left to continue")
    _json(daemon)
    show = commands.add_parser(
        "show", help="a plan or a trial in full", description="Show a study's plan, or one of its trials."
    )
    show.add_argument(
        "what",
        nargs="?",
        default=LATEST,
        help="a study (its plan) or a plan's hash, or a trial: STUDY/ARM/SEED, or its key as `status` prints it",
    )
    _json(show)
    _add_ui(commands)
    _add_mcp(commands)
    return root


def _add_start(commands: argparse._SubParsersAction[Parser]) -> None:
    start = commands.add_parser(
        "start",
        help="answer a question by experiment: a study file, a topic, or options",
        description="Run a study. The question comes from a study file, from a topic that a planner turns into one, or only from options "
        "(--instrument NAME --vary FACTOR=A,B). Options edit the file and the planner's draft.",
    )
    _add_spec(start)
    _servers(start, several=True)
    start.add_argument(
        "--clients",
        default="local",
        metavar="local|ray|ray=http://HOST:8265",
        help="where the clients of trials run: as processes here, or as jobs on a Ray cluster (default: %(default)s)",
    )
    start.add_argument("--max-parallel", type=count, metavar="N", help="trials at once (default: one per server)")
    start.add_argument(
        "--repairs",
        type=whole(0),
        default=3,
        metavar="N",
        help="how often the planner LLM may repair the instrument's code when it fails (default: %(default)s; 0: never)",
    )
    start.add_argument(
        "--sink",
        action="append",
        default=[],
        choices=("tensorboard", "wandb"),
        help="copy the records there too, in addition to MLflow; may be repeated",
    )
    start.add_argument(
        "--keep-models",
        action="store_true",
        help="save each trial's trained model as a Hugging Face folder (0.5 GB each for a model with 135 M weights)",
    )
    start.add_argument("--detach", action="store_true", help="let the daemon run the study, and return immediately")
    start.add_argument(
        "--again",
        action="store_true",
        help="start it even if the same study is already running",
    )
    start.add_argument(
        "--dry-run", action="store_true", help="show the spec, the plan and its price; run nothing, record nothing"
    )
    _json(start)
    calibrate = commands.add_parser(
        "calibrate",
        help="time a short trial on this machine or a server, to price studies",
        description="Run a trial of three steps on a server started here or on the given ones, and use its speed to price studies with the "
        "same models, tasks and call lengths. A study file, or options like those of `start`, describe the trial.",
    )
    _add_file(calibrate)
    _add_arms(
        calibrate.add_argument_group("the study", "each option sets the field of the same name in the study file")
    )
    calibrate.set_defaults(
        **dict.fromkeys(("secondary", "window", "answer"), ()),
        **dict.fromkeys(
            ("topic", "metric", "claim", "margin", "seeds", "first_seed", "heldout_every", "looks", "fine")
        ),
        **dict.fromkeys(("steps", "budget", "tokens", "days", "approve")),
    )  # fields of a study that decide nothing about one trial
    _servers(calibrate, several=True)
    _json(calibrate)
    draft = commands.add_parser(
        "draft",
        help="write the study file for a topic or options, and run nothing",
        description="Write the study file for a topic or options, with comments that say where each setting came from.",
    )
    _add_spec(draft)
    draft.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: standard output)")
    draft.add_argument("--force", action="store_true", help="overwrite an existing file")
    _json(draft)
    text = "the JSON Schema of study files, or of a campaign's goal files: every field, for editors and agents"
    schema = commands.add_parser("schema", help=text, description=f"Print {text}.")
    schema.add_argument(
        "--campaign", action="store_true", help="the schema of goal files, for `researcher campaign start`"
    )
    _json(schema)


def _add_campaign(commands: argparse._SubParsersAction[Parser]) -> None:
    campaign = commands.add_parser(
        "campaign",
        help="a program of studies toward a goal: it decides by itself what to ask next",
        description="Pursue a goal through several studies, for hours or days: screen, search, confirm, conclude.",
    )
    actions = campaign.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "begin one from a goal file or a topic"
    start = actions.add_parser("start", help=text, description=f"{text[0].upper()}{text[1:]}.")
    start.add_argument("file", nargs="?", metavar="GOAL", help="a goal file, YAML or TOML")
    _add_topic(start)
    start.add_argument(
        "--instrument",
        action="append",
        default=[],
        dest="instruments",
        metavar="NAME|DIR",
        help="the environment for the topic's studies; repeat it to study several",
    )
    start.set_defaults(
        **dict.fromkeys(("model", "vary", "arm", "set", "secondary", "evaluate_on", "window"), ()),
        **dict.fromkeys(("instrument", "design", "metric", "claim", "margin", "steps", "looks", "fine", "approve")),
        **dict.fromkeys(("heldout_every", "seeds", "first_seed", "days", "budget", "tokens")),
    )  # fields of a study that this command does not ask for
    _servers(start)
    start.add_argument("--max-parallel", type=count, metavar="N", help="trials at once (default: one per server)")
    start.add_argument("--detach", action="store_true", help="let the daemon run it, and return immediately")
    start.add_argument(
        "--again",
        action="store_true",
        help="start it even if the same goal is already running",
    )
    start.add_argument(
        "--dry-run", action="store_true", help="show the goal, and the factors with their levels; run nothing"
    )
    _json(start)
    _json(actions.add_parser("list", help="every campaign, newest first", description="Every campaign, newest first."))
    for name, text in (
        ("status", "what it is doing, what it has found, how much budget is left and what that will buy"),
        ("watch", "follow it until it ends or waits"),
        ("tell", "give the next decision a message"),
        ("veto", "veto the waiting or running study, or an instrument that an LLM wrote, and say why"),
        ("approve", "approve what waits: a study, or an instrument that an LLM wrote"),
        ("amend", "change limits of the budget, and say why"),
        ("pause", "pause it and its study"),
        ("resume", "continue it from where it stopped"),
        ("stop", "ask it to stop at the next safe point"),
        ("report", "write the report again from the records, and say where it is"),
        ("verify", "rebuild the input of every decision, check every rule, and verify each study"),
        ("export", "write its records and reports into one file"),
    ):
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        action.add_argument("campaign", nargs="?", default=LATEST, help="an id, its beginning, or `latest` (default)")
        _json(action)
        if name == "tell":
            action.add_argument("words", type=said, metavar="TEXT", help="what to say")
            study = "fields of a study, YAML or TOML: the next decision runs it as an exploration"
            action.add_argument("--study", metavar="FILE", help=study)
            leave = "complete comma-separated list of factors to keep as they are from now on; '' lets every factor vary again"
            action.add_argument("--leave", metavar="FACTORS", help=leave)
        if name in ("veto", "approve", "amend"):
            because = action.add_argument("--because", "--reason", type=said, metavar="TEXT", help="your reason")
            because.required = name != "approve"
        if name in ("veto", "approve"):
            action.add_argument(
                "--decision",
                type=count,
                metavar="N",
                help="answer only decision N (`status` numbers them): refused if the campaign has decided again",
            )
        if name == "amend":
            action.add_argument("--budget", metavar="TIME", help="wall time of all studies together, such as 90m or 8h")
            action.add_argument("--trials", type=count, metavar="N", help="trials of all studies together")
            action.add_argument(
                "--tokens", type=count, metavar="N", help="tokens of agents' calls in all studies together"
            )
            action.add_argument("--llm-tokens", type=count, metavar="N", help="tokens of the strategist's LLM")
            action.add_argument("--money", type=number, metavar="X", help="cost of LLM calls")
        if name == "resume":
            action.add_argument(
                "--scheduled",
                action="store_true",
                help="resume as the daemon does: obey requests, and end when a window closes",
            )
        if name == "export":
            action.add_argument("--to", metavar="FILE", help="default: CAMPAIGN.tar.gz here")
            action.add_argument("--force", action="store_true", help="overwrite an existing file")


def _add_topic(command: Parser) -> None:
    """Add the topic and the choice of planner."""
    command.add_argument(
        "--topic", metavar="TEXT|@FILE", help="the question in words, or @ and the name of a file with it"
    )
    command.add_argument(
        "--planner",
        choices=("auto", "llm", "builtin"),
        default="auto",
        help="what reads the topic; auto: the LLM where one is configured, else builtin (default)",
    )
    command.add_argument(
        "--answer",
        action="append",
        default=[],
        type=said,
        metavar="TEXT",
        help="answer to the planner's question; may be repeated",
    )


def _add_spec(command: Parser) -> None:
    """Add the source of the question, and the options for fields of the spec."""
    _add_file(command)
    _add_topic(command)
    spec = command.add_argument_group("the study", "each option sets the field of the same name in the study file")
    _add_arms(spec)
    spec.add_argument("--metric", metavar="NAME", help="what decides (default: the instrument's)")
    spec.add_argument(
        "--secondary",
        action="append",
        default=[],
        metavar="NAME",
        help="a further metric to report; may be repeated",
    )
    spec.add_argument(
        "--claim",
        choices=("increase", "decrease", "equal", "none"),
        help="how the metric is claimed to move (default: none)",
    )
    spec.add_argument(
        "--margin", type=number, metavar="X", help="the smallest effect that matters (default: the metric's)"
    )
    _add_size(spec)


def _add_file(command: Parser) -> None:
    command.add_argument(
        "file", nargs="?", metavar="FILE", help="a study file, YAML or TOML (`researcher draft` writes one)"
    )


def _add_arms(spec: argparse._ArgumentGroup) -> None:
    """Add options for what the arms train on, and how they differ."""
    spec.add_argument(
        "--instrument",
        metavar="NAME|DIR|new",
        help="the environment; new: the planner LLM writes one for the topic, run in a sandbox",
    )
    spec.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME|DIR",
        help="the model to train; repeat it to compare models",
    )
    spec.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="FACTOR=A,B",
        help="compare these levels; the first is the baseline",
    )
    spec.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME:F=V,F=V",
        help="an arm of several settings; the first is the baseline",
    )
    spec.add_argument("--set", action="append", default=[], metavar="FACTOR=LEVEL", help="the same in all arms")
    spec.add_argument(
        "--design",
        choices=("compare", "factorial", "sequence", "race", "screen", "balance", "trend"),
        help="how levels are compared (default: compare; factorial where several factors vary)",
    )
    spec.add_argument(
        "--evaluate-on",
        action="append",
        default=[],
        metavar="INSTRUMENT",
        help="score trained models on its held-out tasks too; may be repeated",
    )


def _add_size(spec: argparse._ArgumentGroup) -> None:
    """Add options for the study's size and schedule."""
    spec.add_argument("--steps", type=count, metavar="N", help="optimiser steps of a trial (default: the instrument's)")
    spec.add_argument(
        "--heldout-every",
        type=int,
        metavar="N",
        help="play some of the held-out tasks every N steps too, for the curves (0: only before and after training)",
    )
    spec.add_argument("--seeds", metavar="N|N..M", help="seeds per arm (default: what the noise floor asks for)")
    spec.add_argument(
        "--first-seed",
        type=whole(0, 2**31 - 1),
        metavar="N",
        help="use seeds from N on, so that a replication shares none with the earlier study (default: 0)",
    )
    spec.add_argument(
        "--looks",
        type=count,
        choices=range(1, 6),
        metavar="N",
        help="look at the effect up to N times (1 to 5) and stop when it is decided; alpha is spent over the looks",
    )
    spec.add_argument(
        "--fine",
        type=int,
        choices=range(51),
        metavar="N",
        help="let Optuna try up to N levels between those compared; the best is confirmed on fresh seeds",
    )
    spec.add_argument(
        "--budget", metavar="TIME", help="wall time such as 90m or 8h; a study that does not fit is refused beforehand"
    )
    spec.add_argument(
        "--tokens", metavar="N", help="maximum tokens of the agents' calls, prompt and sampled, such as 50M"
    )
    spec.add_argument(
        "--window",
        action="append",
        default=[],
        metavar="22:00-07:00",
        help="when trials may run, in local time; 'sat,sun 00:00-24:00'; may be repeated (default: always)",
    )
    spec.add_argument(
        "--days", type=count, metavar="N", help="days after which the study ends with what it has (up to 3650)"
    )
    spec.add_argument(
        "--approve",
        choices=("never", "plan", "stage"),
        help="when to wait for a person's approval (default: never; plan, for an instrument that an LLM wrote)",
    )


def _add_instruments(commands: argparse._SubParsersAction[Parser]) -> None:
    text = "what can be asked: instruments, factors, metrics"
    instruments = commands.add_parser("instruments", help=text, description=text)
    one = instruments.add_mutually_exclusive_group()
    one.add_argument("name", nargs="?", metavar="NAME|DIR", help="show only this one (default: all)")
    one.add_argument("--check", metavar="NAME|DIR", help="list its tasks, and say what is wrong with it")
    one.add_argument(
        "--install", metavar="NAME|DIR", help="install the packages that it needs into a separate environment"
    )
    _json(instruments)


def _add_copy(commands: argparse._SubParsersAction[Parser]) -> None:
    text = "send unsent records to MLflow and other copies, and say where these are"
    copy = commands.add_parser("copy", help=text, description=text)
    copy.add_argument("study", nargs="?", default=LATEST, help="an id, its beginning, or `latest` (default)")
    copy.add_argument(
        "--sink",
        action="append",
        default=[],
        choices=("mlflow", "tensorboard", "wandb"),
        help="only this one; may be repeated (default: those the study was started with)",
    )
    _json(copy)


def _add_ui(commands: argparse._SubParsersAction[Parser]) -> None:
    ui = commands.add_parser(
        "ui",
        help="the studies as a web page: trials as they run, gates to answer, reports, MLflow",
        description="Serve a web page of the studies until interrupted, and open it. MLflow starts when its link is followed.",
    )
    ui.add_argument("study", nargs="?", help="open the page of this study (default: the list of all)")
    ui.add_argument("--host", default="127.0.0.1", help="any other than loopback needs a token (default: %(default)s)")
    ui.add_argument("--port", type=port, default=8643, help="0 takes a free one (default: %(default)s)")
    ui.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="the token that browsers must give (default: RESEARCHER_UI_TOKEN)",
    )
    ui.add_argument("--public-url", metavar="URL", help="the page's URL for browsers, if it is behind a proxy")
    ui.add_argument("--mlflow", action="store_true", help="open MLflow itself, on the study or the latest one")
    ui.add_argument("--mlflow-port", type=port, default=5000, help="0 takes a free one (default: %(default)s)")
    ui.add_argument("--no-browser", action="store_true", help="print the address and open no browser")
    _json(ui)


def _add_mcp(commands: argparse._SubParsersAction[Parser]) -> None:
    mcp = commands.add_parser(
        "mcp",
        help="the commands as tools for coding agents (Model Context Protocol)",
        description="Serve the commands as tools of the Model Context Protocol: to the program that starts this one, over standard "
        "input and output, or with --http to agents anywhere.",
    )
    mcp.add_argument(
        "--limit",
        metavar="TIME",
        default="1h",
        help="a study with a larger budget only starts with `approve`, the hash of its plan (default: %(default)s)",
    )
    mcp.add_argument("--http", action="store_true", help="streamable HTTP, at /mcp, until interrupted")
    mcp.add_argument("--host", help="any other than loopback needs a token (default: 127.0.0.1)")
    mcp.add_argument("--port", type=port, help="0 takes a free one (default: 8644)")
    mcp.add_argument(
        "--token-file", type=Path, metavar="FILE", help="the bearer token of agents (default: RESEARCHER_MCP_TOKEN)"
    )
    mcp.add_argument("--public-url", metavar="URL", help="the server's URL for agents, if it is behind a proxy")
    _json(mcp)


def _add_archives(commands: argparse._SubParsersAction[Parser]) -> None:
    text = "write a study with its data and code into one file"
    export = commands.add_parser("export", help=text, description=text)
    export.add_argument("study", nargs="?", default=LATEST, help="an id, its beginning, or `latest` (default)")
    export.add_argument("--to", metavar="FILE", help="default: STUDY.tar.gz here")
    export.add_argument("--force", action="store_true", help="overwrite an existing file")
    _json(export)
    reproduce = commands.add_parser(
        "reproduce",
        help="run a trial of an exported study again",
        description="Run one trial of an exported study again. This runs the instrument's code from the archive.",
    )
    reproduce.add_argument("archive", metavar="FILE", help="a file that `researcher export` wrote")
    reproduce.add_argument("trial", nargs="?", help="a trial's key (default: the first finished trial)")
    _servers(reproduce)
    reproduce.set_defaults(engine=None)  # default: the archive's engine
    _json(reproduce)


def _add_findings(commands: argparse._SubParsersAction[Parser]) -> None:
    text = "what studies have found, including null results, and which findings contradict each other"
    findings = commands.add_parser("findings", help=text, description=f"Show {text}; share findings with others.")
    _finding_filters(findings)
    actions = findings.add_subparsers(dest="action", metavar="export|import")
    findings.set_defaults(action="list")
    export = actions.add_parser("export", help="write findings as JSON lines", description="Write findings to a file.")
    export.add_argument("file", metavar="FILE", help="`-` is standard output")
    export.add_argument(
        "--by", metavar="NAME", help="name of the group whose findings these are (default: RESEARCHER_GROUP)"
    )
    export.add_argument(
        "--all", action="store_true", help="export imported findings too, under the names they came with"
    )
    export.add_argument("--force", action="store_true", help="overwrite an existing file")
    _finding_filters(export)
    importing = (
        "Import findings of others, all or none. They are shown when planning, and marked as not recomputable here."
    )
    imported = actions.add_parser("import", help="import the findings of others", description=importing)
    imported.add_argument(
        "file", metavar="FILE", help="a file that `researcher findings export` wrote; `-` is standard input"
    )
    imported.add_argument(
        "--replace", action="store_true", help="replace findings that the same group has changed since"
    )
    _json(imported)


def _finding_filters(command: argparse.ArgumentParser) -> None:
    command.add_argument("--instrument", metavar="NAME", help="only findings on this instrument")
    command.add_argument("--factor", metavar="NAME", help="only findings on this factor")
    command.add_argument("--model", metavar="NAME", help="only findings with this model")
    _json(command)


def _servers(command: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add `--server` and `--engine`.

    With `several`, one option may take several addresses; argparse cannot combine that with positionals.
    """
    command.add_argument(
        "--server",
        action="extend" if several else "append",
        nargs="+" if several else None,
        default=[],
        metavar="URL",
        help="a swarm server; may be repeated (default: one started here); a server that does not answer is retried for 30 s",
    )
    command.add_argument("--engine", choices=("local", "echo"), default="local", help="engine of a server started here")


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="JSON on standard output")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script's command and return the exit code."""
    args = parser().parse_args(argv)
    with uncollected():
        from researcher import cli
    return cli.run(args)


if __name__ == "__main__":
    sys.exit(main())
