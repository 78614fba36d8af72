"""An engine that trains with the real trainer and samples noise: what a server's recovery needs, without vLLM.

Its child can be killed at any moment of a command.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from foundation.clock import SystemClock
from foundation.ids import derived_seed
from swarm.engine.local.trainer import LocalTrainer
from swarm.engine.seam import (
    Dialect,
    EngineError,
    EngineHealth,
    EngineInfo,
    RunContext,
    Sampled,
    SampledChoice,
    SampledEvent,
    SampleRequest,
    StepOutcome,
    TrainBatch,
)
from swarm.engine.training.checkpoints import require_whole
from swarm.engine.training.supervisor import BackOff
from swarm.models.folder import ModelFolder
from swarm.protocol.episodes import VersionSpan, WeightsVersion

Result = TypeVar("Result")
TOKENS = 24
VOCABULARY = 400


class TrainingEngine:
    """kill_in: how long into which command ("open_run", "train", "checkpoint", "serve") the child is killed, once each."""

    def __init__(self, model: ModelFolder, home: Path) -> None:
        self.info = EngineInfo(
            backend="training",
            device="cpu",
            model=model.name,
            fingerprint=model.fingerprint,
            max_model_len=2048,
            dtype="float32",
            own_functions=True,
        )
        self.kill_in: dict[str, float] = {}
        self.killed: list[str] = []
        self._home = home
        self._version = WeightsVersion(run_id="")
        self._subscribers: list[Callable[[EngineHealth], None]] = []
        self.trainer = LocalTrainer(
            model,
            log_path=home / "trainer.log",
            clock=SystemClock(),
            on_health=self._tell,
            back_off=BackOff(first_s=0.01, failures=10),
        )

    def subscribe(self, on_health: Callable[[EngineHealth], None]) -> None:
        self._subscribers.append(on_health)

    async def boot(self) -> None:
        await self.trainer.boot()

    async def shutdown(self) -> None:
        await self.trainer.shutdown()

    async def render(self, dialect: Dialect, body: dict[str, Any], *, add_generation_prompt: bool = True) -> list[int]:
        return [1, *range(30, 40)]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    async def sample(self, request: SampleRequest) -> Sampled:
        """The same noise for the same seed."""
        noise = random.Random(derived_seed("noise", request.body["seed"]))
        choice = SampledChoice(
            sampled_ids=[noise.randrange(3, VOCABULARY) for _ in range(TOKENS)],
            logprobs=[-6.0 + noise.random() for _ in range(TOKENS)],
            finish_reason="stop",
            versions=[VersionSpan(start=0, end=TOKENS, version=self._version)],
        )
        return Sampled(prompt_ids=[1, *range(30, 40)], choices=[choice], answer={})

    def stream(self, request: SampleRequest) -> AsyncIterator[SampledEvent]:
        raise EngineError("this engine answers whole calls only")

    async def open_run(self, run: RunContext, *, at_step: int | None = None) -> int:
        step = await self._mortal("open_run", self.trainer.open_run(run, at_step))
        self._version = WeightsVersion(run_id=run.run_id, branch=run.branch, step=step)
        return step

    async def require_checkpoint(self, directory: Path, step: int) -> None:
        require_whole(directory, step)

    async def train(self, batch: TrainBatch) -> StepOutcome:
        return await self._mortal("train", self.trainer.train(batch))

    async def checkpoint(self, *, best: int | None = None) -> int:
        return await self._mortal("checkpoint", self.trainer.checkpoint(best))

    async def serve(self, version: WeightsVersion) -> None:
        await self._mortal("serve", self.trainer.export(self._home / "served.safetensors"))
        self._version = version

    async def _mortal(self, command: str, answer: Awaitable[Result]) -> Result:
        after_s = self.kill_in.pop(command, None)
        if after_s is None:
            return await answer
        asked = asyncio.ensure_future(answer)
        await asyncio.wait({asked}, timeout=after_s)
        self.killed.append(command)
        self._kill()
        return await asked

    def _kill(self) -> None:
        """The trainer itself, below its reaper."""
        reaper = self.trainer.process_id
        child = Path(f"/proc/{reaper}/task/{reaper}/children").read_text().split()
        os.kill(int(child[0]), signal.SIGKILL)

    def _tell(self, health: EngineHealth) -> None:
        for subscriber in self._subscribers:
            subscriber(health)
