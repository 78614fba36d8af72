"""Devices of one machine: how they are named, counted, and given to children."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.clock import SystemClock
from foundation.gpus import Card
from swarm.engine import devices, machine
from swarm.engine.devices import DeviceName, Layout
from swarm.engine.local.engine import LocalEngine
from swarm.engine.local.trainer import LocalTrainer
from swarm.engine.memory.model import GIB
from swarm.engine.sampling.server import VllmSettings
from swarm.engine.seam import EngineError
from swarm.main import main
from swarm.models.folder import ModelFolder
from swarm.server.main import _least_card
from tests.fakes.gpus import gpu_machine


def layout(trainer: str, *inference: str) -> Layout:
    return Layout(trainer=DeviceName.parse(trainer), inference=tuple(map(DeviceName.parse, inference)))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu_machine(monkeypatch, tmp_path, 2)


@pytest.mark.parametrize(
    ("text", "name"), [("cpu", "cpu:0"), ("cpu:1", "cpu:1"), ("cuda", "cuda:0"), (" cuda:12 ", "cuda:12")]
)
def test_a_device_is_named_by_kind_and_number(text: str, name: str) -> None:
    assert str(DeviceName.parse(text)) == name


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:-1", "cuda1", "cuda:0:1", "cpu:x", "cuda:99999"])
def test_what_is_no_device_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a device: write cpu, cpu:1, cuda:0"):
        DeviceName.parse(text)


def test_devices_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match="cuda:1 twice"):
        layout("cuda:0", "cuda:1", "cuda:1")
    with pytest.raises(ValueError, match="the same kind of device"):
        layout("cpu", "cuda:0")
    with pytest.raises(ValueError, match="the same kind of device"):
        layout("cuda:0", "cuda:1", "cpu")


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_counted_by_their_files_or_by_those_that_may_be_seen() -> None:
    layout("cuda:0", "cuda:1").require({})
    layout("cuda:2", "cuda:0").require({"CUDA_VISIBLE_DEVICES": "4,GPU-af, 2"})
    with pytest.raises(EngineError, match=r"there is no cuda:3: this machine has 2 usable GPUs"):
        layout("cuda:0", "cuda:1", "cuda:3").require({})
    with pytest.raises(EngineError, match=r"there is no cuda:1: this machine has 1 usable GPUs"):
        layout("cuda:0", "cuda:1").require({"CUDA_VISIBLE_DEVICES": "1,-1,0"})
    with pytest.raises(EngineError, match="CUDA_VISIBLE_DEVICES hides every GPU"):
        layout("cuda:0", "cuda:1").require({"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("trainer", "inference", "said"),
    [
        ("cuda:0", "cuda:1", "for one GPU that inference and the trainer share"),
        ("cuda:0", "cuda:0,cuda:1", "for one GPU that inference and the trainer share"),
        ("cuda:1", "cuda:1", "there is no model or folder"),
    ],
)
def test_turns_are_taken_on_one_gpu_alone(
    trainer: str, inference: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices_ = ["--trainer-device", trainer, "--inference-devices", inference]
    assert main(["serve", "--model", "no-such-model", "--enable-sleep-mode", *devices_]) > 0
    assert said in capsys.readouterr().err


def test_a_processor_takes_as_many_replicas_as_it_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cores", lambda: 2)
    layout("cpu", "cpu:0", "cpu:1").require({})
    with pytest.raises(EngineError, match=r"there is no cpu:2: this machine has 2 cores for replicas"):
        layout("cpu", "cpu:0", "cpu:1", "cpu:2").require({})


def test_each_child_finds_its_own_gpu_alone(
    tiny_llama: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-af,5")
    engine = LocalEngine(tiny_llama, logs=tmp_path, clock=SystemClock(), devices=layout("cuda:2", "cuda:0", "cuda:1"))
    commands = [each.settings.command(Path("socket")) for each in engine.inference.all]
    assert [command.env["CUDA_VISIBLE_DEVICES"] for command in commands] == ["3", "GPU-af"]
    assert engine.trainer._command(3).env["CUDA_VISIBLE_DEVICES"] == "5"
    assert [command.log_path.name for command in commands] == ["inference-cuda-0.log", "inference-cuda-1.log"]
    assert [command.name for command in commands][1] == "inference (vLLM on cuda:1)"
    assert engine.info.device == "trainer cuda:2, inference cuda:0 cuda:1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert engine.trainer._command(3).env["CUDA_VISIBLE_DEVICES"] == "2"


def test_one_gpu_is_the_first_that_may_be_seen(tiny_llama: ModelFolder, tmp_path: Path) -> None:
    engine = LocalEngine(tiny_llama, logs=tmp_path, clock=SystemClock(), devices=Layout.one("cuda"))
    assert engine.info.device == "cuda"
    (inference,) = engine.inference.all
    assert inference.settings.log_path.name == "inference.log"
    assert inference.settings.child_name == "inference (vLLM)"
    assert DeviceName("cuda").environment({"CUDA_VISIBLE_DEVICES": "7,8"}) == {"CUDA_VISIBLE_DEVICES": "7"}


def test_replicas_on_a_processor_share_its_cores_and_leave_the_trainer_all(
    tiny_llama: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 48)
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    engine = LocalEngine(tiny_llama, logs=tmp_path, clock=SystemClock(), devices=layout("cpu", "cpu:0", "cpu:1"))
    for each in engine.inference.all:
        env = each.settings.command(Path("socket")).env
        assert (env["OMP_NUM_THREADS"], env["VLLM_CPU_OMP_THREADS_BIND"]) == ("24", "nobind")
        assert "CUDA_VISIBLE_DEVICES" not in env
    argv = engine.trainer._command(3).argv
    assert argv[argv.index("--threads") + 1] == "48"


def test_memory_is_counted_for_each_replica(tiny_llama: ModelFolder, tmp_path: Path) -> None:
    one, two = (
        LocalEngine(tiny_llama, logs=tmp_path, clock=SystemClock(), devices=layout("cpu", *names))
        for names in (["cpu"], ["cpu:0", "cpu:1"])
    )
    assert two.memory_needed() == (2 * one.memory_needed()[0], one.memory_needed()[1])
    assert two.inference.least_memory() == 2 * one.inference.least_memory()


def test_a_trainer_of_its_own_is_on_the_first_device(tiny_llama: ModelFolder, tmp_path: Path) -> None:
    trainer = LocalTrainer(tiny_llama, log_path=tmp_path, clock=SystemClock(), on_health=lambda _: None, device="cuda")
    settings = VllmSettings(model_dir=tiny_llama.path, model_name="m", log_path=tmp_path, device="cuda")
    assert trainer._command(3).env["CUDA_VISIBLE_DEVICES"] == settings.command(Path("s")).env["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(
    ("visible", "names", "gib"),
    [
        ("1,0", "cuda:0", 80),
        ("1,0", "cuda:1", 16),
        (None, "cuda:0", 16),
        (None, "cuda:1", 80),
        ("0,1", "cuda:0,cuda:1", 16),
    ],
)
def test_a_card_is_planned_with_by_the_number_that_cuda_gives_it(
    visible: str | None, names: str, gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Card(index=at, name="GPU", total=size * GIB, free=0, driver="580") for at, size in enumerate((16, 80))]
    monkeypatch.setattr("foundation.gpus.cards", lambda: found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    named = tuple(map(DeviceName.parse, names.split(",")))
    assert _least_card(Layout(trainer=named[0], inference=named)) == gib * GIB
