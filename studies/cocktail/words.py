"""Family `words`: which word comes first in the alphabet? Its runtime: a blocking agent in a thread, over plain HTTP."""

from __future__ import annotations

import asyncio
import random

import httpx

from swarm.client import Episode, Task

WORDS = (
    "apple", "bread", "candle", "door", "engine", "forest", "garden", "hammer", "island", "jacket", "kettle", "ladder", "mirror",
    "needle", "orange", "pencil", "quilt", "river", "spoon", "table", "umbrella", "violin", "window", "yarn", "zebra",
)  # fmt: skip
CALL_LIMIT_S = 180.0


def draw(rng: random.Random) -> tuple[str, str, str]:
    """Id, question, and the expected answer."""
    chosen = rng.sample(WORDS, 3)
    listed = f"{chosen[0]}, {chosen[1]} or {chosen[2]}"
    return "-".join(sorted(chosen)), f"Which word comes first in the alphabet: {listed}", min(chosen)


async def answer(episode: Episode, task: Task) -> str:
    return await asyncio.to_thread(_ask, episode.base_url, episode.api_key, task.query, dict(episode.sampling))


async def close() -> None:
    """Nothing is kept between episodes."""


def _ask(base_url: str, api_key: str, question: str, sampling: dict[str, object]) -> str:
    body = {"model": "policy", "messages": [{"role": "user", "content": question}], **sampling}
    with httpx.Client(timeout=CALL_LIMIT_S, trust_env="//127.0.0.1" not in base_url) as http:
        reply = http.post(f"{base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {api_key}"})
        return str(reply.raise_for_status().json()["choices"][0]["message"]["content"] or "")
