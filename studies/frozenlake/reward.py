"""What a crossing is worth."""

from __future__ import annotations

from .lake import Lake, distance

REACHED = 1.0
LATE = 0.3
"""What reaching the goal in the last turn costs against the shortest way."""
PLAYED = 0.1
"""For any move at all."""
NEAR = 0.4
"""For standing right before the goal when the turns are used up; nothing for standing where one began."""


def score(lake: Lake) -> float:
    """Reached: 1.0 by the shortest way, down to 0.7 in the last turn. Not reached: 0.1 to 0.5 by how near; in a hole 0.1.

    Without any move 0.0.
    """
    shortest = distance(lake.rows, 0) or 1
    if lake.reached:
        spare = max(1, lake.turns - shortest)
        return REACHED - LATE * min(1.0, max(0, lake.used - shortest) / spare)
    if not lake.moves:
        return 0.0
    left = lake.left
    if left is None:
        return PLAYED
    return PLAYED + NEAR * max(0.0, 1.0 - left / shortest)
