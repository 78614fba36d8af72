"""The pages say what the code does: their tables name what is there, their links lead somewhere, their example runs."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from bench.serving import ServerProcess
from foundation.clock import ManualClock
from researcher import cli
from researcher.main import main as researcher
from researcher.main import parser as researcher_parser
from swarm.client import Episode, SwarmClient, Task, sync
from swarm.main import parser as swarm_parser
from swarm.protocol.episodes import DropReason, EpisodeClaim, EpisodeGrant, EpisodeReceipt
from swarm.protocol.errors import HTTP_STATUS, ErrorCode
from swarm.protocol.runspec import TUNABLE, LoraSpec, MixSpec, RunSpec, SamplingSpec
from swarm.server.gateway.sampling import _ANY_VALUE_BENDS, _NEUTRAL, recorded_sampling, wants_masks, with_defaults
from tests.reader_fixture import Reader, blocks

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md")
PAGES = [*(ROOT / name for name in OUTSIDE), *sorted((ROOT / "docs").rglob("*.md"))]
SERVER = (ROOT / "docs" / "server.md").read_text()
COMMANDS = (ROOT / "docs" / "reference" / "commands.md").read_text()
BLACK_BOX = (ROOT / "docs" / "black-box.md").read_text()
CLIENTS = (ROOT / "docs" / "guides" / "clients.md").read_text()
ROW = re.compile(r"^\| (.*) \|$", re.MULTILINE)


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its two head lines."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = re.search(r"(^\|.*\n)+", section, re.MULTILINE)
    assert table is not None, heading
    return [[cell.strip() for cell in line.split("|")] for line in ROW.findall(table.group())][2:]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each field of a spec, and what it is by default; `...` where it has to be given."""
    for name, field in model.model_fields.items():
        default = field.default if field.default_factory is None else field.default_factory()  # type: ignore[call-arg]
        if isinstance(default, BaseModel):
            yield from fields(type(default), f"{prefix}{name}.")
        else:
            yield prefix + name, ... if field.is_required() else default


# -- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    astray = []
    for link in links:
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            astray.append(link)
    assert astray == []


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    named = {(ROOT / "docs" / link.partition("#")[0]).resolve() for link in re.findall(r"\]\(([^)\s]+)\)", index)}
    beneath = {ROOT / "docs" / "README.md", *(ROOT / "docs" / "decisions").iterdir()}
    beneath.update((ROOT / "docs" / "examples").glob("*/*"))  # examples/README.md has a row for each
    assert [str(page) for page in (ROOT / "docs").rglob("*.md") if page not in named | beneath] == []


