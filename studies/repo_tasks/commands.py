"""The agents that mend repositories: the one beside this file, four from npm by name, or any command."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from swarm.client import WorkflowFault

BUILT_IN = "built-in"
PROGRAMS = {"claude-code": "claude", "codex": "codex", "opencode": "opencode", "pi": "pi"}
"""Of an agent's name the program that its script in `agents/` starts."""
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Command:
    """words: the command line. reads: what it has to be able to read beside the system."""

    words: list[str]
    reads: list[Path]


def command_of(agent: str, place: Path) -> Command:
    """The command of an agent. place: a folder for a copy of its script: the agent sees nothing else of this instrument.

    agent: `built-in`, a name of `PROGRAMS`, or a command line, which reads the task on its standard input.
    Raises: WorkflowFault for a program that is not installed.
    """
    python = [Path(sys.prefix), Path(sys.base_prefix)]
    if agent == BUILT_IN:
        return Command([sys.executable, str(_copied("agent.py", place))], python)
    if agent in PROGRAMS:
        return Command(["sh", str(_copied(f"agents/{agent}.sh", place))], [*python, *_installed(PROGRAMS[agent])])
    words = words_of(agent)
    if not words:
        raise WorkflowFault(f"the agent is empty: name {BUILT_IN}, {', '.join(PROGRAMS)}, or a command")
    return Command(words, [*python, *(_installed(words[0]) if shutil.which(words[0]) else [])])


def words_of(agent: str) -> list[str]:
    """The command line. Raises: ValueError for one that no shell would take."""
    try:
        return shlex.split(agent)
    except ValueError as error:
        raise ValueError(f"agent must be {BUILT_IN}, a name, or a command, and {agent!r} is none: {error}") from error


def variables(turns: int, context: int, answer_tokens: int) -> dict[str, str]:
    """What scripts of agents read: their limits, and a `python` that the tests run under."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {"PATH": path, "TURNS": str(turns), "CONTEXT": str(context), "MAX_TOKENS": str(answer_tokens)}


def _copied(name: str, place: Path) -> Path:
    place.mkdir(exist_ok=True)
    return Path(shutil.copy(_HERE / name, place))


def _installed(program: str) -> list[Path]:
    """Where a program lies with all that belongs to it: npm's folder around it, where it is npm's."""
    found = shutil.which(program)
    if found is None:
        raise WorkflowFault(
            f"there is no program {program!r} on the PATH: npm install it (docs/guides/coding-agent-training.md)"
        )
    folders = [Path(found).parent, Path(found).resolve().parent]
    around = [folder for folder in (*folders[0].parents, *folders[1].parents) if folder.name == "node_modules"]
    return [each for each in (*folders, *around) if not Path.home().is_relative_to(each)]  # never all of a home
