"""What `make` does with an environment that is there already."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


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
