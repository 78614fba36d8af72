"""An engine that samples with real vLLM and trains with the real trainer, without handing weights from one to the other."""

from __future__ import annotations

from pathlib import Path

from foundation.clock import SystemClock
from swarm.engine.local.inference import VllmInference
from swarm.engine.local.trainer import LocalTrainer
from swarm.engine.seam import RunContext, StepOutcome, TrainBatch, TrainingRefused
from swarm.models.folder import ModelFolder
from tests.fakes.sampling_engine import SamplingEngine


class LearningEngine(SamplingEngine):
    """For runs with a learning rate of 0: the hosted weights are served all the time."""

    def __init__(self, inference: VllmInference, model: ModelFolder, log_path: Path) -> None:
        super().__init__(inference)
        dtype = inference.settings.compute_dtype
        self._trainer = LocalTrainer(
            model, log_path=log_path, clock=SystemClock(), on_health=lambda _: None, dtype=dtype
        )

    async def boot(self) -> None:
        await self._trainer.boot()

    async def shutdown(self) -> None:
        await self._trainer.shutdown()

    async def open_run(self, run: RunContext, *, at_step: int | None = None) -> int:
        await super().open_run(run)
        return await self._trainer.open_run(run, at_step)

    async def train(self, batch: TrainBatch) -> StepOutcome:
        if batch.spec.optimizer.learning_rate:
            raise TrainingRefused("this engine serves the hosted weights alone: give a learning rate of 0")
        return await self._trainer.train(batch)

    async def checkpoint(self, *, best: int | None = None) -> int:
        return await self._trainer.checkpoint(best)
