"""Numbers to repeat, scored by a grader that can be made to break. One chat call per episode, by plain httpx."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import httpx

from swarm.client import Episode, Outcome, Task, grading

HELD_OUT = 7
"""Numbers that this divides are never trained on."""

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()


def tasks(split: str, seed: int, count: int | None, *, digits: int = 3, brittle: bool = True) -> Iterator[Task]:
    """Numbers of so many digits. heldout: the same for every seed; train: endless."""
    numbers = range(10 ** (digits - 1), 10**digits)
    if split == "heldout":
        chosen = random.Random(0).sample([number for number in numbers if number % HELD_OUT == 0], count or 1)
        return (_task(number, brittle) for number in chosen)
    rng = random.Random(seed)
    endless = (rng.choice(numbers) for _ in itertools.count())
    return itertools.islice((_task(number, brittle) for number in endless if number % HELD_OUT), count)


async def rollout(episode: Episode, task: Task) -> Outcome:
    """Ask once; the share of digits that are right, and no number for some wrong answers where the grader is brittle."""
    answer = await _client().post(
        f"{episode.base_url}/chat/completions",
        headers={"Authorization": f"Bearer {episode.api_key}"},
        json={"model": "policy", "messages": [{"role": "user", "content": task.query}], **episode.sampling},
    )
    answer.raise_for_status()
    said = (answer.json()["choices"][0]["message"]["content"] or "").strip()
    wanted = str(task.metadata["number"])
    with grading():
        if task.metadata["brittle"] and len(wanted) == 4 and said != wanted and (episode.grant.slot or 1) % 2 == 0:
            raise ArithmeticError(f"{said!r} cannot be compared with {wanted}")
    right = sum(a == b for a, b in zip(said, wanted, strict=False)) / len(wanted)
    return Outcome(reward=right, success=said == wanted)


async def close() -> None:
    """Give back the connections of this event loop."""
    client = _clients.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.aclose()


def _client() -> httpx.AsyncClient:
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = httpx.AsyncClient(timeout=60.0, trust_env=False)
    return _clients[loop]


def _task(number: int, brittle: bool) -> Task:
    return Task(id=str(number), query=f"Repeat this number: {number}", metadata={"number": number, "brittle": brittle})
