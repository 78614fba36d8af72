"""Any family of reasoning-gym, by name: its tasks, one call of the plain OpenAI SDK per episode, and its own scorer."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
from collections.abc import Iterator
from typing import Any, Literal
from weakref import WeakKeyDictionary

from swarm.client import Episode, Outcome, Task

from . import asking
from .families import check, entries, options_of
from .judge import Judge

Split = Literal["train", "heldout"]

HELD_OUT_SHARE = 4
"""One question in this many is never trained on."""
MOST_HELD_OUT = 200
WRITTEN = 0.01
"""For any answer at all: a family's own scorer may give a wrong one nothing."""
_DRAWS = 2_000
"""After as many entries no further held-out one is looked for."""
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

_judges: WeakKeyDictionary[asyncio.AbstractEventLoop, Judge] = WeakKeyDictionary()


def tasks(
    split: Split, seed: int, count: int | None, *, family: str = "chain_sum", options: str = ""
) -> Iterator[Task]:
    """Questions of one family, with `options` for its generator (`max_terms=2 max_digits=1`).

    train: an endless stream (or `count` of them) in an order that depends on `seed`. heldout: `count` different questions, at
    most 200; the same for every seed. No question is in both.
    Raises: MissingPackage; ValueError with the nearest name of a family or option.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be train or heldout, got {split!r}")
    given = options_of(options)
    check(family, given)
    stream = entries(family, given, f"{split}/{seed if split == 'train' else 0}")
    if split == "train":
        mine: Iterator[dict[str, Any]] = (entry for entry in stream if not is_held_out(entry["question"]))
    else:
        count = MOST_HELD_OUT if count is None else min(count, MOST_HELD_OUT)
        mine = _held_out(itertools.islice(stream, _DRAWS))
    return itertools.islice((_task(family, given, entry) for entry in mine), count)


def is_held_out(question: str) -> bool:
    """Whether this question is kept for evaluation. Depends on nothing else."""
    return hashlib.sha256(f"heldout:{question}".encode()).digest()[0] % HELD_OUT_SHARE == 0


async def rollout(episode: Episode, task: Task) -> Outcome:
    """Ask once; the family's own scorer says what the answer is worth."""
    answer = final(await asking.ask(episode, task.query))
    loop = asyncio.get_running_loop()
    judge = _judges.setdefault(loop, Judge())
    metadata = task.metadata
    worth = await judge.score(metadata["family"], metadata["options"], answer, metadata["entry"]) if answer else 0.0
    reward = max(WRITTEN, worth or 0.0) if answer else 0.0
    return Outcome(reward=reward, success=worth == 1.0, metrics={"unscored": float(worth is None)})


def final(answer: str) -> str:
    """What counts of an answer: between <answer> tags where there are any, else all of it."""
    tagged = _TAGGED.findall(answer)
    return (tagged[-1] if tagged else answer).strip()


async def close() -> None:
    """Give back the connections of this event loop, and end its scorer."""
    await asking.close()
    judge = _judges.pop(asyncio.get_running_loop(), None)
    if judge is not None:
        await judge.close()


def _held_out(stream: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those with different held-out questions."""
    seen: set[str] = set()
    for entry in stream:
        if entry["question"] not in seen and is_held_out(entry["question"]):
            seen.add(entry["question"])
            yield entry


def _task(family: str, options: dict[str, Any], entry: dict[str, Any]) -> Task:
    digest = hashlib.sha256(entry["question"].encode()).hexdigest()[:16]
    return Task(
        id=f"{family}:{digest}",
        query=f"{entry['question']}\nAnswer with the final answer only.",
        metadata={"family": family, "options": dict(options), "entry": entry},
    )
