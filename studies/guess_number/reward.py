"""What a game is worth."""

from __future__ import annotations

from .game import Game

FOUND = 1.0
LATE = 0.3
"""What the last possible turn costs against the first."""
NEAR = 0.4
"""For guesses that end right beside the secret."""
PLAYED = 0.1
"""For any guess at all."""


def score(game: Game) -> float:
    """Found: 1.0 in the first turn, down to 0.7 in the last. Not found: 0.1 to 0.5, by how near the last guess came.

    Without any guess 0.0. A guess outside the range counts as one at its far end.
    """
    if game.solved:
        return FOUND - LATE * (game.used - 1) / max(1, game.turns - 1)
    if not game.guesses:
        return 0.0
    width = max(1, game.high - game.low)
    off = min(width, abs(game.guesses[-1] - game.secret)) / width
    return PLAYED + NEAR * (1.0 - off)
