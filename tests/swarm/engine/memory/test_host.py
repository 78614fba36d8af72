"""Memory is estimated before anything is started: for inference and for the trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from foundation.clock import SystemClock
from swarm.engine.devices import Layout
from swarm.engine.local.checkpoints import wider
from swarm.engine.local.engine import LocalEngine
from swarm.engine.local.forward import DTYPES
from swarm.engine.machine import Device
from swarm.engine.memory.host import check_slots, tokens_on_cpu, trainer_host_memory
from swarm.engine.memory.model import GIB, ModelShape, parameters, weight_bytes
from swarm.engine.memory.training import TrainerMemory, Training
from swarm.engine.sampling.server import REUSE_MEMORY
from swarm.engine.seam import EngineDown, EngineError
from swarm.models.folder import ModelFolder
from swarm.protocol.runspec import ComputeType

from .test_plan import MODELS

CONFIG = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 512}
N = 1000 * 64 + 64 * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    weights = {"embed": torch.zeros(1000, 64, dtype=torch.bfloat16), "proj": torch.zeros(64, 64, dtype=torch.bfloat16)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_the_trainer_holds_weights_gradients_and_moments_in_full_precision(folder: Path) -> None:
    shape = ModelShape.of(folder, CONFIG)
    assert (shape.parameters, shape.stored) == (N, weight_bytes(folder))
    narrow, whole = (TrainerMemory(shape, Training(dtype=dtype)) for dtype in get_args(ComputeType))
    assert narrow.start == whole.start == weight_bytes(folder)
    assert narrow.weights == whole.weights == 4 * N
    assert whole.step == 12 * N
    assert narrow.step == whole.step + 2 * (shape.matrices + shape.table)  # copies in the compute type
    assert whole.moments == 8 * N


def test_weights_are_exchanged_through_the_machines_memory(folder: Path) -> None:
    shape = ModelShape.of(folder, CONFIG)
    for dtype in get_args(ComputeType):
        memory = TrainerMemory(shape, Training(dtype=dtype))
        needed = trainer_host_memory(memory)
        assert needed.standing - memory.standing - 2 * shape.served(dtype) == int(0.8 * GIB)
        assert needed.peak > needed.standing


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("computed", list(DTYPES))
def test_weights_leave_the_trainer_in_what_was_estimated(
    stored: torch.dtype, computed: ComputeType, tmp_path: Path
) -> None:
    save_file({"w": torch.zeros(100, 1000, dtype=stored)}, tmp_path / "model.safetensors")
    sent = wider(stored, DTYPES[computed])
    assert sent in (stored, torch.float32)
    assert 0 <= ModelShape.of(tmp_path, CONFIG).served(computed) - 100_000 * sent.itemsize < 1000  # a header


@pytest.mark.parametrize(
    ("machine_gib", "tokens"), [(4, 1536), (12, 1792), (23.5, 3584), (24, 3584), (64, 8192), (512, 8192)]
)
def test_activations_fill_a_share_of_the_machine_whatever_is_free(machine_gib: float, tokens: int) -> None:
    config = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    }  # fmt: skip
    memory = TrainerMemory(ModelShape.described(config), Training(dtype="bfloat16"))
    assert tokens_on_cpu(memory, int(machine_gib * GIB)) == tokens
    large = {**config, "hidden_size": 8192, "num_hidden_layers": 80}
    assert tokens_on_cpu(TrainerMemory(ModelShape.described(large), Training(dtype="float32")), 4 * GIB) == 256


@pytest.mark.skipif(sys.platform != "linux", reason="another allocator")
@pytest.mark.parametrize(("available", "waits"), [(4 * GIB, False), (64 << 20, True)])
def test_memory_that_a_step_takes_is_there_before_it_unless_it_is_short(available: int, waits: bool) -> None:
    size = 64 << 20
    script = f"""
