"""The pages for those who come from another trainer name what is there: on our side, and on theirs where it is installed."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.main import parser
from swarm.protocol.runspec import LoraSpec, RunSpec, merge_patch
from tests.test_docs import ROOT, ROW, fields, options_of, quoted

GUIDES = ROOT / "docs" / "guides"
PAGES = {"trl": (GUIDES / "from-trl.md").read_text(), "verl": (GUIDES / "from-verl.md").read_text()}
SPEC = {name for name, _ in fields(RunSpec)} | {name for name, _ in fields(LoraSpec, "parameters.")}
OPTIONS = options_of(parser(), "serve")


def sections(page: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Each heading of a page and the rows of its table, without their two head lines."""
    for part in page.split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        yield title, [[cell.strip() for cell in line.split("|")] for line in ROW.findall(text)][2:]


def ours(page: str) -> Iterator[str]:
    """What stands in the second column of the tables that have one of ours."""
    for title, rows in sections(page):
        if title != "What has no counterpart":
            yield from (name for row in rows for name in quoted(row[1]))


def theirs(page: str) -> Iterator[str]:
    """What stands in the first column where that is a name of theirs, and not the value of one."""
    for title, rows in sections(page):
        if title not in ("Loss types", "Estimators and losses"):
            yield from (name for row in rows for name in quoted(row[0]))


def nested(path: str, value: str) -> dict[str, Any]:
    """A spec in which one field is set."""
    found: Any = {"true": True, "false": False}.get(value, value)
    for name in reversed(path.split(".")):
        found = {name: found}
    return dict(found)


COMPANIONS: dict[str, dict[str, Any]] = {"algorithm.baseline": {"algorithm": {"name": "reinforce_pp"}}}
"""By field, what it needs beside it."""


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_ours_is_there(page: str) -> None:
    names = list(ours(PAGES[page]))
    assert len(names) > 40
    for name in names:
        field, _, value = name.partition(": ")
        assert field in (OPTIONS if field.startswith("--") else SPEC), name
        if value:
            RunSpec.model_validate(merge_patch(COMPANIONS.get(field, {}), nested(field, value)))


@pytest.mark.parametrize("page", PAGES)
def test_the_run_that_a_page_shows_is_one(page: str) -> None:
    (shown,) = re.findall(r"```json\n(.*?)```", PAGES[page], re.DOTALL)
    RunSpec.model_validate(json.loads(shown))


def test_every_key_of_verls_is_in_the_installed_one() -> None:
    found = importlib.util.find_spec("verl")
    if found is None or found.origin is None:
        pytest.skip("verl is not installed")
    from omegaconf import OmegaConf

    configuration = OmegaConf.load(Path(found.origin).parent / "trainer/config/_generated_ppo_trainer.yaml")
    keys = OmegaConf.to_container(configuration, resolve=False)
    shown = re.findall(r"([\w.]+)=", "".join(re.findall(r"```sh\n(.*?)```", PAGES["verl"], re.DOTALL)))
    for name in [*theirs(PAGES["verl"]), *shown]:
        here: Any = keys
        for part in name.split("."):
            assert isinstance(here, dict), name
            assert part in here, name
            here = here[part]


def test_every_field_of_trls_is_in_the_installed_one() -> None:
    places = [ROOT / ".venv-trl" / "lib"]
    if (found := importlib.util.find_spec("trl")) and found.origin:
        places.append(Path(found.origin).parents[1])
    files = [file for place in places for file in place.rglob("trl/trainer/grpo_config.py")]
    if not files:
        pytest.skip("TRL is not installed: `python -m bench.grpo_step` does that")
    from transformers import TrainingArguments

    declared = {
        node.target.id
        for node in ast.walk(ast.parse(files[0].read_text()))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    declared |= set(TrainingArguments.__dataclass_fields__)
    shown = re.findall(r"^    (\w+)=", "".join(re.findall(r"```py\n(.*?)```", PAGES["trl"], re.DOTALL)), re.MULTILINE)
    assert sorted({*theirs(PAGES["trl"]), *shown} - declared) == []
