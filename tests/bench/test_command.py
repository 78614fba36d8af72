"""A bench as a command: what a signal leaves behind, and what bad options say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENDLESS = {
    "run_switch": ["--engine", "echo", "--switches", "1000000"],
    "swarm_scale": ["--levels", *["2"] * 1000, "--episodes", "16"],
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
    )
    assert bench.stdout is not None
    assert bench.stdout.readline()
    bench.send_signal(sent)
    _, errors = bench.communicate(timeout=120)
    assert (bench.returncode, errors) == (code, f"{said}\n")
    assert list(tmp_path.iterdir()) == []
    assert running_with(str(tmp_path)) == []
