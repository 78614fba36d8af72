"""Weights over the device: between two processes, and from the real trainer to real vLLM. A CPU's memory stands in for a GPU's."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foundation.clock import SystemClock
from swarm.engine.local import device_transfer
from swarm.engine.local.device_transfer import Incoming, send
from swarm.engine.local.engine import LocalEngine
from swarm.engine.local.inference import WeightsRefused
from swarm.engine.sampling.client import NotShared, VllmClient
from swarm.engine.seam import EngineError, RunContext, Sampled
from swarm.engine.training.supervisor import BackOff
from swarm.engine.training.weights_digest import WeightsDigest
from swarm.models.folder import ModelFolder
from swarm.protocol.episodes import WeightsVersion
from swarm.protocol.runspec import RunSpec
from tests.contracts.engine_contract import batch_of, chat, request

# -- two processes --------------------------------------------------------------------------------------------------------


def weights() -> dict[str, Tensor]:
    """Of several types and odd sizes, one of them empty and one larger than a part."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"table": (301, 1000), "norm": (7,), "left": (33, 65), "none": (0, 4), "right": (65, 33), "scale": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def types() -> dict[str, torch.dtype]:
    return {name: torch.float32 if name in ("norm", "scale") else torch.bfloat16 for name in weights()}


def taken(path: Path, most: int) -> tuple[str, dict[str, tuple[torch.dtype, list[float]]]]:
    """What another process receives, and its digest. most: weights that it takes before it breaks off."""
    digest, found = WeightsDigest(), dict[str, tuple[torch.dtype, list[float]]]()
    with Incoming(path) as incoming:
        for name, weight in digest.over(incoming.weights()):
            found[name] = weight.dtype, weight.flatten().float().tolist()
            if len(found) == most:
                break
    return digest.hexdigest(), found


@pytest.fixture
def other() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as made:
        yield made


def received_by(
    other: ProcessPoolExecutor, path: Path, most: int = 99
) -> Future[tuple[str, dict[str, tuple[torch.dtype, list[float]]]]]:
    return other.submit(taken, path, most)


def test_weights_arrive_in_their_types_part_by_part(
    other: ProcessPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_transfer, "_PART_BYTES", 10_000)
    receiving = received_by(other, tmp_path / "s")
    sent = send(tmp_path / "s", weights(), types())
    digest, found = receiving.result()
    assert sent == digest
    assert list(found) == list(weights())
    for name, weight in weights().items():
        assert found[name] == (types()[name], weight.to(types()[name]).flatten().float().tolist())
    assert not (tmp_path / "s").exists()


def test_sending_leaves_the_weights_where_they_are(other: ProcessPoolExecutor, tmp_path: Path) -> None:
    trained = weights()
    before = {name: (weight.data_ptr(), weight.clone()) for name, weight in trained.items()}
    receiving = received_by(other, tmp_path / "s")
    send(tmp_path / "s", trained, dict.fromkeys(trained, torch.float32))
    receiving.result()
    for name, weight in trained.items():
        assert weight.data_ptr() == before[name][0]
        assert not weight.is_shared()
        assert torch.equal(weight, before[name][1])


def test_a_reader_that_breaks_off_is_an_error_of_the_engine(
    other: ProcessPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_transfer, "_PART_BYTES", 1000)
    receiving = received_by(other, tmp_path / "s", most=1)
    with pytest.raises(EngineError, match="cannot send weights over the device"):
        send(tmp_path / "s", weights(), types())
    receiving.result()


def hanging(path: Path) -> None:
    """A reader that takes the shared memory, and then nothing."""
    with Incoming(path):
        time.sleep(600)


def test_a_reader_that_hangs_does_not_make_the_trainer_hang_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = multiprocessing.get_context("spawn").Process(target=hanging, args=(tmp_path / "s",))
    reader.start()
    try:
        monkeypatch.setattr(device_transfer, "_SILENCE_S", 0.1)
        began = time.monotonic()
        with pytest.raises(EngineError, match="has not answered"):
            send(tmp_path / "s", weights(), types())
        assert time.monotonic() - began < 60
    finally:
        reader.kill()
        reader.join()


