"""The three families, their shares, and their tasks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from swarm.client import Episode, Outcome, Task

from . import larger, sums, words
from .reward import RIGHT, score

Split = Literal["train", "heldout"]

HELD_OUT_SHARE = 4
"""One task in this many is never trained on."""


@dataclass(frozen=True, slots=True)
class Family:
    """name: under which the server balances it (`batch.mix`). share: of the train tasks."""

    name: str
    share: float
    draw: Callable[[random.Random], tuple[str, str, str]]
    answer: Callable[[Episode, Task], Awaitable[str]]
    close: Callable[[], Awaitable[None]]

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Tasks of this family for ever, in an order that depends on `seed`; held-out ones do not, and are all different."""
        rng = random.Random(f"{self.name}/{split}/{seed if split == 'train' else 0}")
        seen: set[str] = set()
        while True:
            key, query, expected = self.draw(rng)
            if is_held_out(self.name, key) != (split == "heldout") or (split == "heldout" and key in seen):
                continue
            seen.add(key)
            yield Task(id=f"{self.name}:{key}", query=query, metadata={"expected": expected}, mix=self.name)

    async def rollout(self, episode: Episode, task: Task) -> Outcome:
        reward = score(await self.answer(episode, task), str(task.metadata["expected"]))
        return Outcome(reward=reward, success=reward == RIGHT)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("sums", 0.4, sums.draw, sums.answer, sums.close),
        Family("words", 0.3, words.draw, words.answer, words.close),
        Family("larger", 0.3, larger.draw, larger.answer, larger.close),
    )
}


def family_of(task: Task) -> Family:
    return FAMILIES[task.id.partition(":")[0]]


def is_held_out(family: str, key: str) -> bool:
    """Whether this task is kept for evaluation. Depends on nothing else."""
    return hashlib.sha256(f"heldout:{family}:{key}".encode()).digest()[0] % HELD_OUT_SHARE == 0
