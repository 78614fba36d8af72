"""Words to repeat: what the echo engine can learn. One chat call per episode, by plain httpx."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import httpx

from swarm.client import Episode, Outcome, Task

SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "no", "pi", "ra", "so", "tu", "vi", "wo", "ze")
CALL_LIMIT_S = 60.0

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()


def tasks(split: str, seed: int, count: int | None, *, syllables: int = 2) -> Iterator[Task]:
    """Words of so many syllables; a quarter of them is held out. heldout: the same for every seed; train: endless."""
    words = ["".join(parts) for parts in itertools.product(SYLLABLES, repeat=syllables)]
    if split == "heldout":
        chosen = random.Random("heldout").sample([word for word in words if _held_out(word)], count or 1)
        return map(_task, chosen)
    return itertools.islice(map(_task, _endless([word for word in words if not _held_out(word)], seed)), count)


async def rollout(episode: Episode, task: Task) -> Outcome:
    """Ask once; right is right."""
    answer = await _client().post(
        f"{episode.base_url}/chat/completions",
        headers={"Authorization": f"Bearer {episode.api_key}"},
        json={"model": "policy", "messages": [{"role": "user", "content": task.query}], **episode.sampling},
    )
    answer.raise_for_status()
    said = answer.json()["choices"][0]["message"]["content"] or ""
    right = said.strip() == task.metadata["word"]
    return Outcome(reward=float(right), success=right)


async def close() -> None:
    """Give back the connections of this event loop."""
    client = _clients.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.aclose()


def _client() -> httpx.AsyncClient:
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = httpx.AsyncClient(timeout=CALL_LIMIT_S, trust_env=False)
    return _clients[loop]


def _held_out(word: str) -> bool:
    return hashlib.sha256(word.encode()).digest()[0] % 4 == 0


def _endless(words: list[str], seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        yield from rng.sample(words, len(words))


def _task(word: str) -> Task:
    return Task(id=word, query=f"Repeat this word: {word}", metadata={"word": word})
