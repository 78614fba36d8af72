"""The tutorial on instruments works as it is written: its files are written, its commands run, against the echo engine."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.serving import ServerProcess
from tests.studies.playing import take

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "tutorials" / "instrument.md").read_text()
FILES = re.findall(r"^`([\w./]+)`:.*?```\w+\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines() if line]
LIMIT_S = 900


@dataclass
class Reader:
    """Somebody who follows the page, in a folder of their own."""

    folder: Path
    environ: dict[str, str]
    ran: list[str] = field(default_factory=list)

    def types(self, command: str) -> str:
        """What the command says; it has to succeed."""
        words = shlex.split(command)
        program = {"researcher": ["-m", "researcher.main"], "swarm": ["-m", "swarm.main"], "python": []}[words[0]]
        done = subprocess.run(
            [sys.executable, *program, *words[1:]],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    environ = {**os.environ, "RESEARCHER_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    for name in ("RESEARCHER_DATABASE_URL", "MLFLOW_TRACKING_URI", "RESEARCHER_STUDIES", "RESEARCHER_LLM_MODEL"):
        environ.pop(name, None)
    folder = tmp_path / "mine"
    for name, text in FILES:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    yield Reader(folder, environ)
    for file in (tmp_path / "home").glob("studies/**/pid"):  # what a study that failed may have left
        with suppress(ProcessLookupError, PermissionError, ValueError):
            os.killpg(int(file.read_text()), signal.SIGKILL)


def test_the_page_shows_three_whole_files() -> None:
    assert [name for name, _ in FILES] == ["last_word/reward.py", "last_word/workflow.py", "last_word/instrument.toml"]


@pytest.mark.campaign
def test_every_command_of_the_page_works(reader: Reader, tmp_path: Path) -> None:
    """In their order. The server's port is a free one, and what would take a real model is only planned."""
    said: dict[str, str] = {}
    with ServerProcess(tmp_path / "state", "--log-level", "warning") as server:
        reader.environ["SWARM_URL"] = server.url
        for command in COMMANDS:
            if command == "swarm serve --engine echo --model echo":
                continue  # it is running
            if command == 'export RESEARCHER_STUDIES="$PWD"':
                reader.environ["RESEARCHER_STUDIES"] = str(reader.folder)
                continue
            real = command.startswith("researcher start") and "--engine echo" not in command
            said[command] = reader.types(command + (" --dry-run" if real and "--dry-run" not in command else ""))
    of = {
        what: next(text for command, text in said.items() if what in command)
        for what in ("--check", "swarm try", "echo", "verify")
    }
    assert "last_word: sound. 200 train and 12 held-out tasks" in of["--check"]
    assert "reward 1" in of["swarm try"] or "reward 0.1" in of["swarm try"]
    assert "report.md" in of["echo"]
    assert all("last_word" in text for command, text in said.items() if "RESEARCHER_STUDIES" in command)


def test_its_reward_and_its_splits_are_sound(reader: Reader) -> None:
    from swarm.client.workflow import load_workflow

    loaded = load_workflow(reader.folder / "last_word", "workflow.py")
    train = take(loaded.tasks("train", 1, None), 500)
    assert train == take(loaded.tasks("train", 1, 500), 500)
    held_out = take(loaded.tasks("heldout", 1, 100), 100)
    assert {task.id for task in train}.isdisjoint(task.id for task in held_out)
    assert held_out == take(loaded.tasks("heldout", 2, 100), 100)
