"""What an installed wheel holds, what its extras bring, and what make sets up."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from researcher.instruments.catalogue import available

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("foundation", "swarm", "researcher", "studies", "db", "pyproject.toml", "setup.py", "README.md")
STUDY = """
question: Does a higher learning rate help?
instrument: arithmetic
compare: {learning_rate: {baseline: 1.0e-5, levels: [4.0e-5]}}
set: {tasks_per_step: 2, group_size: 4}
steps: 2
seeds: {min: 2, max: 2}
"""


def _built(place: Path) -> Path:
    """The wheel of a clean copy: what lies in a clone's build folder would get into it."""
    source = place / "source"
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / part, source / part)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(place), str(source)], check=True
    )
    return next(place.glob("*.whl"))


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The programs of an environment that holds the wheel, and sees the packages that this Python has."""
    environment = tmp_path / "environment"
    venv.EnvBuilder(symlinks=True).create(environment)
    site = next((environment / "lib").glob("python*/site-packages"))
    (site / "beneath.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "-q", "--no-deps", str(_built(tmp_path))], check=True)
    return environment / "bin"


@pytest.mark.campaign
def test_an_installed_wheel_has_the_instruments_and_runs_a_study_away_from_the_clone(
    installed: Path, tmp_path: Path
) -> None:
    home, here = tmp_path / "home", tmp_path / "empty"
    home.mkdir()
    here.mkdir()
    environ = {"HOME": str(home), "PATH": f"{installed}:{os.defpath}", "LANG": "C.UTF-8"}

    def researcher(*arguments: str) -> str:
        done = subprocess.run(
            ["researcher", *arguments], cwd=here, env=environ, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    ours = {each.instrument.name: each.instrument.model_dump(mode="json") for each in available({})}
    assert {each["name"]: each for each in json.loads(researcher("instruments", "--json"))} == ours
    (here / "study.yaml").write_text(STUDY)
    plan = json.loads(researcher("start", "study.yaml", "--dry-run", "--json"))
    assert next(each.code for each in available({}) if each.instrument.name == "arithmetic") in json.dumps(plan)
    researcher("start", "study.yaml", "--engine", "echo")
    assert "all recompute" in researcher("verify")
    assert (home / ".local" / "share" / "swarm-researcher" / "researcher.db").is_file()
    assert [path.name for path in here.iterdir()] == ["study.yaml"]


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


def _program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def _make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


def _set_up(folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    """The rule of `.ready`, with a pip that does nothing, where `bin/python` of the environment is `python`."""
    _program(folder / "venv/bin/python", python)
    base = _program(folder / "python", f'echo "$@" >> {folder}/log')
    return _make(f"{folder}/venv/.ready", f"VENV={folder}/venv", "PIP=true", f"PYTHON={base}")


def test_an_environment_without_pip_is_made_anew(tmp_path: Path) -> None:
    assert _set_up(tmp_path, "exit 1").returncode == 0
    assert f"-m venv --clear {tmp_path}/venv" in (tmp_path / "log").read_text()


def test_a_whole_environment_is_kept(tmp_path: Path) -> None:
    assert _set_up(tmp_path, 'case "$2" in *vllm*) exit 1 ;; esac').returncode == 0
    assert "venv --clear" not in (tmp_path / "log").read_text()


def test_the_cpu_lock_is_not_laid_over_the_cuda_build(tmp_path: Path) -> None:
    refused = _set_up(tmp_path, "exit 0")
    assert refused.returncode != 0
    assert "LOCK=requirements/gpu.txt" in refused.stderr
    assert not (tmp_path / "venv/.ready").exists()


def test_with_another_lock_nothing_is_installed_from_the_cpu_lock(tmp_path: Path) -> None:
    shown = _make("-n", "verl", "LOCK=requirements/gpu.txt", f"VENV={tmp_path}/venv")
    assert "-r requirements/gpu.txt" in shown.stdout
    assert "-r requirements/cpu.txt" not in shown.stdout


def test_an_environment_keeps_to_the_lock_that_it_was_made_from(tmp_path: Path) -> None:
    made = _program(tmp_path / "venv/bin/python", 'case "$2" in *vllm*) exit 1 ;; esac')
    rule = [f"{tmp_path}/venv/.ready", f"VENV={tmp_path}/venv", "PIP=true"]
    assert _make(*rule, "LOCK=requirements/gpu.txt").returncode == 0
    assert "requirements/cpu.txt" not in _make("-n", "-B", *rule).stdout
    other = _make(*rule, "LOCK=requirements/cpu.txt")
    assert other.returncode != 0
    assert "was made from requirements/gpu.txt" in other.stderr
    assert made.exists()
