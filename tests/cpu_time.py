"""What a fresh Python costs, for the few promises of ours that are about starting."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def runs_within(limit_s: float, code: str, *arguments: str, forbidden: Sequence[str] = (), tries: int = 3) -> str:
    """What `code` prints in a Python of its own, once that took less CPU time than `limit_s`.

    The best of `tries`: a machine under load makes any one of them slow. forbidden: modules that it may not load.
    Raises: AssertionError.
    """
    script = f"{code}\nimport sys\nsys.exit(', '.join(m for m in {tuple(forbidden)!r} if m in sys.modules) or 0)"
    taken = []
    for _ in range(tries):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if taken[-1] < limit_s:
            return done.stdout
    raise AssertionError(f"{' '.join(arguments) or code}: {min(taken):.2f} s of CPU time, of {taken}")