@pytest.mark.parametrize("folder", ["foundation", "swarm", "researcher", "studies", "bench", "tests", "CHANGELOG.md"])
def test_every_page_that_code_names_is_there(folder: str) -> None:
    files = [ROOT / folder] if (ROOT / folder).is_file() else (ROOT / folder).rglob("*")
    texts = [file.read_text() for file in files if file.suffix in (".py", ".toml", ".md", ".jinja")]
    named = {name for text in texts for name in re.findall(r"docs/[\w/-]+\.\w+", text)}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_commands_for_larger_models_make_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the one whose data set has to be fetched from the hub."""
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    section = (ROOT / "docs" / "reference" / "instruments.md").read_text().split("\n## Sizes for larger models\n")[1]
    commands = re.findall(r"^researcher (start .*)$", section.split("\n## ")[0], re.MULTILINE)
    assert [len(commands), sum("data=hf:" in command for command in commands)] == [4, 1]
    for command in commands:
        if "data=hf:" in command:
            researcher_parser().parse_args(command.split())
        else:
            assert researcher([*command.split(), "--dry-run"]) == 0


# -- the server ---------------------------------------------------------------------------------------------------------


def test_the_table_of_options_is_that_of_serve() -> None:
    told = {name for row in rows(SERVER, "Options of `swarm serve`") for name in quoted(row[0])}
    assert told == options_of(swarm_parser(), "serve") - {"--help"}


def options_of(parser: argparse.ArgumentParser, *words: str) -> set[str]:
    for word in words:
        (commands,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        parser = commands.choices[word]
    return {name for action in parser._actions for name in action.option_strings if name.startswith("--")}


def test_the_table_of_routes_is_the_servers(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "state", "--log-level", "warning") as server, server.client() as http:
        served = http.get("/openapi.json").json()["paths"]
    here = {f"{method.upper()} {path}" for path, methods in served.items() for method in methods}
    told = [name for row in rows(SERVER, "Routes") for name in quoted(row[0])]
    assert sorted(told) == sorted(name.replace("{model:path}", "{model}") for name in here)


def test_the_table_of_codes_is_the_protocols() -> None:
    told = {ErrorCode(quoted(code)[0]): int(status) for code, status, _ in rows(SERVER, "Error codes")}
    assert told == HTTP_STATUS


def test_the_table_of_reasons_is_the_ledgers() -> None:
    assert [quoted(row[0])[0] for row in rows(SERVER, "Why an episode was not trained")] == list(DropReason)


def test_the_table_of_fields_is_the_specs() -> None:
    wanted = dict(fields(RunSpec))
    wanted |= dict(fields(LoraSpec, "parameters.")) | dict(fields(MixSpec, "batch.mix.NAME."))
    told = {quoted(name)[0]: default for name, default, _ in rows(SERVER, "Fields of a run's spec")}
    assert sorted(told) == sorted(wanted)
    defaults = {name: json.loads(quoted(cell)[0]) if cell else ... for name, cell in told.items()}
    assert defaults == {name: list(value) if isinstance(value, tuple) else value for name, value in wanted.items()}


def test_the_table_of_what_a_patch_changes_is_the_protocols() -> None:
    assert {quoted(row[0])[0] for row in rows(SERVER, "What a PATCH may change")} == TUNABLE


# -- which calls are trained ---------------------------------------------------------------------------------------------


def test_the_table_of_calls_names_every_field_that_restricts_what_is_drawn() -> None:
    told = {name for row in rows(BLACK_BOX, "Which calls are trained") for name in quoted(row[0])}
    assert {*_NEUTRAL, *_ANY_VALUE_BENDS, "temperature", "response_format", "tool_choice", "strict: true"} <= told


@pytest.mark.parametrize(
    ("asked", "drawn_from"),
    [
        ({}, "all"),
        ({"temperature": 0}, "nothing"),
        ({"temperature": 0.009}, "nothing"),
        ({"temperature": 0.01}, "all"),
        ({"top_p": 0.9}, "a part"),
        ({"top_p": 1, "presence_penalty": 0, "logit_bias": {}}, "all"),
        ({"top_k": 5}, "a part"),
        ({"min_tokens": 2}, "a part"),
        ({"structured_outputs": {"regex": "a+"}}, "a part"),
        ({"response_format": {"type": "text"}}, "all"),
        ({"response_format": {"type": "json_object"}}, "a part"),
        ({"tool_choice": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}, "all"),
        ({"tool_choice": "required"}, "a part"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "a part"),
        ({"tools": [{"type": "function", "function": {"name": "add", "strict": True}}]}, "a part"),
        ({"tool_choice": "none", "tools": [{"type": "function", "function": {"name": "add", "strict": True}}]}, "all"),
        ({"vllm_xargs": {"a": 1}}, "who knows"),
    ],
)
def test_calls_are_trained_as_the_page_says(asked: dict[str, Any], drawn_from: str) -> None:
    spec = SamplingSpec(train="exact")
    body = with_defaults(asked, spec, seed=1)
    assert recorded_sampling(body).reproducible is (drawn_from == "all")
    assert wants_masks(body, spec) is (drawn_from == "a part")


# -- commands -----------------------------------------------------------------------------------------------------------


def test_the_table_of_exit_codes_is_the_researchers() -> None:
    told = [int(row[0]) for row in rows(COMMANDS, "Exit codes of `researcher`")]
    own = (cli.DONE, cli.FAILED, cli.USAGE, cli.WAITING, cli.OUT_OF_BUDGET)
    assert told == [*own, 130]


@pytest.mark.parametrize("words", ["start", "status", "patch", "stop", "checkpoint", "restore", "quarantine"])
def test_the_table_of_run_has_the_options_of_each_command(words: str) -> None:
    (row,) = [row for row in rows(COMMANDS, "`swarm run`") if quoted(row[0])[0].split()[0] == words]
    said = {name for cell in row for name in re.findall(r"--[a-z-]+", cell)}
    assert said == options_of(swarm_parser(), "run", words) - {"--help", "--url", "--token-file", "--json"}


# -- clients ------------------------------------------------------------------------------------------------------------


def test_the_example_on_clients_runs(reader: Reader) -> None:
    (example,) = [block.text for block in blocks(CLIENTS) if block.language == "python"]
    reader.types("swarm serve --engine echo --model echo")
    reader.writes("example.py", example)
    trained, evaluated = reader.types("python example.py").splitlines()
    assert "run_over=True" in trained
    assert "ended=20" in evaluated


def test_the_table_of_an_episode_has_all_that_both_clients_offer_an_agents_author() -> None:
    table = rows(CLIENTS, "What a rollout is given")
    offered = {name: part for name, part in vars(sync.Episode).items() if not name.startswith("_")}
    said = [part for row in table for part in quoted(row[0])]
    assert sorted(said) == sorted(called(name, part) if callable(part) else name for name, part in offered.items())
    claim = EpisodeClaim(run_id="r", client_id="c", task_id="t")
    asynchronous = dir(Episode(SwarmClient("http://127.0.0.1:1"), claim, clock=ManualClock()))
    assert {*offered, "lost", "claim"} <= set(asynchronous)
    fields_of = {quoted(row[0])[0]: set(quoted(row[1])) for row in table}
    assert fields_of["grant"] <= set(EpisodeGrant.model_fields)
    assert fields_of["receipt"] <= set(EpisodeReceipt.model_fields)
    task = ", ".join(f"`{'task' if each.name == 'id' else ''}.{each.name}`" for each in dataclasses.fields(Task))
    assert task in CLIENTS


def called(name: str, method: Callable[..., object]) -> str:
    """A call of a method, with its defaults."""
    shown = []
    for each in list(inspect.signature(method).parameters.values())[1:]:
        given = "…" if each.default is each.empty else repr(each.default)
        shown.append(each.name if each.kind is not each.KEYWORD_ONLY else f"{each.name}={given}")
    return f"{name}({', '.join(shown)})"


def test_the_options_of_an_episodes_run_are_all_on_the_page() -> None:
    said = {
        name
        for row in rows(BLACK_BOX, "`swarm episode run`")
        for cell in row
        for name in re.findall(r"--[a-z-]+", cell)
    }
    assert said == options_of(swarm_parser(), "episode", "run") - {"--help", "--url", "--token-file", "--json"}
