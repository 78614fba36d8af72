"""Inference that gives no sign of life, in a world of the test's own time; vLLM is not started."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foundation.clock import ManualClock
from swarm.engine.local.inference import VllmInference
from swarm.engine.sampling.client import VllmClient
from swarm.engine.sampling.server import VllmSettings
from swarm.engine.seam import EngineHealth, EngineHung, SampleRequest
from swarm.engine.training.limits import LEAST_LIMIT_S
from swarm.engine.training.supervisor import BackOff, ChildCommand, ChildProcess
from swarm.protocol.episodes import WeightsVersion
from tests.fakes.hanging_trainer import model_folder

pytestmark = pytest.mark.anyio
PATIENCE_S = 30.0
VERSION = WeightsVersion(run_id="run-1", step=1)


class Vllm:
    """What stands in for vLLM: it answers as long as `stopped` is not set, and samples one token each time that `token` is set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.stopped = False
        self.counted = 0
        self.token = asyncio.Event()
        self._start = ChildProcess.start
        for name in ("healthy", "sampled_counts", "pause", "replace_weights", "forget_prefixes", "resume", "stream"):
            patch.setattr(VllmClient, name, getattr(self, name))
        patch.setattr(ChildProcess, "start", self.start)
        patch.setattr(VllmSettings, "check_memory", lambda _: None)

    async def start(self, command: ChildCommand) -> ChildProcess:
        self.stopped = False
        return await self._start(replace(command, argv=[sys.executable, "-c", "import time; time.sleep(600)"]))

    async def healthy(self) -> bool:
        return True

    async def sampled_counts(self) -> dict[str, int]:
        self.counted += 1
        if self.stopped:
            await asyncio.Event().wait()
        return {}

    async def pause(self) -> None:
        if self.stopped:
            raise EngineHung("the inference engine has not answered /pause for 30 s")

    async def replace_weights(self, folder: Path) -> None: ...

    async def forget_prefixes(self) -> None: ...

    async def resume(self) -> None: ...

    async def stream(self, dialect: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        while True:
            self.token.clear()
            await self.token.wait()
            yield {"id": body["request_id"], "choices": [], "usage": None}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    return Vllm(monkeypatch)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def heard() -> list[EngineHealth]:
    return []


@pytest.fixture
async def inference(
    vllm: Vllm, clock: ManualClock, heard: list[EngineHealth], tmp_path: Path
) -> AsyncIterator[VllmInference]:
    model = model_folder(tmp_path / "model")
    (model.path / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'
    )
    settings = VllmSettings(model_dir=model.path, model_name="eight", log_path=tmp_path / "log", device="cpu")
    made = VllmInference(settings, clock=clock, back_off=BackOff(first_s=0.01))
    made.subscribe(heard.append)
    await made.boot()
    try:
        yield made
    finally:
        await made.shutdown()


async def turns(clock: ManualClock, seconds: float = 0.0) -> None:
    for _ in range(10):
        await asyncio.sleep(0)
    clock.advance(seconds)
    for _ in range(10):
        await asyncio.sleep(0)


async def until(clock: ManualClock, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await turns(clock, 0.01)
            await asyncio.sleep(0.005)  # another process's state has no event to wait for


async def test_an_engine_core_that_does_not_answer_is_named_ended_and_started_anew(
    inference: VllmInference, vllm: Vllm, clock: ManualClock, heard: list[EngineHealth]
) -> None:
    before = inference.process_id
    for _ in range(12):
        await turns(clock, 5.0)
    assert inference.health.ready
    stopped_at, vllm.stopped = clock.now(), True
    while inference.health.ready:
        await turns(clock, 5.0)
    assert clock.now() - stopped_at <= LEAST_LIMIT_S + 10
    hung = next(health for health in heard if health.hung_since is not None)
    assert "inference (vLLM) has given no sign of life for 30 s" in (hung.reason or "")
    assert hung.hung_since is not None
    assert stopped_at - 5 <= hung.hung_since <= stopped_at
    await until(clock, lambda: inference.health.ready)
    assert inference.process_id != before
    assert inference.health.hung_since is None
    assert inference.health.failures == 1


async def test_time_in_which_this_process_itself_was_suspended_is_no_silence_of_the_core(
    inference: VllmInference, vllm: Vllm, clock: ManualClock, heard: list[EngineHealth]
) -> None:
    heard.clear()
    for _ in range(3):
        await turns(clock, 10 * LEAST_LIMIT_S)
        await turns(clock)
    assert inference.health.ready
    assert heard == []
    asked_before = vllm.counted
    await turns(clock, 5.0)
    assert vllm.counted > asked_before
    vllm.stopped = True  # and one that hangs then is found as ever
    await turns(clock, 10 * LEAST_LIMIT_S)
    assert inference.health.ready
    for _ in range(8):
        await turns(clock, 5.0)
    assert any(health.hung_since is not None for health in heard)


async def test_tokens_are_signs_of_life_where_the_core_has_no_time_for_anything_else(
    inference: VllmInference, vllm: Vllm, clock: ManualClock, heard: list[EngineHealth]
) -> None:
    async def read() -> None:
        body = {"messages": [], "seed": 1, "max_tokens": 8}
        async for _ in inference.stream(SampleRequest(dialect="chat.completions", body=body)):
            pass

    reading = asyncio.create_task(read())
    await turns(clock)
    vllm.stopped = True
    for _ in range(30):
        vllm.token.set()
        await turns(clock, 5.0)
    assert inference.health.ready
    for _ in range(10):
        await turns(clock, 5.0)
    assert any(health.hung_since is not None for health in heard)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_a_core_that_hangs_while_weights_are_changed_is_said_to_hang_and_serves_the_new_ones(
    inference: VllmInference, vllm: Vllm, clock: ManualClock, heard: list[EngineHealth], tmp_path: Path
) -> None:
    vllm.stopped = True
    publishing = asyncio.create_task(inference.publish(tmp_path / "model", VERSION))
    await until(clock, publishing.done)
    publishing.result()
    assert inference.version == VERSION
    hung = [health.reason for health in heard if health.hung_since is not None]
    assert hung
    assert "weights are changed" in (hung[0] or "")