def test_neither_side_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_transfer, "_MEETING_S", 0.05)
    with pytest.raises(EngineError, match="timed out"):
        send(tmp_path / "s", weights(), types())
    with pytest.raises(FileNotFoundError):
        Incoming(tmp_path / "s")


# -- the engine -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def engine(tiny_llama: ModelFolder, tmp_path: Path) -> AsyncIterator[LocalEngine]:
    made = LocalEngine(
        tiny_llama,
        logs=tmp_path / "logs",
        clock=SystemClock(),
        max_model_len=1024,
        max_num_seqs=8,
        over_device=True,
        back_off=BackOff(first_s=0.05, failures=3),
    )
    try:
        await made.boot()
        yield made
    finally:
        await made.shutdown()


async def sampled(engine: LocalEngine) -> Sampled:
    return await engine.sample(request(chat("Say red", seed=3, max_tokens=16)))


@pytest.mark.anyio
async def test_weights_are_served_over_the_device_and_outlive_inference(
    engine: LocalEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = {"batch": {"group_size": 4}, "optimizer": {"learning_rate": 1e-3}}
    spec = RunSpec.model_validate(far).computed_in(engine.info.dtype)
    run = RunContext(run_id="run-1", branch=0, spec=spec, directory=tmp_path / "run")
    await engine.open_run(run)
    exported = list[Path]()
    export = engine.trainer.export

    async def told(file: Path) -> tuple[int, str]:
        exported.append(file)
        return await export(file)

    monkeypatch.setattr(engine.trainer, "export", told)
    hosted = (await sampled(engine)).choices[0].logprobs
    for step in (1, 2):
        assert (await engine.train(await batch_of(engine, spec, step))).metrics["logprob_mismatch_mean"] < 0.05
        await engine.serve(WeightsVersion(run_id=run.run_id, branch=0, step=step))
    assert engine.over_device
    served = (await sampled(engine)).choices[0]
    assert served.logprobs != hosted
    assert served.versions[0].version.step == 2

    # A child that starts after a crash reads the copy in memory.
    fell = asyncio.Event()
    engine.inference.subscribe(lambda health: None if health.ready else fell.set())
    os.kill(vllm_of(engine), signal.SIGKILL)
    async with asyncio.timeout(120):
        await fell.wait()
        await engine.inference.settled()
    again = (await sampled(engine)).choices[0]
    assert (again.sampled_ids, again.versions[0].version.step) == (served.sampled_ids, 2)
    assert again.logprobs == pytest.approx(served.logprobs, abs=1e-3)
    assert len(exported) == 2

    # No step is made for weights whose copy is not what was trained; serving them again makes another one.
    async def changing(file: Path) -> tuple[int, str]:
        step, checksum = await export(file)
        os.truncate(file, 100)
        return step, checksum

    version = WeightsVersion(run_id=run.run_id, branch=0, step=2)
    with monkeypatch.context() as patched:
        patched.setattr(engine.trainer, "export", changing)
        await engine.serve(version)
        with pytest.raises(WeightsRefused, match="differ from the trained weights"):
            await engine.train(await batch_of(engine, spec, 3))
    await engine.serve(version)

    # Where memory cannot be shared, weights go through the machine's memory, and inference stays.
    async def refuse(*_: object) -> str:
        raise NotShared("no memory of this device can be shared")

    monkeypatch.setattr(VllmClient, "take_weights", refuse)
    monkeypatch.setattr(engine.trainer, "send", refuse)
    child = engine.inference.all[0].process_id
    await engine.train(await batch_of(engine, spec, 3))
    await engine.serve(WeightsVersion(run_id=run.run_id, branch=0, step=3))
    assert not engine.over_device
    assert "no memory of this device can be shared" in caplog.text
    assert (await sampled(engine)).choices[0].versions[0].version.step == 3
    assert engine.inference.all[0].process_id == child


def vllm_of(engine: LocalEngine) -> int:
    """vLLM's server itself, below its reaper."""
    reaper = engine.inference.all[0].process_id
    return int(Path(f"/proc/{reaper}/task/{reaper}/children").read_text().split()[0])
