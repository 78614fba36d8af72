"""How long does `researcher start --dry-run` take, from the prompt to the plan and its price?

    python -m bench.dry_run [--runs N]

Each case runs as a whole process: once to warm up, uncounted, then N times. The bar is a median below 1 s for each case.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from foundation.arguments import count

MOST_S = 1.0
TOPIC = "Does GRPO learn one-digit sums faster with a learning rate of 4e-5 than with 1e-5?"
CASES = {
    "options": ["--instrument", "arithmetic", "--vary", "learning_rate=1e-5,4e-5"],
    "topic": ["--topic", TOPIC, "--planner", "builtin"],
    "file": ["study.yaml"],
}


def main() -> int:
    """0 where every median is below the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=count, default=9)
    runs = parser.parse_args().runs
    passed = True
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "study.yaml").write_text(_output(folder, "draft", *CASES["options"]), encoding="utf-8")
        for name, options in CASES.items():
            _seconds(folder, options)
            taken = sorted(_seconds(folder, options) for _ in range(runs))
            median = statistics.median(taken)
            passed = passed and median < MOST_S
            figures = {"median_s": round(median, 3), "least_s": round(taken[0], 3), "most_s": round(taken[-1], 3)}
            print(json.dumps({"bench": "dry_run", "case": name, "runs": runs, **figures, "bar_s": MOST_S}))
    print(json.dumps({"bench": "dry_run", "pass": passed}))
    return 0 if passed else 1


def _seconds(folder: Path, options: list[str]) -> float:
    began = time.perf_counter()
    _output(folder, "start", "--dry-run", *options)
    return time.perf_counter() - began


def _output(folder: Path, *command: str) -> str:
    """Raises: CalledProcessError."""
    root = Path(__file__).resolve().parent.parent
    environ = os.environ | {"RESEARCHER_HOME": str(folder / "home"), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-m", "researcher.main", *command],
        cwd=folder,
        env={name: value for name, value in environ.items() if not name.startswith("RESEARCHER_LLM")},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
