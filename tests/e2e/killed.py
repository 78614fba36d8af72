"""Runs the `researcher` command and dies by SIGKILL at a chosen moment: `killed.py MOMENT researcher-arguments...`.

Two moments only: `tests/researcher/executor/test_kills.py` has nine. They are methods of the product, wrapped from outside.
`before:` dies instead of the call, `after:` right after it; `@N` waits for the Nth time.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

MOMENTS = {
    "mid-trial": ("after", "researcher.store.trials", "Trials.record_progress", 5),
    "while-reporting": ("before", "researcher.store.conclusions", "Reports.save_claims", 1),
}


def _arm(moment: str) -> None:
    when, module, path, nth = MOMENTS[moment]
    owner_name, method = path.split(".")
    owner = getattr(importlib.import_module(module), owner_name)
    original = getattr(owner, method)
    calls = 0

    def die() -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            die()
        answer = original(*args, **kwargs)
        if when == "after":
            die()
        return answer

    setattr(owner, method, wrapped)


if __name__ == "__main__":
    _arm(sys.argv[1])
    from researcher.main import main

    sys.exit(main(sys.argv[2:]))
