"""An engine that samples with real vLLM and trains nothing: what the gateway needs, without a trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from swarm.engine.local.inference import VllmInference
from swarm.engine.seam import (
    Dialect,
    EngineError,
    EngineHealth,
    EngineInfo,
    RunContext,
    Sampled,
    SampledEvent,
    SampleRequest,
    StepOutcome,
    TrainBatch,
    TrainingRefused,
)
from swarm.protocol.episodes import WeightsVersion


class SamplingEngine:
    """Keeps the engine's seam as far as sampling goes."""

    def __init__(self, inference: VllmInference) -> None:
        self._inference = inference
        settings = inference.settings
        self.info = EngineInfo(
            backend="vllm",
            device="cpu",
            model=settings.model_name,
            fingerprint="0" * 64,
            max_model_len=settings.model_len,
            dtype=settings.compute_dtype,
            masks=True,
        )

    def subscribe(self, on_health: Callable[[EngineHealth], None]) -> None:
        self._inference.subscribe(on_health)

    async def boot(self) -> None:
        await self._inference.boot()

    async def shutdown(self) -> None:
        """The inference belongs to the fixture that booted it."""

    async def render(self, dialect: Dialect, body: dict[str, Any], *, add_generation_prompt: bool = True) -> list[int]:
        return await self._inference.render(dialect, body, add_generation_prompt=add_generation_prompt)

    def decode(self, ids: list[int]) -> str:
        return self._inference.decode(ids)

    async def sample(self, request: SampleRequest) -> Sampled:
        return await self._inference.sample(request)

    def stream(self, request: SampleRequest) -> AsyncIterator[SampledEvent]:
        return self._inference.stream(request)

    async def open_run(self, run: RunContext, *, at_step: int | None = None) -> int:
        await self.serve(WeightsVersion(run_id=run.run_id, branch=run.branch, step=0))
        return 0

    async def require_checkpoint(self, directory: Path, step: int) -> None:
        raise EngineError("this engine samples only")

    async def train(self, batch: TrainBatch) -> StepOutcome:
        raise TrainingRefused("this engine samples only")

    async def checkpoint(self, *, best: int | None = None) -> int:
        return 0

    async def serve(self, version: WeightsVersion) -> None:
        await self._inference.publish(None, version)
