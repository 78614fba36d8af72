"""The *turns* step of `bench.grpo_step`: four episodes of eight turns, one optimiser step, the new weights served.

Ours is a whole server, with its records and its journal on disk: the agent sends its conversation anew at each turn, as agents
do. A step ends when the server takes claims for the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from bench.clerk import EPISODES, MAX_TOKENS
from bench.record_workloads import serve_as_a_clerk, talker
from bench.serving import ServerProcess
from bench.sums import LEARNING_RATE
from swarm.client import SwarmClient
from swarm.protocol.runspec import RunSpec

_SPEC = RunSpec.model_validate(
    {
        "optimizer": {"learning_rate": LEARNING_RATE},
        "batch": {"tasks": 1, "group_size": EPISODES},
        "sampling": {"temperature": 1.0, "max_tokens": MAX_TOKENS},
    }
)
_LIMIT_S = 300.0
"""For the boot, and for a step."""
_PARTS = ("generate_s", "train_s", "sync_s", "tokens_called", "tokens_computed", "tokens_trained", "reward_mean")

Step = Callable[[int], Awaitable[dict[str, float]]]
"""Number of the step → its seconds, and what it was made of."""


async def with_server(model: str, home: Path, use: Callable[[Step], Awaitable[None]]) -> None:
    """Boot a server with a run on it and let `use` make steps."""
    process = await asyncio.to_thread(
        ServerProcess, home / "state", "--max-model-len", "2048", engine="local", model=model
    )
    with process as server:
        async with SwarmClient(server.url) as client, httpx.AsyncClient(timeout=300, trust_env=False) as http:
            await _until(client, lambda status: status.engine.warm)
            hosted = (await client.status()).model
            run_id = (await client.start_run(_SPEC)).run_id

            async def episode(step: int, slot: int) -> None:
                async with client.episode(task_id=f"turns-{step}", wait_s=120) as begun:
                    coins = await serve_as_a_clerk(talker(http, begun, hosted, f"{step}/{slot}"), step)
                    await begun.end(reward=coins)

            async def step(number: int) -> dict[str, float]:
                began = time.monotonic()
                await asyncio.gather(*(episode(number, slot) for slot in range(EPISODES)))
                await _until(client, lambda status: status.step >= number and status.phase == "rolling")
                seconds = time.monotonic() - began
                values = (await client.run(run_id, since_step=number - 1)).steps[-1].values
                return {"seconds": seconds} | {name: values[name] for name in _PARTS}

            await use(step)


async def _until(client: SwarmClient, reached: Callable[[Any], bool]) -> None:
    """Raises: RuntimeError when the server failed, TimeoutError."""
    async with asyncio.timeout(_LIMIT_S):
        async for status in client.statuses():
            if status.phase == "failed":
                raise RuntimeError(f"the server failed: {status}")
            if reached(status):
                return
