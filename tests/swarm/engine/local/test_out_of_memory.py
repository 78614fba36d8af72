"""Children that run out of the GPU's memory. What stands in for them needs no GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from foundation.clock import SystemClock
from swarm.engine.local.inference import VllmInference
from swarm.engine.local.trainer import LocalTrainer
from swarm.engine.machine import Device
from swarm.engine.sampling.server import OUT_OF_MEMORY, VllmSettings
from swarm.engine.seam import EngineDown
from swarm.engine.training.supervisor import BackOff, ChildCommand, ChildProcess
from tests.fakes.hanging_trainer import model_folder

pytestmark = pytest.mark.anyio
PATIENT = BackOff(first_s=0.01, failures=3, first_boot_failures=3)


class Ending:
    """Children that say their last words and end."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.words = ""
        self.started = 0
        self._start = ChildProcess.start
        patch.setattr(ChildProcess, "start", self.start)
        patch.setattr(VllmSettings, "check_memory", lambda _: None)

    async def start(self, command: ChildCommand) -> ChildProcess:
        self.started += 1
        argv = [sys.executable, "-S", "-c", "import sys; sys.exit(sys.argv[1])", self.words]
        return await self._start(replace(command, argv=argv))


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Ending:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Ending(monkeypatch)


def child(who: str, device: Device, folder: Path) -> VllmInference | LocalTrainer:
    model, log = model_folder(folder / "model"), folder / "log"
    if who == "trainer":
        return LocalTrainer(
            model, log_path=log, clock=SystemClock(), on_health=lambda _: None, device=device, back_off=PATIENT
        )
    (model.path / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'
    )
    settings = VllmSettings(model_dir=model.path, model_name="eight", log_path=log, device=device)
    return VllmInference(settings, clock=SystemClock(), back_off=PATIENT)


@pytest.mark.parametrize(
    ("who", "words"), [*(("inference", words) for words in OUT_OF_MEMORY), ("trainer", OUT_OF_MEMORY[0])]
)
async def test_a_child_that_ran_out_of_the_gpus_memory_is_not_started_again_and_says_what_needs_less(
    who: str, words: str, ending: Ending, tmp_path: Path
) -> None:
    ending.words = f"ERROR: {words}, tried to allocate 20 GiB"
    made = child(who, "cuda", tmp_path)
    with pytest.raises(EngineDown, match="ran out of GPU memory"):
        await made.boot()
    assert ending.started == 1
    assert made.health.failed_for_good
    reason = made.health.reason or ""
    advice, _, log = reason.partition("\n")
    assert f"{who} ran out of GPU memory" in advice
    assert "end other programs on the GPU, or" in advice
    assert "`swarm serve --plan` shows what needs how much" in advice
    assert ending.words in log
    await made.shutdown()


@pytest.mark.parametrize("who", ["inference", "trainer"])
@pytest.mark.parametrize(("device", "words"), [("cpu", OUT_OF_MEMORY[0]), ("cuda", "an illegal memory access")])
async def test_a_child_that_ended_for_another_reason_is_started_again(
    who: str, device: Device, words: str, ending: Ending, tmp_path: Path
) -> None:
    ending.words = words
    made = child(who, device, tmp_path)
    with pytest.raises(EngineDown, match=words):
        await made.boot()
    assert ending.started == PATIENT.first_boot_failures
    assert "ran out of GPU memory" not in (made.health.reason or "")
    await made.shutdown()
