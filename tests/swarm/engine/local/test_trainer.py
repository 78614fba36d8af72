"""The trainer's process through its handle: steps, checkpoints, crashes. A real child, a tiny model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foundation.clock import SystemClock
from swarm.engine.local import checkpoints
from swarm.engine.local.trainer import LocalTrainer
from swarm.engine.local.weight_slots import checksum_of
from swarm.engine.seam import EngineDown, EngineError, EngineHealth, RunContext, TrainerCrashed, TrainingRefused
from swarm.engine.training.checkpoints import steps
from swarm.engine.training.supervisor import BackOff
from swarm.models.folder import ModelFolder
from swarm.protocol.runspec import ComputeType, RunSpec
from tests.swarm.engine.batches import PROMPT, batch, big_batch, branching_batch, call, episode, group

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def booted(
    model: ModelFolder, tmp_path: Path, dtype: ComputeType = "bfloat16", failures: int = 3, offload: bool = False
) -> AsyncIterator[LocalTrainer]:
    heard: list[EngineHealth] = []
    trainer = LocalTrainer(
        model,
        log_path=tmp_path / "trainer.log",
        clock=SystemClock(),
        on_health=heard.append,
        dtype=dtype,
        turns=offload,
        offload=offload,
        back_off=BackOff(first_s=0.01, failures=failures),
    )
    await trainer.boot()
    assert heard[-1].ready
    try:
        yield trainer
    finally:
        await trainer.shutdown()


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def trainer(
    anyio_backend: str, tiny_llama: ModelFolder, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalTrainer]:
    """One child for all tests that do not need their own: each opens a run of its own."""
    async with booted(tiny_llama, tmp_path_factory.mktemp("trainer")) as handle:
        yield handle


def run_in(tmp_path: Path, **fields: Any) -> RunContext:
    values: dict[str, Any] = {"run_id": "run-1", "branch": 0, "spec": RunSpec(), "directory": tmp_path / "run-1"}
    return RunContext(**(values | fields))


async def exported(trainer: LocalTrainer, file: Path) -> dict[str, Tensor]:
    _, checksum = await trainer.export(file)
    assert checksum_of(file) == checksum
    return load_file(file)


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def child_of(trainer: LocalTrainer) -> int:
    """The trainer itself, below its reaper."""
    reaper = trainer.process_id
    return int(Path(f"/proc/{reaper}/task/{reaper}/children").read_text().split()[0])


async def test_nothing_is_rounded_on_its_way_to_inference_that_multiplies_in_float32(
    tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    async with booted(tiny_llama, tmp_path, "float32") as trainer:
        await trainer.open_run(run_in(tmp_path), None)
        hosted = load_file(tiny_llama.path / "model.safetensors")
        assert equal(await exported(trainer, tmp_path / "w"), {name: one.float() for name, one in hosted.items()})
        await trainer.train(branching_batch(optimizer={"learning_rate": 1e-6}))
        moved = await exported(trainer, tmp_path / "w")
        assert not equal(moved, {name: one.bfloat16().float() for name, one in moved.items()})


async def test_what_is_exported_has_the_names_and_types_of_the_hosted_checkpoint(
    trainer: LocalTrainer, tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    assert await trainer.open_run(run_in(tmp_path), None) == 0
    hosted = load_file(tiny_llama.path / "model.safetensors")
    assert equal(await exported(trainer, tmp_path / "w"), hosted)
    outcome = await trainer.train(branching_batch())
    assert outcome.step == 1
    assert outcome.metrics["weights_change"] > 0
    assert not equal(await exported(trainer, tmp_path / "w"), hosted)


async def test_a_checkpoint_restores_bit_equal_weights_and_the_next_step_too(
    tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    run = run_in(tmp_path)
    async with booted(tiny_llama, tmp_path) as trainer:
        with pytest.raises(TrainerCrashed, match="open the run first"):
            await trainer.train(branching_batch())
        await trainer.open_run(run, None)
        for step in (1, 2):
            await trainer.train(branching_batch(step=step))
        assert await trainer.checkpoint() == 2
        second = await exported(trainer, tmp_path / "second")
        outcome = await trainer.train(branching_batch(step=3))
        third = await exported(trainer, tmp_path / "third")
    async with booted(tiny_llama, tmp_path) as trainer:
        assert await trainer.open_run(run, None) == 2
        assert equal(await exported(trainer, tmp_path / "w"), second)
        again = await trainer.train(branching_batch(step=3))
        assert equal(await exported(trainer, tmp_path / "w"), third)
    assert {name: value for name, value in again.metrics.items() if name != "train_s"} == {
        name: value for name, value in outcome.metrics.items() if name != "train_s"
    }


async def test_a_trainer_killed_in_a_step_comes_back_and_replays_to_the_same_weights(
    trainer: LocalTrainer, tmp_path: Path
) -> None:
    run = run_in(tmp_path)
    await trainer.open_run(run, None)
    for step in (1, 2):
        await trainer.train(branching_batch(step=step))
        await trainer.checkpoint()
    await trainer.train(big_batch(3))
    expected = await exported(trainer, tmp_path / "w")

    await trainer.open_run(run, None)
    pending = asyncio.create_task(trainer.train(big_batch(3)))
    await asyncio.sleep(0.05)
    os.kill(child_of(trainer), signal.SIGKILL)
    with pytest.raises(TrainerCrashed):
        await pending
    with pytest.raises(TrainerCrashed):
        await trainer.train(big_batch(3))
    assert await trainer.open_run(run, None) == 2
    await trainer.train(big_batch(3))
    assert equal(await exported(trainer, tmp_path / "w"), expected)


async def test_an_offloading_trainer_that_is_killed_comes_back_to_the_weights_of_one_that_keeps_all_on_its_device(
    trainer: LocalTrainer, tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    run = run_in(tmp_path)
    await trainer.open_run(run, None)
    await trainer.train(branching_batch())
    await trainer.checkpoint()
    await trainer.train(branching_batch(step=2))
    expected = await trainer.fingerprint()
    async with booted(tiny_llama, tmp_path, offload=True) as offloading:
        assert await offloading.open_run(run, None) == 1
        os.kill(child_of(offloading), signal.SIGKILL)
        with pytest.raises(TrainerCrashed):
            await offloading.train(branching_batch(step=2))
        assert await offloading.open_run(run, None) == 1
        await offloading.train(branching_batch(step=2))
        assert await offloading.fingerprint() == expected


@pytest.mark.parametrize("between", ["a step", pytest.param("another run", marks=pytest.mark.campaign)])
async def test_crashes_before_and_after_a_step_or_in_two_runs_are_not_of_one_row(
    tiny_llama: ModelFolder, tmp_path: Path, between: str
) -> None:
    async with booted(tiny_llama, tmp_path, failures=2) as trainer:
        for number in range(2):
            run = run_in(tmp_path, run_id=f"run-{number}" if between == "another run" else "run-0")
            await trainer.open_run(run, None)
            os.kill(child_of(trainer), signal.SIGKILL)
            with pytest.raises(TrainerCrashed):
                await trainer.train(branching_batch(step=1))
            await trainer.open_run(run, None)
            if between == "a step":
                await trainer.train(branching_batch(step=1))
        assert not trainer.health.failed_for_good


async def test_a_run_is_reset_in_place(trainer: LocalTrainer, tiny_llama: ModelFolder, tmp_path: Path) -> None:
    await trainer.open_run(run_in(tmp_path), None)
    first = await trainer.train(branching_batch())
    before = trainer.process_id
    other = run_in(tmp_path, run_id="run-2", directory=tmp_path / "run-2")
    assert await trainer.open_run(other, None) == 0
    assert equal(await exported(trainer, tmp_path / "w"), load_file(tiny_llama.path / "model.safetensors"))
    second = await trainer.train(branching_batch())
    assert second.metrics["loss"] == first.metrics["loss"]
    assert second.metrics["weights_change"] == first.metrics["weights_change"]
    assert trainer.process_id == before


async def test_a_half_written_checkpoint_is_never_loaded(trainer: LocalTrainer, tmp_path: Path) -> None:
    run = run_in(tmp_path)
    await trainer.open_run(run, None)
    for step in (1, 2):
        await trainer.train(branching_batch(step=step))
        await trainer.checkpoint()
    newest = run.directory / "step-00000002" / "weights.safetensors"
    damaged = bytearray(newest.read_bytes())
    damaged[-5] ^= 1
    newest.write_bytes(damaged)
    (run.directory / ".unfinished-3").mkdir()
    assert await trainer.open_run(run, None) == 1
    with pytest.raises(EngineError, match="changed since it was written"):
        await trainer.open_run(run, 2)
    await trainer.open_run(run, None)
    await trainer.train(branching_batch(step=2))
    assert await trainer.checkpoint() == 2
    assert await trainer.open_run(run, 2) == 2
    assert not list(run.directory.glob(".unfinished*"))


async def test_only_the_newest_checkpoints_are_kept(trainer: LocalTrainer, tmp_path: Path) -> None:
    run = run_in(tmp_path)
    await trainer.open_run(run, None)
    for step in (1, 2, 3, 4):
        await trainer.train(branching_batch(step=step, checkpoint={"keep": 2}))
        await trainer.checkpoint()
    assert steps(run.directory) == [3, 4]


async def test_a_new_branch_forgets_what_the_old_one_made_later(trainer: LocalTrainer, tmp_path: Path) -> None:
    run = run_in(tmp_path)
    await trainer.open_run(run, None)
    for step in (1, 2, 3):
        await trainer.train(branching_batch(step=step, checkpoint={"keep": 5}))
        await trainer.checkpoint()
    branch = dataclasses.replace(run, branch=1)
    assert await trainer.open_run(branch, 1) == 1
    assert await trainer.open_run(branch, None) == 1


async def test_a_checkpoint_that_began_with_another_model_is_refused(trainer: LocalTrainer, tmp_path: Path) -> None:
    run = run_in(tmp_path)
    await trainer.open_run(run, None)
    await trainer.train(branching_batch())
    await trainer.checkpoint()
    folder = run.directory / "step-00000001"
    found = checkpoints.read(run.directory, 1)
    state = found.state.model_copy(update={"fingerprint": "f" * 64})
    checkpoints.write(run.directory, dataclasses.replace(found, state=state), keep=1)
    assert folder.exists()
    with pytest.raises(EngineError, match="serve the model that the run was started with"):
        await trainer.open_run(run, None)


async def test_a_directory_that_cannot_be_written_is_an_operating_system_error(
    trainer: LocalTrainer, tmp_path: Path
) -> None:
    run = run_in(tmp_path)
    await trainer.open_run(run, None)
    await trainer.train(branching_batch())
    run.directory.rmdir()
    run.directory.write_text("in the way")
    with pytest.raises(OSError):
        await trainer.checkpoint()
    run.directory.unlink()
    assert await trainer.checkpoint() == 1


async def test_refusals_cross_the_socket_and_leave_the_run_open(trainer: LocalTrainer, tmp_path: Path) -> None:
    await trainer.open_run(run_in(tmp_path), None)
    unsound = call("bad", PROMPT, [70, 71], logprobs=[-1.0, float("nan")])
    with pytest.raises(TrainingRefused, match="not finite"):
        await trainer.train(batch(group("a", episode("a1", 1.0, unsound), episode("a2", 0.0, call("b", PROMPT, [70])))))
    with pytest.raises(TrainingRefused, match="are at step 0"):
        await trainer.train(branching_batch(step=2))
    assert (await trainer.train(branching_batch())).step == 1


async def test_adapters_alone_are_checkpointed_restored_and_exported(
    trainer: LocalTrainer, tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    lora = {"rank": 4, "targets": ["q_proj"]}
    run = run_in(tmp_path, spec=RunSpec.model_validate({"parameters": lora}))
    assert await trainer.open_run(run, None) == 0
    await trainer.train(branching_batch(parameters=lora))
    await trainer.checkpoint()
    first, at_first = await exported(trainer, tmp_path / "adapter" / "w"), await trainer.fingerprint()
    assert all(name.startswith("base_model.model.model.layers.") for name in first)
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    assert all("lora_" in name for name in checkpoints.read(run.directory, 1).weights)
    assert at_first == checkpoints.fingerprint(run.directory, 1)
    await trainer.train(branching_batch(step=2, parameters=lora))
    assert await trainer.fingerprint() != at_first
    assert await trainer.open_run(run, 1) == 1
    assert equal(await exported(trainer, tmp_path / "adapter" / "w"), first)
    other = run_in(tmp_path, run_id="run-2", directory=tmp_path / "run-2")
    await trainer.open_run(other, None)
    assert equal(await exported(trainer, tmp_path / "w"), load_file(tiny_llama.path / "model.safetensors"))


async def test_the_best_checkpoint_is_kept_beside_the_newest(trainer: LocalTrainer, tmp_path: Path) -> None:
    run = run_in(tmp_path)
    await trainer.open_run(run, None)
    for step in (1, 2, 3, 4):
        await trainer.train(branching_batch(step=step, checkpoint={"keep": 1}))
        await trainer.checkpoint(best=1)
    assert steps(run.directory) == [1, 4]


async def test_a_question_whose_asker_was_cancelled_does_not_shift_the_answers(
    trainer: LocalTrainer, tmp_path: Path
) -> None:
    await trainer.open_run(run_in(tmp_path), None)
    pending = asyncio.create_task(trainer.checkpoint())
    await asyncio.sleep(0)
    pending.cancel()
    assert (await trainer.train(branching_batch())).step == 1


async def test_a_model_that_cannot_be_trained_fails_the_boot_with_its_reason(
    tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    broken = dataclasses.replace(tiny_llama, path=folder)
    with pytest.raises(EngineDown, match="trainer ended"):
        async with booted(broken, tmp_path):
            pass


def test_the_handle_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, swarm.engine.local.engine; sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
