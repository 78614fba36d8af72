"""Family `sums`: what is 3 + 5? Its runtime: the OpenAI SDK, asynchronous, one client for all episodes."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from swarm.client import Episode, Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CALL_LIMIT_S = 180.0

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = WeakKeyDictionary()


def draw(rng: random.Random) -> tuple[str, str, str]:
    """Id, question, and the expected answer."""
    a, b = sorted((rng.randint(1, 30), rng.randint(1, 30)))
    return f"{a}+{b}", f"What is {a}+{b}? Answer with the number only.", str(a + b)


async def answer(episode: Episode, task: Task) -> str:
    client = _client().with_options(base_url=episode.base_url, api_key=episode.api_key)
    completion = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": task.query}], **episode.sampling
    )
    return completion.choices[0].message.content or ""


async def close() -> None:
    client = _clients.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.close()


def _client() -> AsyncOpenAI:
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        from openai import AsyncOpenAI

        _clients[loop] = AsyncOpenAI(
            base_url="http://per-episode", api_key="per-episode", max_retries=4, timeout=CALL_LIMIT_S
        )
    return _clients[loop]
