"""A service, a training_loop and an engine in one process, and a client that goes straight to the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from foundation.clock import ManualClock
from foundation.ids import RandomIds
from swarm.engine.seam import SampleRequest
from swarm.protocol.episodes import (
    EpisodeClaim,
    EpisodeGrant,
    EpisodeReceipt,
    EpisodeResult,
    RecordedCall,
    RecordedSampling,
)
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.runspec import RunSpec
from swarm.protocol.status import Phase, RunRequest
from swarm.server.service import Service
from swarm.server.state.calls import OpenCall
from swarm.server.storage.store import Store
from swarm.server.training_loop import TrainingLoop
from tests.fakes.engine import FaultyEngine

PATIENCE_S = 20.0
"""Of real time, before a test that waits gives up."""


def spec(**fields: Any) -> RunSpec:
    """Two groups of two per step, one step at a time."""
    stated: dict[str, Any] = {
        "batch": {"tasks": 2, "group_size": 2, "group_patience_s": 60, "partial_min": 1},
        "max_staleness": 0,
        "limits": {"steps": 3},
        "checkpoint": {"every_steps": 2},
    }
    for name, value in fields.items():
        stated[name] = {**stated.get(name, {}), **value} if isinstance(value, dict) else value
    return RunSpec.model_validate(stated)


class World:
    """One process of a server. Leave it with `stop`, or by dying: just forget it."""

    def __init__(self, folder: Path, engine: FaultyEngine, clock: ManualClock, store: Store | None = None) -> None:
        self.folder = folder
        self.engine = engine
        self.clock = clock
        self.store = store or Store(folder / "pool" / "pool.sqlite")
        self.service = Service(self.store, engine.info, clock=clock, ids=RandomIds())
        self.training_loop = TrainingLoop(self.service, engine, clock=clock, runs_dir=folder / "runs")
        self.task: asyncio.Task[None] | None = None
        self.run_id = ""

    async def start(self) -> None:
        await self.service.start()
        self.task = asyncio.create_task(self.training_loop.run())

    async def stop(self) -> None:
        await self.die()
        await self.service.close()

    async def die(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds; looked at after each change that watchers hear of at once."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                if self.task is not None and self.task.done():
                    self.task.result()
                await self.service.watchers.wait(self.service.watchers.revision, 1e12)

    async def until_phase(self, phase: Phase) -> None:
        await self.until(lambda: self.service.state.situation.shown_phase is phase)

    async def until_step(self, step: int) -> None:
        await self.until(lambda: (run := self.service.state.run) is not None and run.step >= step)

    @property
    def step(self) -> int:
        """The newest step of the run that is done."""
        run = self.service.state.run
        return 0 if run is None else run.step

    async def until_status(self, status: str) -> None:
        await self.until(lambda: self.has_status(status))

    async def begin(self, **fields: Any) -> str:
        """Start a run and wait until it takes claims."""
        created = await self.service.create_run(RunRequest(spec=spec(**fields)), by="tester")
        self.run_id = created.run_id
        await self.until_phase(Phase.ROLLING)
        return self.run_id

    async def pause(self) -> None:
        """Let everything run that waits for neither time nor a client: tasks, writes, reads."""
        for _ in range(5):
            await asyncio.sleep(0)
            await self.service.read(lambda reader: None)
            await self.service.search(lambda reader: None)
            await asyncio.wait([self.service._commits.last()])

    async def passes(self, seconds: float) -> None:
        """Time passes, and what was due is done."""
        await self.pause()
        self.clock.advance(seconds)
        await self.pause()

    async def hurry(self, condition: Callable[[], bool]) -> None:
        """Let time fly until it holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await self.passes(1.0)

    def has_status(self, status: str) -> bool:
        run = self.service.state.run
        return run is not None and run.row.status == status

    # -- the client ---------------------------------------------------------------------------------------------------

    def wish(self, task_id: str = "t-1", **fields: Any) -> EpisodeClaim:
        stated: dict[str, Any] = {"run_id": self.run_id, "client_id": "c-1", "task_id": task_id, "wait_s": 0}
        return EpisodeClaim.model_validate(stated | fields)

    async def claim(self, task_id: str = "t-1", **fields: Any) -> EpisodeGrant:
        return await self.service.claim(self.wish(task_id, **fields))

    async def call(self, lease: EpisodeGrant) -> bool:
        """One call of the model; whether it counted."""
        opened = self.service.open_call(lease.episode_id, lease.lease)
        return self.service.close_call(opened, await self.sampled(opened))

    async def sampled(self, opened: OpenCall) -> RecordedCall:
        body = {"messages": [{"role": "user", "content": "echo this"}], "seed": opened.seed, "max_tokens": 8}
        body["temperature"] = 1.0
        sampled = await self.engine.sample(SampleRequest(dialect="chat.completions", body=body))
        choice = sampled.choices[0]
        return RecordedCall(
            call_id=f"{opened.episode_id}-{opened.index}",
            episode_id=opened.episode_id,
            index=opened.index,
            agent=None,
            dialect="chat.completions",
            prompt_ids=sampled.prompt_ids,
            sampled_ids=choice.sampled_ids,
            logprobs=choice.logprobs,
            sampling=RecordedSampling(temperature=1.0),
            versions=choice.versions,
            finish_reason=choice.finish_reason,
            started_at=opened.opened_at,
            latency_s=0.1,
        )

    async def end(self, lease: EpisodeGrant, reward: float = 1.0, **fields: Any) -> EpisodeReceipt:
        return await self.service.end(lease.episode_id, EpisodeResult(lease=lease.lease, reward=reward, **fields))

    async def episode(self, task_id: str = "t-1", reward: float = 1.0, **fields: Any) -> EpisodeGrant:
        """A whole episode of one call."""
        lease = await self.claim(task_id, wait_s=1e2, **fields)
        await self.call(lease)
        await self.end(lease, reward, success=reward > 0)
        return lease

    async def batch(self, **fields: Any) -> list[EpisodeGrant]:
        """What one step of `spec()` needs."""
        return [
            await self.episode(task, reward, **fields)
            for task, reward in (("t-1", 0.0), ("t-1", 1.0), ("t-2", 1.0), ("t-2", 0.0))
        ]

    async def refused(self, action: Any) -> Refusal:
        """The refusal that an awaitable ends in."""
        try:
            await action
        except Refusal as refusal:
            return refusal
        raise AssertionError("it was not refused")

    async def states(self) -> list[str]:
        """What became of every episode, in the order of the claims: `trained 1`, `dropped expired`, `ended`, …"""
        page = await self.service.ledger(limit=1000)
        return [f"{e.state} {e.reason or e.step or ''}".strip() for e in page.entries]


@asynccontextmanager
async def running(
    folder: Path, engine: FaultyEngine | None = None, clock: ManualClock | None = None
) -> AsyncIterator[World]:
    """A server that is booted and idle, or goes on with what the folder holds."""
    world = World(folder, engine or FaultyEngine(), clock or ManualClock())
    await world.start()
    try:
        yield world
    finally:
        await world.stop()


__all__ = ["ErrorCode", "World", "running", "spec"]