import resource, torch
from swarm.engine.local import trainer_process
trainer_process.available_memory = lambda: {available}
trainer_process.touch({size})
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step = [torch.zeros({size} // 8, dtype=torch.uint8) for _ in range(7)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    made = subprocess.run([sys.executable, "-c", script], env=os.environ | REUSE_MEMORY, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    pages = size // 8 * 7 // 4096
    assert (int(made.stdout) > pages // 2) == waits


def test_what_is_no_safetensors_file_is_refused(folder: Path) -> None:
    (folder / "more.safetensors").write_bytes(b"not")
    with pytest.raises(EngineError, match=r"more\.safetensors is not a safetensors file"):
        parameters(folder)


def engine(folder: Path, config: dict[str, int], **fields: Any) -> LocalEngine:
    (folder / "config.json").write_text(json.dumps(config))
    model = ModelFolder(name="m", path=folder, fingerprint="0" * 64)
    return LocalEngine(model, logs=folder, clock=SystemClock(), **fields)


def test_the_estimate_of_an_engine_names_both_children(folder: Path) -> None:
    made = engine(folder, CONFIG)
    inference, trainer = made.memory_needed()
    memory = TrainerMemory(ModelShape.of(folder, CONFIG), Training(dtype=made.info.dtype))
    assert trainer == trainer_host_memory(memory).peak
    assert f"inference {inference / GIB:.1f}, trainer {trainer / GIB:.1f}" in made.estimate()


@pytest.mark.anyio
async def test_an_engine_whose_trainer_does_not_fit_is_refused_before_anything_is_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(folder, CONFIG)
    least = made.inference.settings.least_memory()
    monkeypatch.setattr("swarm.engine.memory.host.available_memory", lambda: least + GIB // 4)
    with pytest.raises(EngineDown, match=r"m needs about .* GiB of memory to boot, .* GiB are free"):
        await made.boot()
    assert made.trainer.process_id is None


KINDS: tuple[Device, ...] = ("cpu", "cuda")
LARGE = {**CONFIG, "hidden_size": 4096, "num_hidden_layers": 32, "max_position_embeddings": 4096}


def test_what_lies_on_a_gpu_is_not_asked_of_the_machines_memory(folder: Path) -> None:
    cpu, gpu = (sum(engine(folder, LARGE, devices=Layout.one(kind)).memory_needed()) for kind in KINDS)
    assert engine(folder, LARGE, devices=Layout.one("cuda")).inference.settings.kv_bytes == 16 * GIB
    assert gpu < 8 * GIB
    assert cpu > 2 * GIB
    few, many = (
        engine(folder, LARGE, devices=Layout.one("cuda"), max_num_seqs=count).memory_needed() for count in (1, 64)
    )
    assert few == many


def test_who_takes_turns_on_a_gpu_waits_in_the_machines_memory(folder: Path) -> None:
    awake, turns = (
        engine(folder, CONFIG, devices=Layout.one("cuda"), sleep_mode=sleeps).memory_needed()
        for sleeps in (False, True)
    )
    assert turns[0] - awake[0] == weight_bytes(folder)
    assert turns[1] - awake[1] == 8 * N  # AdamW's two moments


@pytest.mark.parametrize("card", [None, 24 * GIB])
@pytest.mark.parametrize("asked", [None, True, False])
def test_an_engine_offloads_where_it_is_asked_to(folder: Path, card: int | None, asked: bool | None) -> None:
    made = engine(folder, CONFIG, devices=Layout.one("cuda"), card=card, memory=64 * GIB, offload=asked)
    assert made.offload == bool(asked)
    assert ("--offload" in made.trainer._command(3).argv) == bool(asked)
    awake = engine(folder, CONFIG, devices=Layout.one("cuda"), card=card)
    assert made.memory_needed()[1] - awake.memory_needed()[1] == (8 * N if asked else 0)


def test_what_a_machine_has_no_memory_for_is_refused_with_what_it_takes(folder: Path) -> None:
    with pytest.raises(EngineError, match=r"of host memory, of which .* give the machine more memory"):
        engine(folder, CONFIG, devices=Layout.one("cuda"), card=24 * GIB, memory=4 * GIB, offload=True)


def test_offloading_that_nobody_asked_for_is_left_out_where_other_programs_have_the_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ModelShape, "of", lambda *given: ModelShape.described(MODELS["1.7B"]))

    def made(available: int | None, **fields: Any) -> LocalEngine:
        monkeypatch.setattr("swarm.engine.local.engine.available_memory", lambda: available)
        return engine(folder, CONFIG, devices=Layout.one("cuda"), card=24 * GIB, **fields)

    whole = made(None, memory=64 * GIB)
    needed = sum(whole.memory_needed())
    assert all(one.offload for one in (whole, made(needed, memory=64 * GIB), made(0)))
    assert made(0, memory=64 * GIB, offload=True).offload  # asked for: the boot says what is missing
    assert not caplog.records
    adapters = made(needed - 1, memory=64 * GIB)
    assert not adapters.offload
    assert "are free" in caplog.text
    assert adapters.plans is not None
    assert adapters.plans.whole is None
    assert "end other programs" in adapters.plans.why_not_whole()
    assert sum(adapters.memory_needed()) < needed


@pytest.mark.anyio
async def test_a_boot_that_lacks_the_memory_to_offload_is_told_what_needs_less(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.engine.memory.host.available_memory", lambda: GIB)
    for offload in (False, True):
        made = engine(folder, CONFIG, devices=Layout.one("cuda"), offload=offload)
        with pytest.raises(EngineDown, match="to boot") as refused:
            await made.boot()
        assert ("serve with --no-offload" in str(refused.value)) == offload


@pytest.mark.anyio
async def test_an_engine_on_a_gpu_boots_on_a_machine_with_less_memory_than_the_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing() -> None:
        pass

    made = engine(folder, LARGE, devices=Layout.one("cuda"))
    monkeypatch.setattr(made.inference, "boot", nothing)
    monkeypatch.setattr(made.trainer, "boot", nothing)
    monkeypatch.setattr("swarm.engine.memory.host.available_memory", lambda: 8 * GIB)
    await made.boot()
    made.inference.settings.check_memory()
    await made.shutdown()
    assert "besides GPU memory" in made.estimate()
    monkeypatch.setattr("swarm.engine.memory.host.available_memory", lambda: GIB)
    with pytest.raises(EngineDown, match="to boot"):
        await made.boot()


def test_a_container_with_little_shared_memory_is_told_how_to_get_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_slots(tmp_path, 1)
    monkeypatch.setattr("swarm.engine.memory.host.shutil.disk_usage", lambda folder: SimpleNamespace(free=64 << 20))
    with pytest.raises(EngineDown, match=r"need 3\.0 GiB of .*, which has 0\.1 GiB free: .* docker run --shm-size 4g"):
        check_slots(tmp_path, 3 * GIB // 2)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("gib", "refused"), [(None, True), (141, True), pytest.param(48, False, id="only adapters, which are small, fit")]
)
async def test_a_boot_with_little_shared_memory_is_refused_where_all_weights_can_be_trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gib: int | None, refused: bool
) -> None:
    booted: list[str] = []

    async def boot() -> None:
        booted.append("child")

    monkeypatch.setattr(ModelShape, "of", lambda *given: ModelShape.described(MODELS["8B"]))
    monkeypatch.setattr("swarm.engine.memory.host.available_memory", lambda: 1000 * GIB)
    monkeypatch.setattr("swarm.engine.memory.host.shutil.disk_usage", lambda folder: SimpleNamespace(free=64 << 20))
    card = {} if gib is None else {"devices": Layout.one("cuda"), "card": gib * GIB}
    made = engine(folder, CONFIG, **card)
    for child in (made.inference, made.trainer):
        monkeypatch.setattr(child, "boot", boot)
    monkeypatch.setattr(made._slots, "open", lambda: None)
    monkeypatch.setattr(made._slots, "reserve", lambda size: None)
    with pytest.raises(EngineDown, match="docker run --shm-size") if refused else nullcontext():
        await made.boot()
    assert bool(booted) != refused
