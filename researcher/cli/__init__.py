"""Dispatch of `researcher` commands. `run` finds a command's module, prints expected errors as one line, and returns the exit code."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from foundation.commandline import UsageError
from foundation.imports import advice, uncollected
from foundation.logs import level_of, redact
from foundation.paths import is_full
from foundation.streams import silence
from researcher.executor.errors import ExecutorError, InstrumentChanged
from researcher.refusals import BudgetTooSmall, PlanningRefused, RecordsDisagree
from researcher.store.errors import OverBudget, StoreError
from swarm.protocol.errors import SwarmError

DONE, FAILED, USAGE, WAITING, OUT_OF_BUDGET = 0, 1, 2, 3, 4

_HOMES = {
    "start": "start",
    "draft": "start",
    "calibrate": "calibrate",
    "schema": "start",
    "resume": "resume",
    "list": "status",
    "status": "status",
    "watch": "status",
    "show": "status",
    "stop": "decisions",
    "pause": "decisions",
    "approve": "decisions",
    "reject": "decisions",
    "amend": "decisions",
    "daemon": "resume",
    "notify": "notify",
    "copy": "archives",
    "export": "archives",
    "findings": "findings",
    "reproduce": "archives",
    "instruments": "instruments",
    "report": "report",
    "verify": "report",
    "ui": "ui",
    "doctor": "doctor",
    "campaign": "campaign",
    "mcp": "mcp",
}

_WORKING = ("start", "resume", "campaign")
"""Commands that run a study. If their output is closed early they fail, because the study is unfinished."""
_STARTING_TRIALS = ("start", "calibrate", "resume", "reproduce", "daemon", "campaign", "mcp")


class Interrupted(KeyboardInterrupt):
    """Raised when the user interrupts a running study; `resume` continues it."""

    def __init__(self, study_id: str) -> None:
        super().__init__(study_id)
        self.study_id = study_id


def run(args: argparse.Namespace) -> int:
    """Run one parsed command and return its exit code."""
    try:
        with uncollected():
            module = importlib.import_module(f"researcher.cli.{_HOMES[args.command]}")
        if args.command in _STARTING_TRIALS and not getattr(args, "dry_run", False):
            _check_environment()
        return int(getattr(module, f"{args.command}_command")(args))
    except BrokenPipeError:  # a reader such as `head` closed our output; a command that only shows things did not fail
        silence(sys.stdout)
        return FAILED if args.command in _WORKING else DONE
    except DELIBERATE as error:
        refusal = refusal_of(error)
        if refusal is None:
            raise
        return _fail(args, refusal)
    except KeyboardInterrupt as error:
        then = f"; `researcher resume {error.study_id}` continues it" if isinstance(error, Interrupted) else ""
        sys.stderr.write(f"interrupted{then}\n")
        return 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An expected error in one sentence. `code` is the exit code; `nearest` lists names that the user may have meant."""

    text: str
    code: int
    nearest: tuple[str, ...] = ()


DELIBERATE = (
    *(UsageError, PlanningRefused, OverBudget, StoreError, ExecutorError, InstrumentChanged, RecordsDisagree),
    *(SwarmError, ModuleNotFoundError, OSError),
)
"""Errors that the command line and the MCP server report as one sentence; any other error is a bug."""


def refusal_of(error: Exception) -> Refusal | None:
    """Describe one of the DELIBERATE errors; None if one of our own modules is missing, which is a bug."""
    code, text = FAILED, str(error).strip()
    if isinstance(error, OverBudget | BudgetTooSmall):
        code = OUT_OF_BUDGET
    elif isinstance(error, UsageError | PlanningRefused):
        code = USAGE
    elif isinstance(error, ModuleNotFoundError):
        lacking = advice(error, "researcher")
        if lacking is None:
            return None
        text = lacking
    elif isinstance(error, OSError) and is_full(error):  # for other errors the system's message is clear
        text = f"{error}; make room on that disk, then try again"
    return Refusal(text=redact(text), code=code, nearest=tuple(getattr(error, "nearest", ())))


def _check_environment() -> None:
    """Check the environment variables that would fail every trial if they were invalid. Raises: UsageError."""
    from researcher.executor.servers import server_token

    level_of(os.environ)
    server_token(os.environ)


def _fail(args: argparse.Namespace, refusal: Refusal) -> int:
    if getattr(args, "json", False):
        sys.stderr.write(json.dumps({"error": refusal.text, "nearest": list(refusal.nearest)}) + "\n")
    else:
        sys.stderr.write(f"researcher {args.command}: {refusal.text}\n")
    return refusal.code


def say(text: str = "") -> None:
    """Print one line to standard output."""
    sys.stdout.write(text + "\n")


def answer(as_json: bool, document: Any, *lines: str) -> int:
    """Print the document if `as_json`, else the lines. Returns: DONE."""
    if as_json:
        say_json(document)
    else:
        for line in lines:
            say(line)
    return DONE


def say_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
