"""Three families of tasks in one training, in given shares.

Here one process plays all of them, for trials and for held-out evaluation. For a training at full speed each family has a client
process of its own (client.py), so that a slow one holds up nobody: the server's `batch.mix` keeps the shares.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from swarm.client import Episode, Outcome, Task

from .families import FAMILIES, Split, family_of

MOST_HELD_OUT = 90


def tasks(split: Split, seed: int, count: int | None) -> Iterator[Task]:
    """All families, always the one that is furthest behind its share.

    train: an endless stream in an order that depends on `seed`. heldout: at most 90 different tasks, the same for every seed.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be train or heldout, got {split!r}")
    streams = {name: family.tasks(split, seed) for name, family in FAMILIES.items()}
    if split == "heldout":
        count = MOST_HELD_OUT if count is None else min(count, MOST_HELD_OUT)
    return itertools.islice((next(streams[name]) for name in order()), count)


def order() -> Iterator[str]:
    """Names of families, for ever, in their shares: over any stretch each is at most one task away from its share."""
    debt = dict.fromkeys(FAMILIES, 0.0)
    while True:
        for name, family in FAMILIES.items():
            debt[name] += family.share
        name = max(debt, key=lambda each: debt[each])
        debt[name] -= 1.0
        yield name


async def rollout(episode: Episode, task: Task) -> Outcome:
    """As the family of the task has it."""
    return await family_of(task).rollout(episode, task)


async def close() -> None:
    for family in FAMILIES.values():
        await family.close()
