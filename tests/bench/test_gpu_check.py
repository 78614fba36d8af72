"""The checks of a GPU, at tiny size on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu_check import CHECKS

ROOT = Path(__file__).parents[2]


def said_by(*options: str) -> list[dict[str, object]]:
    """The lines of results."""
    checked = subprocess.run(
        [sys.executable, "-m", "bench.gpu_check", "--tiny", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr[-3000:]
    return [json.loads(line) for line in checked.stdout.splitlines() if line.startswith("{")]


def done(lines: list[dict[str, object]]) -> list[object]:
    return [line["check"] for line in lines if line["result"] == "done"]


def test_the_engine_passes_its_checks() -> None:
    lines = said_by("--only", "model", "engine")
    assert done(lines) == ["model", "engine"]
    passed = {line["result"] for line in lines if line.get("ok")}
    assert {"boot", "steps", "call_over_a_publish", "counts_while_paused", "weights", "checkpoint"} <= passed


@pytest.mark.campaign
def test_every_check_passes() -> None:
    assert done(said_by("--limit-s", "1800")) == [*CHECKS]
