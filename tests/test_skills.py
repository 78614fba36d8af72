"""Skills for coding agents are valid Agent Skills, and every command, option and tool that they name is there."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from foundation.commandline import Parser
from researcher.campaign.goal import aim_of, goal_in
from researcher.instruments.catalogue import open_instrument
from researcher.main import parser as researcher_parser
from researcher.mcp.tools import TOOLS
from researcher.study.file import checked_spec, read_study_text
from swarm.main import parser as swarm_parser
from tests.reader_fixture import Reader
from tests.reader_fixture import blocks as reader_blocks

ROOT = Path(__file__).resolve().parents[1]
SKILLS = sorted((ROOT / "skills").glob("*/SKILL.md"))
PARSERS = {"researcher": researcher_parser(), "swarm": swarm_parser()}
FIELDS = {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
MOST_LINES = 120
BY_NAME = pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.parent.name)


def parts(skill: Path) -> tuple[dict[str, Any], str]:
    """Front matter and body."""
    _, front, body = skill.read_text().split("---\n", 2)
    return yaml.safe_load(front), body


def blocks(body: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", body, re.DOTALL)


def commands(body: str) -> Iterator[list[str]]:
    """Words of every command of ours, of shell blocks and in running text."""
    lines = [line for block in blocks(body, "bash") for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", body, flags=re.DOTALL))
    for line in lines:
        for part in line.split("; "):
            words = shlex.split(part, comments=True)
            if words and words[0] in PARSERS:
                yield words


def test_there_are_two() -> None:
    assert [skill.parent.name for skill in SKILLS] == ["swarm-researcher", "swarm-training"]


@BY_NAME
def test_the_front_matter_is_that_of_an_agent_skill(skill: Path) -> None:
    front, body = parts(skill)
    assert front.keys() <= FIELDS
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", front["name"])
    assert front["name"] == skill.parent.name
    assert len(front["name"]) <= 64
    assert 0 < len(front["description"]) <= 1024
    assert "Use when" in front["description"]
    assert 0 < len(front.get("compatibility", "-")) <= 500
    assert len(body.splitlines()) <= MOST_LINES


@BY_NAME
def test_every_command_and_option_that_it_names_is_there(skill: Path) -> None:
    found = list(commands(parts(skill)[1]))
    assert len(found) > 10
    for words in found:
        parser, options = chosen(words)
        assert [word for word in options if word not in parser.options()] == [], words


def chosen(words: list[str]) -> tuple[Parser, list[str]]:
    """The parser of the command, and the options that it is given. What stands behind `--` is somebody else's."""
    own = words[1 : words.index("--")] if "--" in words else words[1:]
    parser = PARSERS[words[0]]
    while own and own[0] in parser.commands():
        parser, own = parser.commands()[own[0]], own[1:]
    if parser.commands():
        assert not own or own[0].startswith("-"), f"{words}: no such command"
    return parser, [word.partition("=")[0] for word in own if word.startswith("--")]


@BY_NAME
def test_options_in_running_text_belong_to_a_command_of_ours(skill: Path) -> None:
    known = {name for parser in PARSERS.values() for each in every(parser) for name in each.options()}
    named = set(re.findall(r"`(--[a-z-]+)", parts(skill)[1]))
    assert named - known == set()


def every(parser: Parser) -> Iterator[Parser]:
    yield parser
    for each in parser.commands().values():
        yield from every(each)


def test_its_study_and_its_goal_can_be_started() -> None:
    _, body = parts(ROOT / "skills" / "swarm-researcher" / "SKILL.md")
    study, goal = (read_study_text(text, ROOT)[0] for text in blocks(body, "yaml"))
    spec, wrong = checked_spec(study)
    assert (spec is not None, wrong) == (True, [])
    asked = goal_in(goal)
    assert aim_of(asked, open_instrument(asked.instruments[0]).instrument).factors


def test_whole_command_lines_are_understood() -> None:
    """Those of shell blocks, with all that they give."""
    for skill in SKILLS:
        for line in (line for block in blocks(parts(skill)[1], "bash") for line in block.splitlines()):
            for part in line.split("; "):
                program, *words = shlex.split(part, comments=True)
                if program in PARSERS:
                    assert isinstance(PARSERS[program].parse_args(words), argparse.Namespace)


NEEDS_A_MODEL = ("swarm models", "swarm serve --plan", "swarm chat")


def test_its_client_is_tried_and_played_as_the_training_skill_says(reader: Reader) -> None:
    """On the echo engine, which needs no model and exports none."""
    _, body = parts(ROOT / "skills" / "swarm-training" / "SKILL.md")
    client = next(block for block in reader_blocks(body) if block.file)
    assert client.file == "client.py"
    reader.types("swarm serve --engine echo")
    reader.writes(client.file, client.text)
    for line in blocks(body, "bash")[0].splitlines():
        if not line.startswith((*NEEDS_A_MODEL, "swarm serve")):
            reader.types(line)
    said = {" ".join(command.split()[:2]): text for command, text in reader.said}
    assert "\nreward 0" in said["swarm try"]
    assert "run_over=True" in said["python client.py"]


def test_every_tool_is_named_and_every_name_is_a_tool() -> None:
    _, body = parts(ROOT / "skills" / "swarm-researcher" / "SKILL.md")
    section = body.split("\n## Over MCP\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)`", section))
    fields = {name for tool in TOOLS for name in tool.arguments.model_fields}
    tools = {tool.name for tool in TOOLS}
    assert tools <= named
    assert named - tools <= fields


def test_the_guides_table_has_every_tool_with_what_it_takes() -> None:
    section = (
        (ROOT / "docs" / "guides" / "coding-agents.md")
        .read_text()
        .split("| tool | does | arguments |\n")[1]
        .split("\n\n")[0]
    )
    rows = [
        [re.findall(r"`([a-z_]+)`", cell) for cell in line.strip("|").split("|")] for line in section.splitlines()[1:]
    ]
    takes = {tool.name: set(tool.arguments.model_fields) for tool in TOOLS}
    assert [name for names, *_ in rows for name in names] == list(takes)
    shared = {"study", "servers", "engine"}  # of `start`: the same as of `price`
    for names, _, fields in rows:
        assert set().union(*(takes[name] for name in names)) - shared <= {*fields, *shared}, names


def test_exit_codes_are_those_of_the_reference() -> None:
    reference = (ROOT / "docs" / "reference" / "commands.md").read_text()
    for skill, program in zip(SKILLS, PARSERS, strict=True):
        pages = (reference.split(f"\n## Exit codes of `{program}`\n")[1], parts(skill)[1].split("\n## Exit codes\n")[1])
        codes = [re.findall(r"^\| (\d+) \|", page.split("\n## ")[0], re.MULTILINE) for page in pages]
        assert codes[0] == codes[1], skill
