"""What the README tells people to type is there, and its example runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.serving import ServerProcess
from researcher.main import parser as researcher_parser
from swarm.client import RunSpec
from swarm.client.sync import SwarmClient
from swarm.main import parser as swarm_parser
from tests.reader_fixture import Reader

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def _commands(program: str) -> list[str]:
    """First words of each use of a program in the README's shell blocks, without comments."""
    lines = [line.split("#")[0] for block in _blocks("bash") for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in re.split(r";|&&", line)]
    return sorted({part.split()[1] for part in parts if part.startswith(f"{program} ")})


@pytest.mark.parametrize("program", ["researcher", "swarm"])
def test_every_command_exists(program: str) -> None:
    help_text = {"researcher": researcher_parser, "swarm": swarm_parser}[program]().format_help()
    missing = [name for name in _commands(program) if not re.search(rf"^\s+{name}\b", help_text, re.MULTILINE)]
    assert _commands(program)
    assert missing == []


def test_the_example_trains(reader: Reader) -> None:
    (example,) = _blocks("python")
    reader.types("swarm serve --engine echo --model echo")
    reader.writes("first.py", example)
    assert "run_over=True" in reader.types("python first.py")


def test_the_example_says_in_a_line_that_another_run_holds_the_server(tmp_path: Path) -> None:
    (example,) = _blocks("python")
    with ServerProcess(tmp_path / "state", "--log-level", "warning") as server, SwarmClient(server.url) as swarm:
        swarm.start_run(RunSpec())
        script = tmp_path / "first.py"
        script.write_text(example.replace("http://127.0.0.1:8642", server.url))
        ran = subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith("ServerBusy: run ")
    assert ran.stderr.count("\n") == 1
