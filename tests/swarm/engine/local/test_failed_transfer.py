"""Transfers of weights over the device that fail on inference's side; vLLM and the trainer are not started."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from foundation.clock import SystemClock
from swarm.engine.local.engine import LocalEngine
from swarm.engine.local.weight_slots import checksum_of
from swarm.engine.sampling.client import VllmClient
from swarm.engine.sampling.server import VllmSettings
from swarm.engine.seam import EngineError, EngineHung, TrainerCrashed
from swarm.engine.training.supervisor import BackOff, ChildCommand, ChildProcess
from swarm.models.folder import ModelFolder
from swarm.protocol.episodes import WeightsVersion

pytestmark = pytest.mark.anyio
CALLS = ("healthy", "pause", "sampled_counts", "take_weights", "replace_weights", "forget_prefixes", "resume")


class Ends:
    """What stands in for vLLM and the trainer. pauses, fails: what inference answers a pause and a transfer with; sends, exports: what the
    trainer does."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pauses: EngineError | None = None
        self.fails: EngineError | None = None
        self.sends: EngineError | None = None
        self.exports: EngineError | None = None
        self.starts = self.taken = self.replaced = self.step = 0
        self._start = ChildProcess.start
        for name in CALLS:
            patch.setattr(VllmClient, name, getattr(self, name))
        patch.setattr(ChildProcess, "start", self.start)
        patch.setattr(VllmSettings, "check_memory", lambda _: None)

    async def start(self, command: ChildCommand) -> ChildProcess:
        self.starts += 1
        return await self._start(replace(command, argv=[sys.executable, "-c", "import time; time.sleep(600)"]))

    async def healthy(self) -> bool:
        return True

    async def sampled_counts(self) -> dict[str, int]:
        return {}

    async def take_weights(self, socket: Path, limit_s: float) -> str:
        self.taken += 1
        if self.fails is not None:
            raise self.fails
        return "digest"

    async def pause(self) -> None:
        if self.pauses is not None:
            raise self.pauses

    async def resume(self) -> None: ...

    async def forget_prefixes(self) -> None: ...

    async def replace_weights(self, folder: Path) -> None:
        self.replaced += 1

    async def send(self, socket: Path) -> tuple[int, str]:
        if self.sends is not None:
            raise self.sends
        return self.step, "digest"

    async def export(self, file: Path) -> tuple[int, str]:
        if self.exports is not None:
            raise self.exports
        await asyncio.to_thread(file.write_bytes, bytes([self.step]))
        return self.step, checksum_of(file)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    return Ends(monkeypatch)


@pytest.fixture
async def engine(
    tiny_llama: ModelFolder, tmp_path: Path, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[LocalEngine]:
    made = LocalEngine(
        tiny_llama,
        logs=tmp_path,
        clock=SystemClock(),
        max_model_len=64,
        over_device=True,
        back_off=BackOff(first_s=0.01, failures=3),
    )
    monkeypatch.setattr(made.trainer, "send", ends.send)
    monkeypatch.setattr(made.trainer, "export", ends.export)
    made._slots.open()
    try:
        await made.inference.boot()
        yield made
    finally:
        await made.shutdown()


async def serve(engine: LocalEngine, ends: Ends, step: int) -> None:
    ends.step = step
    await engine.serve(WeightsVersion(run_id="run-1", step=step))
    async with asyncio.timeout(20):
        await engine.inference.settled()


@pytest.mark.parametrize(
    "error",
    [EngineError("/collective_rpc answered 500: OutOfMemoryError"), EngineHung("no answer for 30 s")],
    ids=["failed", "hung"],
)
async def test_where_inference_cannot_take_weights_over_the_device_they_go_through_memory_from_then_on(
    engine: LocalEngine, ends: Ends, caplog: pytest.LogCaptureFixture, error: EngineError
) -> None:
    ends.fails = error
    for step in range(1, 6):  # more than the failures that end inference for good
        await serve(engine, ends, step)
    assert (ends.taken, ends.starts) == (1, 2)
    assert not engine.over_device
    assert "from now on weights go through host memory" in caplog.text


@pytest.mark.parametrize(
    "error", [EngineError("/collective_rpc answered 500: EOFError"), EngineHung("no answer for 30 s")]
)
async def test_a_trainer_that_crashes_as_it_sends_leaves_the_way_over_the_device_open(
    engine: LocalEngine, ends: Ends, error: EngineError
) -> None:
    await serve(engine, ends, 1)
    ends.fails, ends.sends = error, TrainerCrashed("the trainer ended")
    await serve(engine, ends, 2)
    assert engine.over_device


async def test_so_does_inference_that_hangs_before_the_transfer(engine: LocalEngine, ends: Ends) -> None:
    ends.pauses = EngineHung("no answer for 30 s")
    await serve(engine, ends, 1)
    assert (ends.taken, ends.starts) == (0, 2)
    ends.pauses = None
    await serve(engine, ends, 2)
    assert (ends.taken, engine.over_device) == (1, True)


async def test_inference_that_dies_when_its_weights_could_not_be_kept_serves_the_hosted_ones_until_they_come_again(
    engine: LocalEngine, ends: Ends
) -> None:
    inference = engine.inference.all[0]
    ends.exports = TrainerCrashed("the trainer ended")
    await serve(engine, ends, 1)
    assert inference.version.step == 1
    fell = asyncio.Event()
    engine.inference.subscribe(lambda health: None if health.ready else fell.set())
    assert inference.process_id is not None
    os.kill(inference.process_id, signal.SIGKILL)
    async with asyncio.timeout(20):
        await fell.wait()
        await engine.inference.settled()
    assert (inference.version, ends.replaced) == (WeightsVersion(run_id="run-1"), 0)
    ends.exports = None
    await serve(engine, ends, 1)
    assert inference.version.step == 1
