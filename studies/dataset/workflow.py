"""Tasks from a data set: a question per row, one call of the plain OpenAI SDK per episode, a reward by name."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import math
import random
from collections.abc import Iterator
from typing import Literal

from swarm.client import Episode, Outcome, Task

from .asking import ask, close
from .rewards import REWARDS, RIGHT, score
from .source import BadSource, Columns, Row, rows

__all__ = ["close", "rollout", "tasks"]

Split = Literal["train", "heldout"]


def tasks(
    split: Split,
    seed: int,
    count: int | None,
    *,
    data: str = "",
    reward: str = "exact",
    question_column: str = "question",
    answer_column: str = "answer",
    instruction: str = "",
    subset: str = "",
    source_split: str = "train",
    heldout_share: float = 0.25,
    heldout_seed: int = 0,
) -> Iterator[Task]:
    """Questions of `data` (see source.py), each followed by `instruction`.

    train: all that are not held out, over and over, each time in a new order, which depends on `seed`; or `count` of them.
    heldout: `count` of `heldout_share` of the different questions, chosen by `heldout_seed`, the same for every seed; at least
    one. Rows with the same question are on the same side.
    Raises: BadSource with the line that is wrong; ValueError.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be train or heldout, got {split!r}")
    if reward not in REWARDS:
        near = difflib.get_close_matches(reward, REWARDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(REWARDS)}"
        raise ValueError(f"there is no reward {reward!r}; {hint}")
    if not 0.0 < heldout_share < 1.0:
        raise ValueError(f"heldout_share must lie between 0 and 1, got {heldout_share}")
    columns = Columns(question_column, answer_column)
    found = rows(data, columns, REWARDS[reward].problem, subset=subset, split=source_split)
    kept = held_out({row.question for row in found}, heldout_share, heldout_seed)
    if split == "heldout":
        mine = {row.question: row for row in reversed(found) if row.question in kept}
        order = sorted(mine, key=lambda question: _rank(question, heldout_seed))
        return itertools.islice((_task(mine[question], reward, instruction) for question in order), count)
    train = [row for row in found if row.question not in kept]
    if not train:
        raise BadSource(f"{data} has {len(kept)} different questions: too few to train on some and hold out others")
    return itertools.islice((_task(row, reward, instruction) for row in _endless(train, seed)), count)


def held_out(questions: set[str], share: float, seed: int) -> set[str]:
    """The questions that are kept for evaluation: this share of them, at least one."""
    ranked = sorted(questions, key=lambda question: _rank(question, seed))
    return set(ranked[: max(1, math.floor(share * len(ranked)))])


async def rollout(episode: Episode, task: Task) -> Outcome:
    """Ask once, compare."""
    reward = score(task.metadata["reward"], await ask(episode, task.query), task.metadata["expected"])
    return Outcome(reward=reward, success=reward == RIGHT)


def _rank(question: str, seed: int) -> bytes:
    return hashlib.sha256(f"heldout:{seed}:{question}".encode()).digest()


def _endless(train: list[Row], seed: int) -> Iterator[Row]:
    rng = random.Random(f"train/{seed}")
    while True:
        yield from rng.sample(train, len(train))


def _task(row: Row, reward: str, instruction: str) -> Task:
    query = f"{row.question} {instruction}".strip()
    digest = hashlib.sha256(f"{reward}\0{query}\0{row.expected}".encode()).hexdigest()[:16]
    return Task(id=digest, query=query, metadata={"expected": row.expected, "reward": reward, "where": row.where})
