"""A bench as a command: what a signal leaves behind, and what bad options say."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENDLESS = {
    "run_switch": ["--engine", "echo", "--switches", "1000000"],
    "swarm_scale": ["--levels", *["2"] * 1000, "--episodes", "16"],
}

BAD = {
    "run_switch": ["--switches", "0"],
    "swarm_scale": ["--levels", "0"],
    "episode_end": ["--processes", "0"],
    "false_positives": ["--studies", "0"],
    "boot": ["--rounds", "0"],
    "gateway_overhead": ["--agents", "0"],
    "async_overlap": ["--steps", "0"],
    "tree_training": ["--repeats", "0"],
    "train_floor": ["--steps", "0"],
    "grpo_step": ["--turns-steps", "0"],
    "learning": ["--what", "mix", "--seeds", "0"],
    "gpu_check": ["--limit-s", "0"],
}


def running_with(text: str) -> list[str]:
    """Command lines of this machine's processes that name it."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended meanwhile
            continue
        found += [line] if text in line else []
    return found


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize(
    ("sent", "code", "said"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_bench_that_a_signal_ends_leaves_no_process_and_no_folder(
    name: str, sent: signal.Signals, code: int, said: str, tmp_path: Path
) -> None:
    bench = subprocess.Popen(
        [sys.executable, "-m", f"bench.{name}", *ENDLESS[name]],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # not as whoever runs the tests has it
    )
    assert bench.stdout is not None
    assert bench.stdout.readline()
    bench.send_signal(sent)
    _, errors = bench.communicate(timeout=120)
    assert (bench.returncode, errors) == (code, f"{said}\n")
    assert list(tmp_path.iterdir()) == []
    deadline = time.monotonic() + 20.0
    while running_with(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)  # the system takes its time to bury what was ended
    assert running_with(str(tmp_path)) == []


@pytest.mark.parametrize("name", BAD)
def test_a_count_of_none_is_refused_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *BAD[name]])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"bench.{name}").main()
    assert "must be a whole number, at least 1" in capsys.readouterr().err
