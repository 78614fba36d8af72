"""What the README tells people to type is there, and its example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from researcher.main import parser as researcher_parser
from swarm.main import parser as swarm_parser
from tests.page_example import printed_by_example

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


def test_the_example_trains(tmp_path: Path) -> None:
    assert "run_over=True" in printed_by_example(README, tmp_path)
