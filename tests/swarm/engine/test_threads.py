"""Threads of the children: how many, on machines of any size, and how they wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from foundation.clock import SystemClock
from swarm.engine import machine as threads
from swarm.engine.local.trainer import LocalTrainer
from swarm.engine.machine import thread_count, thread_settings, yielding_threads
from swarm.models.folder import ModelFolder

COUNT = """
import torch
torch.set_num_threads(2)
torch.ones(300, 300) @ torch.ones(300, 300)
loaded = {line.split("/")[-1].strip() for line in open("/proc/self/maps") if "omp" in line}
print(any(name.startswith("libiomp5") for name in loaded), torch.get_num_threads())
"""


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(48)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return 48


def test_a_trainer_starts_on_a_machine_with_many_cores(many_cores: int, tmp_path: Path) -> None:
    """There vLLM binds its threads itself, and nothing says for all children how many there are."""
    model = ModelFolder(path=tmp_path, name="model", fingerprint="0" * 64)
    trainer = LocalTrainer(model, log_path=tmp_path / "log", clock=SystemClock(), on_health=lambda health: None)
    command = trainer._command(3)
    assert command.argv[command.argv.index("--threads") + 1] == str(many_cores)
    assert not {"OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"} & thread_settings({}).keys()


def test_the_trainers_products_are_the_same_bits_from_run_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MKL_CBWR")
    model = ModelFolder(path=tmp_path, name="model", fingerprint="0" * 64)
    trainer = LocalTrainer(model, log_path=tmp_path / "log", clock=SystemClock(), on_health=lambda health: None)
    assert trainer._command(3).env["MKL_CBWR"] == "AUTO"


@pytest.mark.parametrize(("asked", "expected"), [("3", 3), ("5,2", 5), ("", 48), ("0", 48), ("many", 48)])
def test_the_environment_says_how_many_threads(many_cores: int, asked: str, expected: int) -> None:
    assert thread_count({"OMP_NUM_THREADS": asked}) == expected


def test_the_system_places_the_threads_of_a_small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 2)
    settings = thread_settings({"GOMP_SPINCOUNT": "7"})
    assert settings["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert settings["OMP_NUM_THREADS"] == "2"
    assert settings["GOMP_SPINCOUNT"] == "7"  # a setting of the user's own


def test_the_runtime_is_found_and_told_behind_what_is_loaded_already(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runtime = tmp_path / "libiomp5.so"
    monkeypatch.setattr(threads, "_intel_runtime", lambda: runtime)
    assert yielding_threads({}) == {"LD_PRELOAD": str(runtime), "KMP_BLOCKTIME": "1"}
    own = yielding_threads({"LD_PRELOAD": "/lib/libtcmalloc.so", "KMP_BLOCKTIME": "0"})
    assert own == {"LD_PRELOAD": f"/lib/libtcmalloc.so:{runtime}", "KMP_BLOCKTIME": "0"}
    assert yielding_threads({"LD_PRELOAD": "/lib/libgomp.so.1"}) == {}  # a choice of the user's own
    monkeypatch.setattr(threads, "_intel_runtime", lambda: None)
    assert yielding_threads({}) == {}


@pytest.mark.parametrize(("folder", "found"), [("plain", True), ("with spaces", False)])
def test_a_path_that_the_linker_would_split_is_not_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str, found: bool
) -> None:
    runtime = tmp_path / folder / "libiomp5.so"
    runtime.parent.mkdir()
    runtime.touch()
    listed = SimpleNamespace(name=runtime.name, locate=lambda: runtime)
    monkeypatch.setattr(threads.metadata, "files", lambda name: [listed])
    assert (threads._intel_runtime.__wrapped__() is not None) is found


def test_the_other_runtime_takes_the_place_of_torchs_own() -> None:
    env = thread_settings(os.environ) | yielding_threads(os.environ)
    if "LD_PRELOAD" not in env:
        pytest.skip("vLLM brings Intel's OpenMP runtime along on x86 alone")
    made = subprocess.run([sys.executable, "-c", COUNT], env=env, capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["True", "2"]
