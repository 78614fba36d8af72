"""What a repository is worth as an agent left it."""

from __future__ import annotations

RIGHT = 1.0
HARMLESS = 0.1
"""For a change of the code that breaks nothing."""
MENDED = 0.7
"""On top, by the share of the failing hidden tests that pass now, and of the others that still do."""


def score(fixed: float, kept: float, *, changed: bool) -> float:
    """1.0 when every hidden test passes; else 0.0 (the code is as it was) up to 0.8.

    fixed: share of those that failed which pass now. kept: share of those that passed which still do. changed: the code is not what it
    was; what was done to the tests counts for nothing.

    >>> [score(1.0, 1.0, changed=True), score(0.25, 1.0, changed=True), score(0.0, 1.0, changed=True)]
    [1.0, 0.275, 0.1]
    >>> [score(0.0, 0.5, changed=True), score(0.0, 1.0, changed=False)]
    [0.0, 0.0]
    """
    if fixed == kept == 1.0:
        return RIGHT
    if not changed:
        return 0.0
    return HARMLESS * (kept == 1.0) + MENDED * fixed * kept
