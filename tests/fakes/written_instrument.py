"""What an LLM says that writes an instrument: words to repeat, which the echo engine can learn."""

from __future__ import annotations

from typing import Any

WORKFLOW = """
import asyncio
import hashlib
import itertools
import random

import httpx

from swarm.client import Episode, Outcome, Task

from .reward import score

_PARTS = ("ba", "de", "fi", "go", "ku", "la", "me", "no", "pi", "ra", "so", "tu", "vi", "wo", "ze")
_clients = {}


def tasks(split, seed, count):
    words = ["".join(parts) for parts in itertools.product(_PARTS, repeat=2)]
    mine = [word for word in words if (hashlib.sha256(word.encode()).digest()[0] % 4 == 0) == (split == "heldout")]
    rng = random.Random("heldout" if split == "heldout" else seed)
    rounds = range(1) if split == "heldout" else itertools.count()
    line = itertools.chain.from_iterable(rng.sample(mine, len(mine)) for _ in rounds)
    for word in itertools.islice(line, count):
        yield Task(id=word, query=f"Repeat this word: {word}", metadata={"right": word})


async def rollout(episode: Episode, task: Task) -> Outcome:
    client = _clients.setdefault(asyncio.get_running_loop(), httpx.AsyncClient(timeout=60.0, trust_env=False))
    answer = await client.post(
        f"{episode.base_url}/chat/completions",
        headers={"Authorization": f"Bearer {episode.api_key}"},
        json={"model": "policy", "messages": [{"role": "user", "content": task.query}], **episode.sampling},
    )
    answer.raise_for_status()
    reward = score(answer.json()["choices"][0]["message"]["content"] or "", task.metadata["right"])
    return Outcome(reward=reward, success=reward == 1.0)


def examples(task):
    return {"right": task.metadata["right"], "wrong": "zzz", "empty": ""}


async def close():
    client = _clients.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.aclose()
"""
LENGTH = {
    "name": "parts",
    "type": "int",
    "default": 2,
    "low": 1,
    "high": 3,
    "choices": [],
    "aliases": ["syllables", "word length"],
    "description": "Syllables of a word.",
}
WITH_LENGTH = WORKFLOW.replace("seed, count):", "seed, count, *, parts=2):").replace("repeat=2", "repeat=parts")
"""The same with a factor of its own, `LENGTH`."""
REWARD = """
def score(answer, right):
    return 1.0 if answer.strip() == right else 0.0
"""


def written(workflow: str = WORKFLOW, reward: str = REWARD, **changes: Any) -> dict[str, Any]:
    return {
        "name": "parrot",
        "title": "Repeating a made-up word",
        "description": "The model repeats a word.",
        "keywords": ["parrot", "repeat", "word"],
        "max_tokens": 8,
        "factors": [],
        "workflow": workflow,
        "reward": reward,
        **changes,
    }
