"""Countdown: reach a target with each of some numbers used once. One call of the plain OpenAI SDK per episode."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Literal

from swarm.client import Episode, Outcome, Task

from .asking import ask, close
from .reward import RIGHT, score

__all__ = ["close", "is_held_out", "rollout", "tasks"]

Split = Literal["train", "heldout"]

HELD_OUT_SHARE = 4
"""One countdown in this many is never trained on."""
FEWEST, MOST = 2, 5
"""Numbers of a countdown."""
LARGEST_BELOW = range(5, 100)
MOST_TARGET = 199
MOST_HELD_OUT = 200
_DRAWS = 20_000
"""After as many draws no further held-out countdown is looked for."""


def tasks(split: Split, seed: int, count: int | None, *, numbers: int = 3, largest: int = 20) -> Iterator[Task]:
    """Countdowns of `numbers` numbers from 1 to `largest`, all of which can be solved.

    train: an endless stream (or `count` of them) in an order that depends on `seed`. heldout: `count` different ones, at
    most 200; the same for every seed. None is in both, in whatever order its numbers stand.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be train or heldout, got {split!r}")
    if not FEWEST <= numbers <= MOST:
        raise ValueError(f"numbers must lie between {FEWEST} and {MOST}, got {numbers}")
    if largest not in LARGEST_BELOW:
        raise ValueError(f"largest must lie between {LARGEST_BELOW.start} and {LARGEST_BELOW.stop - 1}, got {largest}")
    if split == "train":
        drawn = _drawn(random.Random(f"train/{seed}"), numbers, largest)
        return itertools.islice((_task(*each) for each in drawn if not is_held_out(*each)), count)
    most = MOST_HELD_OUT if count is None else min(count, MOST_HELD_OUT)
    return itertools.islice(_held_out(numbers, largest), most)


def is_held_out(numbers: Sequence[int], target: int) -> bool:
    """Whether this countdown is kept for evaluation, in whatever order its numbers stand. Depends on nothing else."""
    text = f"heldout:{sorted(numbers)}:{target}"
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_SHARE == 0


async def rollout(episode: Episode, task: Task) -> Outcome:
    """Ask once, score the expression."""
    answer = await ask(episode, task.query)
    reward = score(answer, task.metadata["numbers"], int(task.metadata["target"]))
    return Outcome(reward=reward, success=reward == RIGHT)


def _task(numbers: Sequence[int], target: int) -> Task:
    shown = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    return Task(
        id=f"{','.join(map(str, numbers))}={target}",
        query=(
            f"Write an arithmetic expression that equals {target}. Use each of the numbers {shown} exactly once, with "
            "+, -, * and /. Answer with the expression only, such as (2+7)*3"
        ),
        metadata={"numbers": list(numbers), "target": target},
    )


def _held_out(numbers: int, largest: int) -> Iterator[Task]:
    """Different held-out countdowns in a fixed order."""
    seen: set[tuple[tuple[int, ...], int]] = set()
    for drawn, target in itertools.islice(
        _drawn(random.Random(f"heldout/{numbers}/{largest}"), numbers, largest), _DRAWS
    ):
        key = tuple(sorted(drawn)), target
        if is_held_out(drawn, target) and key not in seen:
            seen.add(key)
            yield _task(drawn, target)


def _drawn(rng: random.Random, count: int, largest: int) -> Iterator[tuple[list[int], int]]:
    """Numbers and a target that some expression of them reaches, for ever."""
    while True:
        numbers = [rng.randint(1, largest) for _ in range(count)]
        target = _reached(rng, numbers)
        if target is not None and target not in numbers:
            yield numbers, target


def _reached(rng: random.Random, numbers: Sequence[int]) -> int | None:
    """What the numbers come to when two at a time are joined by some operation; None for what is no likely target."""
    left = list(numbers)
    while len(left) > 1:
        rng.shuffle(left)
        a, b = left.pop(), left.pop()
        choices = [a + b, a * b, *([a - b] if a > b else []), *([a // b] if a % b == 0 else [])]
        left.append(rng.choice(choices))
    return left[0] if 1 <= left[0] <= MOST_TARGET else None
