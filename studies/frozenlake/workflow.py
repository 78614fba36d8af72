"""Crossing a frozen lake in words: the map is shown, the model answers with a direction, and is shown where that led.

Several turns of the plain OpenAI SDK. Moves are text: a word each, which a small model can say from the first step on.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from swarm.client import Episode, Outcome, Task

from .lake import MOVES, Lake, distance, drawn_map, require_gymnasium
from .reward import score

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Split = Literal["train", "heldout"]

HELD_OUT_SHARE = 4
"""One map in this many is never trained on."""
SIZES = range(3, 9)
MOST_ICE = 0.95
MOST_TURNS = 40
MOST_HELD_OUT = 200
CALL_LIMIT_S = 180.0
ASK = "Answer with one word: left, right, up or down"
_DRAWS = 5_000
"""After as many maps no further held-out one is looked for: there are few small ones."""
_DIRECTION = re.compile(r"\b(" + "|".join(MOVES) + r")\b")

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = WeakKeyDictionary()


def tasks(
    split: Split,
    seed: int,
    count: int | None,
    *,
    size: int = 4,
    turns: int = 8,
    ice: float = 0.8,
    slippery: bool = False,
) -> Iterator[Task]:
    """Maps of `size` by `size` squares, of which a share of `ice` carries, to be crossed in `turns` turns.

    train: an endless stream (or `count` of them) in an order that depends on `seed`. heldout: `count` different maps, at most
    200; the same for every seed. No map is in both. Every one of them can be crossed in that many turns.
    Raises: MissingPackage.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be train or heldout, got {split!r}")
    if size not in SIZES:
        raise ValueError(f"size must lie between {SIZES.start} and {SIZES.stop - 1}, got {size}")
    if not 2 * (size - 1) <= turns <= MOST_TURNS:
        raise ValueError(f"turns must lie between {2 * (size - 1)} (the shortest way) and {MOST_TURNS}, got {turns}")
    if not 0.5 <= ice <= MOST_ICE:
        raise ValueError(
            f"ice must lie between 0.5 and {MOST_ICE} (without holes there is one map of each size), got {ice}"
        )
    require_gymnasium()
    drawn = _maps(random.Random(f"{split}/{seed if split == 'train' else 0}"), size, ice, turns)
    if split == "train":
        maps: Iterator[tuple[str, ...]] = (rows for rows in drawn if not is_held_out(rows))
    else:
        count = MOST_HELD_OUT if count is None else min(count, MOST_HELD_OUT)
        maps = _held_out(itertools.islice(drawn, _DRAWS))
    return itertools.islice((_task(rows, turns, slippery) for rows in maps), count)


def is_held_out(rows: tuple[str, ...]) -> bool:
    """Whether this map is kept for evaluation. Depends on nothing else."""
    return hashlib.sha256(f"heldout:{'/'.join(rows)}".encode()).digest()[0] % HELD_OUT_SHARE == 0


async def rollout(episode: Episode, task: Task) -> Outcome:
    """Play until the goal, a hole, or the last turn."""
    client = _client(episode.base_url).with_options(base_url=episode.base_url, api_key=episode.api_key)
    lake = lake_of(task)
    messages: list[Any] = [{"role": "user", "content": task.query}]
    try:
        while not lake.over:
            completion = await client.chat.completions.create(model="policy", messages=messages, **episode.sampling)
            answer = completion.choices[0].message.content or ""
            said = lake.move(direction(answer))
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"{said}\n{ASK}"}]
    finally:
        lake.close()
    metrics = {"turns": float(lake.used), "moves": float(lake.moves), "fell": float(lake.ended and not lake.reached)}
    return Outcome(reward=score(lake), success=lake.reached, metrics=metrics)


def direction(answer: str) -> str | None:
    """The first direction that an answer names, if any."""
    found = _DIRECTION.search(answer.lower())
    return found.group() if found else None


def lake_of(task: Task) -> Lake:
    """The crossing that a task sets, before the first move."""
    rows = tuple(task.metadata["map"])
    slips = int.from_bytes(hashlib.sha256(task.id.encode()).digest()[:4])
    return Lake(rows, turns=int(task.metadata["turns"]), slippery=bool(task.metadata["slippery"]), seed=slips)


async def close() -> None:
    """Give back the connections of this event loop."""
    client = _clients.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.close()


def _client(base_url: str) -> AsyncOpenAI:
    """One per event loop, whose connections all episodes share; importing the SDK waits for the first episode."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        local = "//127.0.0.1" in base_url or "//localhost" in base_url
        http = DefaultAsyncHttpxClient(trust_env=not local)
        _clients[loop] = AsyncOpenAI(
            base_url=base_url, api_key="per-episode", http_client=http, max_retries=4, timeout=CALL_LIMIT_S
        )
    return _clients[loop]


def _held_out(drawn: Iterator[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Different held-out maps."""
    seen: set[tuple[str, ...]] = set()
    for rows in drawn:
        if rows not in seen and is_held_out(rows):
            seen.add(rows)
            yield rows


def _maps(rng: random.Random, size: int, ice: float, turns: int) -> Iterator[tuple[str, ...]]:
    while True:
        rows = drawn_map(size, ice, rng.randrange(2**31))
        if (distance(rows, 0) or turns) <= turns:
            yield rows


def _task(rows: tuple[str, ...], turns: int, slippery: bool) -> Task:
    start = "@" + rows[0][1:]
    drawn = "\n".join((start, *rows[1:]))
    slips = " The ice is slippery: you may slide to either side." if slippery else ""
    return Task(
        id=f"{'/'.join(rows)}:{turns}{'s' if slippery else ''}",
        query=(
            f"You stand at @ on a frozen lake. Reach G in at most {turns} moves. F is ice, H is a hole: never step on H.{slips}\n"
            f"{drawn}\n{ASK}"
        ),
        metadata={"map": list(rows), "turns": turns, "slippery": slippery},
    )
