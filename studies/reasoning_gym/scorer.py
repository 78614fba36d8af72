"""A process that scores answers by the families' own scorers: `python scorer.py`, a request per line, a score per line.

Apart from the client because some scorers evaluate an answer as Python: what a model wrote then runs here, with no secrets
in the environment, limited memory, no files to write, and somebody outside who ends it when it takes too long.
A request is a pickled (family, options, answer, entry) in base64, from the client that started this process.
"""

from __future__ import annotations

import base64
import os
import pickle
import resource
import sys
from typing import Any

MEMORY = 4 << 30
"""Bytes of address space."""

_datasets: dict[tuple[str, str], Any] = {}


def main() -> None:
    # What an answer prints must not be taken for a score.
    scores = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import reasoning_gym  # noqa: F401 - before the limits, since its import takes more

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    scores.write("ready\n")
    scores.flush()
    for line in sys.stdin:
        scores.write(f"{_score(*pickle.loads(base64.b64decode(line)))}\n")
        scores.flush()


def _score(family: str, options: dict[str, Any], answer: str, entry: dict[str, Any]) -> float:
    """0.0 to 1.0. An answer that the scorer cannot even read is wrong."""
    key = family, repr(sorted(options.items()))
    if key not in _datasets:
        from reasoning_gym import create_dataset

        _datasets[key] = create_dataset(family, seed=0, size=1, **options)
    try:
        return min(1.0, max(0.0, float(_datasets[key].score_answer(answer, entry))))
    except Exception:  # noqa: BLE001 - whatever a scorer raises over what a model wrote, the answer is wrong
        return 0.0


if __name__ == "__main__":
    main()
