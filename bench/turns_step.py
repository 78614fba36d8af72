"""The *turns* step of `bench.grpo_step`: four episodes of eight turns, one optimiser step, the new weights served.

Our side is a whole server with its records and its journal on disk. As usual for agents, ours sends the whole conversation at each
turn. A step ends when the server accepts claims for the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.clerk import EPISODES, MAX_TOKENS
from bench.record_workloads import serve_as_a_clerk, talker
from bench.run_switch import wait_for
from bench.serving import ServerProcess
from bench.sums import STILL
from swarm.client import SwarmClient
from swarm.protocol.runspec import RunSpec

_SPEC = RunSpec.model_validate(
    {
        "optimizer": {"learning_rate": STILL},
        "batch": {"tasks": 1, "group_size": EPISODES},
        "sampling": {"temperature": 1.0, "max_tokens": MAX_TOKENS},
    }
)
_PARTS = ("train_s", "sync_s", "tokens_called", "tokens_computed", "tokens_trained", "reward_mean")


@asynccontextmanager
async def on_a_server(model: str, home: Path) -> AsyncIterator[Callable[[int], Awaitable[dict[str, float]]]]:
    """Start a server with a run. Yields a function that makes the step with a given number and returns its seconds, parts and tokens."""
    async with AsyncExitStack() as opened:
        server = opened.enter_context(
            ServerProcess(home / "state", "--max-model-len", "2048", engine="local", model=model)
        )
        control = opened.enter_context(server.client())
        wait_for(control, lambda status: status["engine"]["warm"], "the engine")
        client = await opened.enter_async_context(SwarmClient(server.url))
        http = await opened.enter_async_context(httpx.AsyncClient(timeout=300, trust_env=False))
        hosted = (await client.status()).model
        run_id = (await client.start_run(_SPEC)).run_id

        async def episode(number: int, slot: int) -> None:
            async with client.episode(task_id=f"turns-{number}", wait_s=120) as begun:
                coins = await serve_as_a_clerk(talker(http, begun, hosted, f"{number}/{slot}"), number)
                await begun.end(reward=coins)

        async def step(number: int) -> dict[str, float]:
            def over(status: dict[str, Any]) -> bool:
                return bool(status["step"] >= number and status["phase"] == "rolling")

            began = time.monotonic()
            await asyncio.gather(*(episode(number, slot) for slot in range(EPISODES)))
            await asyncio.to_thread(wait_for, control, over, f"step {number}")
            seconds = time.monotonic() - began
            values = (await client.run(run_id, since_step=number - 1)).steps[-1].values
            sampled = values["sampled_tokens_mean"] * EPISODES
            return {"seconds": seconds, "sampled_tokens": sampled} | {name: values[name] for name in _PARTS}

        yield step
