"""What `pip install 'swarm-researcher[...]'` brings is what its packages import."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"foundation", "swarm", "researcher"}
ELSEWHERE = {"ray", "wandb", "tensorboard", "vllm"}
"""Imported where they are asked for: extras of their own, and what the locks alone bring."""


def _imported(folder: Path) -> set[str]:
    """Top-level names of other people's packages."""
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - OURS - ELSEWHERE - sys.stdlib_module_names


def _closure(wanted: Iterable[str]) -> set[str]:
    """Distributions that pip installs for these requirements, as far as they are installed here."""
    left, seen, known = [Requirement(each) for each in wanted], set[str](), set[str]()
    while left:
        each = left.pop()
        if str(each) in seen:
            continue
        seen.add(str(each))
        if canonicalize_name(each.name) == PROJECT["name"]:
            left += [Requirement(text) for extra in each.extras for text in PROJECT["optional-dependencies"][extra]]
            continue
        known.add(canonicalize_name(each.name))
        try:
            further = [Requirement(text) for text in requires(each.name) or ()]
        except PackageNotFoundError:
            continue
        for one in further:
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *each.extras)):
                left.append(one)
    return known


@pytest.mark.parametrize(
    ("extra", "folders"),
    [
        ("server", ["swarm/server", "swarm/protocol", "swarm/client"]),
        ("join", ["swarm/client"]),
        ("local", ["swarm/engine/local", "swarm/engine/algorithms", "swarm/models"]),
        ("researcher", ["researcher"]),
    ],
)
def test_an_extra_declares_what_its_packages_import(extra: str, folders: list[str]) -> None:
    declared = _closure([*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]])
    owners = packages_distributions()
    imported = set().union(*(_imported(ROOT / folder) for folder in folders))
    absent = [
        name for name in imported if not {canonicalize_name(each) for each in owners.get(name, [name])} & declared
    ]
    assert sorted(absent) == []


@pytest.mark.parametrize(
    ("absent", "line", "said"),
    [
        ("sqlalchemy", "researcher list", "researcher list: needs sqlalchemy"),
        ("jinja2", "researcher ui --no-browser", "[researcher]'"),
        ("sqlalchemy", "researcher start study.yaml --json", '{"error": "needs sqlalchemy'),
        (
            "uvicorn",
            "swarm serve --engine echo",
            "swarm serve: needs uvicorn, which is not installed: pip install 'swarm-researcher[server]'",
        ),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(absent: str, line: str, said: str, tmp_path: Path) -> None:
    ended = _without(absent, line, tmp_path)
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == ended.returncode == 1


@pytest.mark.parametrize("absent", ["starlette", "uvicorn"])
def test_who_plays_the_agent_is_told_of_the_extra_that_it_needs(absent: str, tmp_path: Path) -> None:
    ended = _without(absent, "swarm join play --task hello", tmp_path)
    assert ended.returncode == 2
    assert "pip install 'swarm-researcher[join]'" in ended.stderr


def test_the_doctor_tells_of_a_machine_without_a_store(tmp_path: Path) -> None:
    ended = _without("sqlalchemy", "researcher doctor", tmp_path)
    assert ended.stderr == ""
    assert "MISSING  database: cannot be opened without sqlalchemy" in ended.stdout


def _without(absent: str, line: str, home: Path) -> subprocess.CompletedProcess[str]:
    program, *arguments = line.split()
    code = f"import sys; sys.modules[{absent!r}] = None; from {program}.main import main; sys.exit(main(sys.argv[1:]))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RESEARCHER_HOME": str(home)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environ, cwd=home, capture_output=True, text=True, check=False, timeout=60)
