"""Words that two models repeat, each on its own server and for its own reward: both learn, in the same teams."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping
from weakref import WeakKeyDictionary

import httpx

from swarm.client import Episode, Partner, Task, team

SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "no", "pi", "ra", "so", "tu", "vi", "wo", "ze")

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()
_partners: dict[str, Partner] = {}


def meet(partners: Mapping[str, Partner]) -> None:
    _partners.update(partners)


def tasks(split: str, seed: int, count: int | None, *, syllables: int = 2) -> Iterator[Task]:
    words = ["".join(parts) for parts in itertools.product(SYLLABLES, repeat=syllables)]
    mine = [word for word in words if (hashlib.sha256(word.encode()).digest()[0] % 4 == 0) == (split == "heldout")]
    rng = random.Random("heldout" if split == "heldout" else seed)
    turns = itertools.count() if split == "train" else range(1)
    stream = itertools.chain.from_iterable(rng.sample(mine, len(mine)) for _ in turns)
    return (
        Task(id=word, query=f"Repeat this word: {word}", metadata={"word": word})
        for word in itertools.islice(stream, count)
    )


async def rollout(episode: Episode, task: Task) -> None:
    async with team(first=episode, second=_partners["second"].episode_with(episode)) as both:
        said = {name: await _ask(both[name], task.query) for name in ("first", "second")}
        rewards = {name: float(words == task.metadata["word"]) for name, words in said.items()}
        both.end(rewards=rewards, success=all(rewards.values()))


async def close() -> None:
    client = _clients.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.aclose()


async def _ask(episode: Episode, query: str) -> str:
    client = _clients.setdefault(asyncio.get_running_loop(), httpx.AsyncClient(timeout=60.0, trust_env=False))
    answer = await client.post(
        f"{episode.base_url}/chat/completions",
        headers={"Authorization": f"Bearer {episode.api_key}"},
        json={"model": "policy", "messages": [{"role": "user", "content": query}], **episode.sampling},
    )
    return str(answer.raise_for_status().json()["choices"][0]["message"]["content"] or "").strip()
