"""Gymnasium's FrozenLake as a game of words: a map, moves, and where they led. Knows no model."""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.client import SwarmError

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
"""Words, and the numbers that Gymnasium knows them by."""
HERE = "@"


class MissingPackage(SwarmError):
    """A package that this instrument needs is not installed."""


def require_gymnasium() -> None:
    """Raises: MissingPackage, saying what to install."""
    if importlib.util.find_spec("gymnasium") is None:
        pins = Path(__file__).with_name("requirements.txt")
        raise MissingPackage(
            f"frozenlake needs gymnasium, which is not installed here: `researcher instruments --install frozenlake`, "
            f"or pip install --no-deps -r {pins}"
        )


def drawn_map(size: int, ice: float, seed: int) -> tuple[str, ...]:
    """A map with a way from S to G, the same for the same seed."""
    require_gymnasium()
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    return tuple(generate_random_map(size=size, p=ice, seed=seed))


@dataclass(slots=True)
class Lake:
    """One crossing. rows: of S, F (ice), H (hole) and G. Every turn counts, also one without a move.

    slippery: a move goes to either side as often as where it should; drawn from `seed`, so that the same moves lead to the same place.
    """

    rows: tuple[str, ...]
    turns: int
    slippery: bool
    seed: int
    used: int = 0
    moves: int = 0
    """Turns that named a direction."""
    at: int = 0
    """Number of the square, row by row."""
    ended: bool = False
    """On the goal or in a hole."""
    _env: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require_gymnasium()
        import gymnasium

        self._env = gymnasium.make(
            "FrozenLake-v1",
            desc=list(self.rows),
            is_slippery=self.slippery,
            max_episode_steps=self.turns,
            disable_env_checker=True,
        )
        self.at = int(self._env.reset(seed=self.seed)[0])

    @property
    def reached(self) -> bool:
        return self._square == "G"

    @property
    def over(self) -> bool:
        return self.ended or self.used >= self.turns

    @property
    def left(self) -> int | None:
        """Moves to the goal from here, on the shortest way without slipping; None from a hole."""
        return distance(self.rows, self.at)

    def move(self, word: str | None) -> str:
        """One turn, and what is said to it. None: the turn named no direction."""
        self.used += 1
        if word is None:
            return f"That is no move.\n{self.shown()}"
        self.moves += 1
        square, _, self.ended, _, _ = self._env.step(MOVES[word])
        self.at = int(square)
        if self.ended:
            return "You reached the goal." if self.reached else "You fell into a hole."
        return self.shown()

    def shown(self) -> str:
        """The map with the player on it."""
        size = len(self.rows[0])
        lines = [list(row) for row in self.rows]
        lines[self.at // size][self.at % size] = HERE
        return "\n".join("".join(line) for line in lines)

    def close(self) -> None:
        self._env.close()

    @property
    def _square(self) -> str:
        return "".join(self.rows)[self.at]


def distance(rows: Sequence[str], start: int) -> int | None:
    """Moves from a square to the goal, around the holes; None where there is no way."""
    size, squares = len(rows[0]), "".join(rows)
    reached, waiting = {start: 0}, deque([start])
    while waiting:
        at = waiting.popleft()
        if squares[at] == "G":
            return reached[at]
        if squares[at] == "H":
            continue
        row, column = divmod(at, size)
        for r, c in ((row, column - 1), (row + 1, column), (row, column + 1), (row - 1, column)):
            if 0 <= r < len(rows) and 0 <= c < size and r * size + c not in reached:
                reached[r * size + c] = reached[at] + 1
                waiting.append(r * size + c)
    return None
