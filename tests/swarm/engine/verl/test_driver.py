"""The driver's process: what it refuses, it says, and it leaves nothing behind."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from foundation.clock import SystemClock
from swarm.engine.seam import EngineDown, EngineError, TrainingRefused
from swarm.engine.training.channel import Command, Failure, Publish, Reply, Resume
from swarm.engine.training.supervisor import BackOff, ChildCommand
from swarm.engine.verl.driver_process import _pad_token
from swarm.engine.verl.engine import DriverHandle, VerlEngine, VerlLayout
from swarm.engine.verl.settings import LOOK_EVERY_S, VerlSettings
from swarm.models.folder import ModelFolder
from swarm.protocol.episodes import WeightsVersion

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: `make verl`"),
]


@pytest.mark.campaign
async def test_more_ranks_than_devices_are_refused_with_the_reason(
    cpu_platform: None, tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    layout = VerlLayout(max_model_len=512, ranks_per_node=4)
    engine = VerlEngine(tiny_llama, layout, logs=tmp_path, clock=SystemClock())
    try:
        with pytest.raises(EngineDown, match=r"(?s)4 ranks were requested, but this machine has 2 device"):
            await engine.boot()
        assert engine.driver.health.failed_for_good
    finally:
        await engine.shutdown()


async def test_a_layout_that_does_not_add_up_is_refused_at_once(tiny_llama: ModelFolder, tmp_path: Path) -> None:
    for fields, said in (
        ({"ranks_per_node": 3, "tensor_parallel": 2}, "divides ranks_per_node"),
        ({"tokens_per_rank": 64}, "tokens_per_rank must be at least"),
        ({"sampling_memory": 1.5}, "sampling_memory"),
    ):
        with pytest.raises(EngineError, match=said):
            VerlEngine(tiny_llama, VerlLayout(max_model_len=512, **fields), logs=tmp_path, clock=SystemClock())


async def test_a_driver_that_is_not_booted_samples_and_trains_nothing(tiny_llama: ModelFolder, tmp_path: Path) -> None:
    engine = VerlEngine(tiny_llama, VerlLayout(max_model_len=512), logs=tmp_path, clock=SystemClock())
    with pytest.raises(EngineDown, match="there are no replicas"):
        await engine.render("completions", {"prompt": "One"})
    with pytest.raises(EngineDown, match="open the run first"):
        await engine.checkpoint()


async def test_a_model_that_names_no_padding_is_padded_all_the_same(tmp_path: Path) -> None:
    settings = VerlSettings(model_dir=tmp_path, model_name="m", max_model_len=64)
    for named, token in ((7, 7), (None, 0), (-1, 0)):
        (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": named}))
        assert _pad_token(settings) == token


async def test_who_no_longer_waits_for_weights_leaves_sampling_as_it_was_found(
    tiny_llama: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = VerlEngine(tiny_llama, VerlLayout(max_model_len=512), logs=tmp_path, clock=SystemClock())
    asked: list[Command] = []
    frozen, arrived, resumed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def ask(command: Command) -> Reply:
        asked.append(command)
        if isinstance(command, Publish):
            frozen.set()
            await arrived.wait()
        if isinstance(command, Resume):
            resumed.set()
        return Reply(number=len(asked), step=1)

    monkeypatch.setattr(engine.driver, "ask", ask)
    serving = asyncio.create_task(engine.serve(WeightsVersion(run_id="r", branch=0, step=1)))
    await frozen.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    arrived.set()
    await asyncio.wait_for(resumed.wait(), 5)
    assert [type(each) for each in asked] == [Publish, Resume]


async def test_ranks_that_ran_out_of_memory_are_started_anew_and_the_run_is_refused(
    tiny_llama: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = VerlEngine(tiny_llama, VerlLayout(max_model_len=512), logs=tmp_path, clock=SystemClock()).driver
    reply = Reply(failure=Failure(kind="unusable", text="step 1 ran out of memory"))
    restart = AsyncMock()
    monkeypatch.setattr(driver, "_exchange", AsyncMock(return_value=reply))
    monkeypatch.setattr(driver._supervisor, "restart", restart)
    with pytest.raises(TrainingRefused, match="step 1 ran out of memory"):
        await driver.ask(Publish(step=1))
    restart.assert_awaited_once_with(failed=False)


async def test_a_start_that_runs_out_of_memory_is_not_tried_again_and_says_what_needs_less(
    tiny_llama: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "verl.log"
    patient = BackOff(first_s=0.01, first_boot_failures=5)
    for said, advice in (
        ("torch.OutOfMemoryError: CUDA out of memory.", "lower --verl-sampling-memory"),
        ("(2.00 GiB KV cache is needed, which is larger than the available KV cache memory", "raise --verl-sampling"),
    ):
        engine = VerlEngine(
            tiny_llama, VerlLayout(max_model_len=512), logs=tmp_path, clock=SystemClock(), back_off=patient
        )
        argv = [sys.executable, "-c", f"print({said!r}); raise SystemExit(1)"]
        command = ChildCommand(name="driver (verl)", argv=argv, env={}, log_path=log)
        monkeypatch.setattr(engine.driver, "_command", lambda _, command=command: command)
        with pytest.raises(EngineDown, match=f"ran out of memory: .*{advice}"):
            await engine.boot()
        assert engine.driver.health.failed_for_good
        assert engine.driver.health.failures == 1
        await engine.shutdown()


async def test_what_hangs_on_processors_was_silent_for_as_long_as_they_are_waited_for(tmp_path: Path) -> None:
    shape = [896, 560_000]
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * math.prod(shape)]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 896}))
    settings = VerlSettings(model_dir=tmp_path, model_name="m", max_model_len=64)
    handle = DriverHandle(
        settings,
        "0" * 64,
        log_path=tmp_path / "log",
        clock=SystemClock(),
        on_health=lambda _: None,
        on_places=AsyncMock(),
    )
    silent_s = {}
    for device in ("cpu", "cuda"):
        greeting = AsyncMock(return_value=Reply(number=1, device=device))
        handle._channel = cast(Any, SimpleNamespace(greeting=greeting))
        await handle._ready(cast(Any, None))
        hung_status = handle._supervisor._hung_status
        assert hung_status is not None
        silent_s[device] = hung_status.silent_s()
    assert silent_s == {device: settings.silence_s(device) + LOOK_EVERY_S for device in ("cpu", "cuda")}
    assert silent_s["cpu"] > silent_s["cuda"]
