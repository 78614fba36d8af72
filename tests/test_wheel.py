"""What a wheel installs works on its own: outside the clone, with nothing in the home."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

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
