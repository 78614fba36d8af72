"""What an engine of one machine computes on, and that the trainer computes the same on a GPU."""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from foundation import gpus
from foundation.clock import SystemClock
from swarm.engine import machine as device_module
from swarm.engine.devices import Layout
from swarm.engine.local import optimizer
from swarm.engine.local.checkpoints import hash_tensors
from swarm.engine.local.engine import LocalEngine
from swarm.engine.local.forward import DeviceShare, Policy
from swarm.engine.local.learner import Learner
from swarm.engine.local.optimizer import Optimizer, OptimizerName
from swarm.engine.local.pinned import pinned_copies
from swarm.engine.machine import Device, device_for, slow_type
from swarm.engine.memory.model import weight_bytes
from swarm.engine.sampling.server import VllmSettings
from swarm.engine.seam import EngineError
from swarm.models import resolve
from swarm.models.folder import ModelFolder
from swarm.protocol.runspec import ComputeType, OptimizerSpec
from tests.fakes.gpus import gpu_machine
from tests.swarm.engine.batches import branching_batch

from .test_attention import NEEDS_GPU
from .test_learner import FREE, distance, gradient
from .test_optimizer import filled

SIZES = {"matrix": (7, 32), "norm": (32,), "other": (32, 4)}


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu_machine(monkeypatch, tmp_path)


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_is_used_where_there_is_one_unless_the_cpu_is_wanted() -> None:
    assert device_for(None, {}) == device_for("cuda", {"CUDA_VISIBLE_DEVICES": "1"}) == "cuda"
    assert device_for("cpu", {}) == "cpu"


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_hidden_gpu_is_not_used(hidden: str) -> None:
    assert device_for(None, {"CUDA_VISIBLE_DEVICES": hidden}) == "cpu"
    with pytest.raises(EngineError, match="CUDA_VISIBLE_DEVICES hides every GPU"):
        device_for("cuda", {"CUDA_VISIBLE_DEVICES": hidden})


@pytest.mark.usefixtures("one_gpu")
def test_a_vllm_for_cpus_cannot_use_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(gpus, "distribution", missing)
    assert device_for(None, {}) == "cpu"
    with pytest.raises(EngineError, match=r"install requirements/gpu\.txt"):
        device_for("cuda", {})


def test_a_machine_without_a_driver_computes_on_its_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpus, "DEVICE", tmp_path / "nothing")
    assert device_for(None, {}) == "cpu"
    with pytest.raises(EngineError, match="no NVIDIA driver"):
        device_for("cuda", {})


@pytest.mark.parametrize(
    ("device", "can", "dtype"), [("cpu", True, "bfloat16"), ("cpu", False, "float32"), ("cuda", False, "bfloat16")]
)
def test_what_is_slow_in_bfloat16_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: ModelFolder, device: Device, can: bool, dtype: str
) -> None:
    monkeypatch.setattr(device_module, "multiplies_bfloat16", lambda: can)
    settings = VllmSettings(model_dir=tiny_llama.path, model_name="m", log_path=Path("log"), device=device)
    argv = settings.command(Path("socket")).argv
    assert argv[argv.index("--dtype") + 1] == dtype


def test_who_asks_for_what_is_slow_here_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "multiplies_bfloat16", lambda: False)
    assert "leave out --dtype" in str(slow_type("cpu", "bfloat16"))
    assert slow_type("cpu", "float32") is slow_type("cuda", "bfloat16") is None
    monkeypatch.setattr(device_module, "multiplies_bfloat16", lambda: True)
    assert slow_type("cpu", "bfloat16") is None


@pytest.mark.parametrize("wanted", ["bfloat16", "float32"])
def test_what_is_computed_in_can_be_chosen(tiny_llama: ModelFolder, wanted: ComputeType, tmp_path: Path) -> None:
    engine = LocalEngine(tiny_llama, logs=tmp_path, clock=SystemClock(), dtype=wanted)
    assert engine.info.dtype == wanted
    argv = engine.inference.settings.command(Path("socket")).argv
    assert argv[argv.index("--dtype") + 1] == wanted


@pytest.mark.parametrize(("device", "of_cpus"), [("cpu", True), ("cuda", False)])
def test_flags_that_help_a_cpu_are_kept_from_a_gpu(tiny_llama: ModelFolder, device: Device, of_cpus: bool) -> None:
    settings = VllmSettings(model_dir=tiny_llama.path, model_name="m", log_path=Path("log"), device=device)
    argv = settings.command(Path("socket")).argv
    for flag in (
        "--no-enable-chunked-prefill",
        "--enforce-eager",
        "--ir-op-priority",
        "--distributed-executor-backend",
        "--block-size",
    ):
        assert (flag in argv) == of_cpus
    assert argv[argv.index("--max-num-seqs") + 1] == ("64" if of_cpus else "256")
    assert "processed_logprobs" in argv


@pytest.mark.parametrize(("device", "asked"), [("cpu", False), ("cuda", True)])
def test_vllm_is_asked_for_its_sleep_mode_where_it_has_one(
    tiny_llama: ModelFolder, device: Device, asked: bool
) -> None:
    settings = VllmSettings(
        model_dir=tiny_llama.path, model_name="m", log_path=Path("log"), device=device, sleep_mode=True
    )
    assert ("--enable-sleep-mode" in settings.command(Path("socket")).argv) == asked


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("name", ["grpo", "ppo", "gspo", "reinforce_pp"])
def test_a_step_on_a_gpu_is_the_step_of_the_cpu(tiny_llama: ModelFolder, name: str) -> None:
    batch = branching_batch(algorithm={"name": name}, optimizer=FREE, dtype="float32")
    learners = [Learner(Policy.load(tiny_llama.path, torch.device(kind)), SystemClock()) for kind in ("cpu", "cuda")]
    outcomes = [learner.learn(batch) for learner in learners]
    by_cpu, by_gpu = ({name: grad.cpu() for name, grad in gradient(learner).items()} for learner in learners)
    assert distance(by_gpu, by_cpu) < 1e-4
    assert outcomes[1].metrics["kl_to_start"] == pytest.approx(outcomes[0].metrics["kl_to_start"], abs=1e-4)


