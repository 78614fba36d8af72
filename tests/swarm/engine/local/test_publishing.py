"""Weights that are published while the child that shall serve them is being started; vLLM is not."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from foundation.clock import SystemClock
from swarm.engine.local.inference import VllmInference
from swarm.engine.sampling.client import VllmClient
from swarm.engine.sampling.server import ServedAdapter, VllmSettings
from swarm.engine.training.supervisor import BackOff, ChildCommand, ChildProcess
from swarm.models.folder import ModelFolder
from swarm.protocol.episodes import WeightsVersion

pytestmark = pytest.mark.anyio


class Starts:
    """Starts of children, each of which waits at the gate; served: with which adapter, or none, each was started."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self.served: list[str | None] = []
        self._start = ChildProcess.start

    async def start(self, command: ChildCommand) -> ChildProcess:
        self.served.append(next((str(arg) for arg in command.argv if "adapter" in arg), None))
        self.begun.set()
        await self.gate.wait()
        return await self._start(replace(command, argv=[sys.executable, "-c", "import time; time.sleep(600)"]))


@pytest.fixture
async def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    async def healthy(_: VllmClient) -> bool:
        return True

    async def replace_adapter(_: VllmClient, name: str, folder: Path) -> None: ...

    async def forget_prefixes(_: VllmClient) -> None: ...

    made = Starts()
    monkeypatch.setattr(VllmClient, "replace_adapter", replace_adapter)
    monkeypatch.setattr(VllmClient, "forget_prefixes", forget_prefixes)
    monkeypatch.setattr(ChildProcess, "start", made.start)
    monkeypatch.setattr(VllmClient, "healthy", healthy)
    monkeypatch.setattr(VllmSettings, "check_memory", lambda _: None)
    return made


@pytest.fixture
async def inference(tiny_llama: ModelFolder, tmp_path: Path, starts: Starts) -> AsyncIterator[VllmInference]:
    settings = VllmSettings(model_dir=tiny_llama.path, model_name="tiny", log_path=tmp_path / "log")
    made = VllmInference(settings, clock=SystemClock(), back_off=BackOff(first_s=0.01))
    try:
        yield made
    finally:
        starts.gate.set()
        await made.shutdown()


async def test_an_adapter_published_while_a_crashed_child_is_started_again_is_what_the_next_one_serves(
    inference: VllmInference, starts: Starts, tmp_path: Path
) -> None:
    starts.gate.set()
    await inference.boot()
    starts.gate.clear()
    starts.begun.clear()
    assert inference._supervisor.child is not None
    await inference._supervisor.child.stop(grace_s=0)
    async with asyncio.timeout(20):
        await starts.begun.wait()
        adapter = ServedAdapter(folder=tmp_path / "adapter", rank=8)
        published = asyncio.create_task(
            inference.publish(None, WeightsVersion(run_id="run-1", step=1), adapter=adapter)
        )
        await asyncio.sleep(0)
        starts.gate.set()
        await published
        await inference.settled()
    assert inference.health.ready
    assert starts.served[:2] == [None, None]
    assert starts.served[-1] is not None
