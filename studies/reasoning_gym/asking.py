"""One question to the policy with the plain OpenAI SDK. Knows nothing of tasks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from swarm.client import Episode

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CALL_LIMIT_S = 180.0

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = WeakKeyDictionary()


async def ask(episode: Episode, question: str) -> str:
    """The answer's text; empty where there is none."""
    client = _client(episode.base_url).with_options(base_url=episode.base_url, api_key=episode.api_key)
    completion = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": question}], **episode.sampling
    )
    return completion.choices[0].message.content or ""


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