@pytest.mark.gpu
@NEEDS_GPU
def test_moments_go_from_a_gpu_into_a_file_and_back(tiny_llama: ModelFolder) -> None:
    learner = Learner(Policy.load(tiny_llama.path, torch.device("cuda")), SystemClock())
    learner.learn(branching_batch(optimizer=FREE))
    state = {name: value.cpu() for name, value in learner.state().items()}
    learner.restore(state)
    assert hash_tensors(learner.state()) == hash_tensors(state)
    learner.learn(branching_batch(step=2, optimizer=FREE))


@pytest.mark.gpu
@NEEDS_GPU
def test_between_steps_an_offloaded_optimiser_holds_nothing_on_the_gpu(tiny_llama: ModelFolder) -> None:
    learner = Learner(Policy.load(tiny_llama.path, torch.device("cuda")), SystemClock())
    before = torch.cuda.memory_allocated()
    learner.learn(branching_batch(optimizer=FREE))
    held = torch.cuda.memory_allocated()
    learner.rest()
    resting = torch.cuda.memory_allocated()
    trained = sum(weight.numel() for weight in learner.policy.trained.values())
    assert resting <= held - 3 * 4 * trained  # the gradient and two moments
    assert resting < before + trained
    learner.learn(branching_batch(step=2, optimizer=FREE))
    learner.rest()
    assert torch.cuda.memory_allocated() <= resting


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
@pytest.mark.parametrize("together", [64, 64_000_000])
def test_an_offloading_optimiser_steps_a_gpus_weights_as_one_on_the_gpu_bit_for_bit(
    name: OptimizerName, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "OPTIMIZED_TOGETHER", together)
    found = []
    for offload in (False, True):
        draw = torch.Generator().manual_seed(0)
        held = {path: nn.Parameter(torch.randn(shape, generator=draw).cuda()) for path, shape in SIZES.items()}
        made = Optimizer(held, offload=offload)
        for seed in range(3):
            filled(made, held, name, seed)
            made.step(OptimizerSpec(name=name, max_grad_norm=1.0), 0.01)
        state = made.state()
        assert not offload or not any(value.is_cuda for value in state.values())
        made.restore(state)
        filled(made, held, name, 3)
        made.step(OptimizerSpec(name=name, max_grad_norm=1.0), 0.01)
        found.append((hash_tensors(held), hash_tensors(made.state())))
    assert found[0] == found[1]


@pytest.mark.gpu
@NEEDS_GPU
def test_what_is_offloaded_is_not_on_the_gpu_between_two_passes(tiny_llama: ModelFolder) -> None:
    taken = {}
    for offload in (True, False, True):  # the first takes what libraries keep
        began = torch.cuda.memory_allocated()
        share = DeviceShare(offload=offload)
        learner = Learner(Policy.load(tiny_llama.path, torch.device("cuda"), share=share), SystemClock())
        for step in (1, 2):
            metrics = learner.learn(branching_batch(step=step, optimizer=FREE, dtype="bfloat16")).metrics
        taken[offload] = torch.cuda.memory_allocated() - began
        assert metrics["kl_to_start"] > 0
        shape = learner.policy.memory.shape
        del learner
        gc.collect()
    assert taken[False] - taken[True] == pytest.approx(8 * shape.parameters + shape.stored, rel=0.1)


@pytest.mark.gpu
@NEEDS_GPU
def test_memory_that_a_gpu_reads_is_page_locked_until_it_is_freed(caplog: pytest.LogCaptureFixture) -> None:
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for _ in range(3):  # the same pages again, which the driver would refuse were they registered still
        copies = pinned_copies({"moments": torch.zeros(1 << 20, device="cuda")}, torch.device("cuda"))
        assert copies["moments"].is_pinned()
        address = copies["moments"].data_ptr()
        del copies
        assert int(driver.cudaHostUnregister(address)) != 0  # it was unregistered
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")  # takes that error
    assert not caplog.records


@pytest.mark.gpu
@pytest.mark.anyio
@NEEDS_GPU
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM built for CUDA")
async def test_a_sleeping_inference_leaves_its_memory_to_the_trainer(smollm2: Path, tmp_path: Path) -> None:
    engine = LocalEngine(
        resolve(str(smollm2)),
        logs=tmp_path,
        clock=SystemClock(),
        max_model_len=1024,
        devices=Layout.one("cuda"),
        sleep_mode=True,
    )
    try:
        await engine.boot()
        awake, _ = torch.cuda.mem_get_info()
        async with engine.inference.asleep():
            asleep, _ = torch.cuda.mem_get_info()
        again, _ = torch.cuda.mem_get_info()
    finally:
        await engine.shutdown()
    settings = engine.inference.settings
    assert asleep - awake > 0.9 * (settings.kv_bytes + weight_bytes(settings.model_dir))
    assert again == pytest.approx(awake, rel=0.02)
