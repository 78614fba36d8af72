"""An engine whose children die when a test says so. Apart from that it is the echo engine, and keeps the same contract."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from swarm.engine.echo.engine import EchoEngine
from swarm.engine.seam import (
    EngineHealth,
    RunContext,
    StepOutcome,
    TrainBatch,
    TrainerCrashed,
    TrainingRefused,
)
from swarm.protocol.episodes import WeightsVersion


class FaultyEngine(EchoEngine):
    """`crash_at` names moments ("train", "trained", "checkpoint", "checkpointed", "serve") and how often each shall crash.

    made: the batches behind the weights that stand now, in order. A crash takes those since the last checkpoint away.
    """

    def __init__(self) -> None:
        super().__init__()
        self.crash_at: dict[str, int] = {}
        self.refuse: str | None = None
        """What the next training shall be refused with."""
        self.untrained: Callable[[TrainBatch], dict[str, str]] | None = None
        """What to say was left out, in place of the truth."""
        self.gate: asyncio.Event | None = None
        """When set, training waits for it."""
        self.made: list[TrainBatch] = []
        self.log: list[str] = []
        self._kept: dict[Path, dict[int, list[TrainBatch]]] = {}
        self._directory = Path()
        self._dead = False

    def tell(self, health: EngineHealth) -> None:
        """Say this to the subscribers, as a supervisor of child processes would."""
        self._tell(health)

    def adopt(self, other: FaultyEngine) -> FaultyEngine:
        """Know what another engine's checkpoints are made of: the same machine after a restart. Returns self."""
        self._kept = other._kept
        return self

    async def open_run(self, run: RunContext, *, at_step: int | None = None) -> int:
        self._dead = False
        step = await super().open_run(run, at_step=at_step)
        self._directory = run.directory
        self.made = list(self._kept.get(run.directory, {}).get(step, []))
        self.log.append(f"open {step}")
        return step

    async def train(self, batch: TrainBatch) -> StepOutcome:
        if self.gate is not None:
            await self.gate.wait()
        self._moment("train")
        if self.refuse is not None:
            reason, self.refuse = self.refuse, None
            raise TrainingRefused(reason)
        outcome = await super().train(batch)
        self.made.append(batch)
        self.log.append(f"train {batch.step}")
        self._moment("trained")
        if self.untrained is not None:
            outcome = StepOutcome(step=outcome.step, metrics=outcome.metrics, untrained=self.untrained(batch))
        return outcome

    async def checkpoint(self, *, best: int | None = None) -> int:
        self._moment("checkpoint")
        step = await super().checkpoint(best=best)
        self._kept.setdefault(self._directory, {})[step] = list(self.made)
        self.log.append(f"checkpoint {step}")
        self._moment("checkpointed")
        return step

    async def serve(self, version: WeightsVersion) -> None:
        self._moment("serve")
        await super().serve(version)
        self.log.append(f"serve {version.step}")

    def _moment(self, name: str) -> None:
        if self.crash_at.get(name, 0) > 0:
            self.crash_at[name] -= 1
            self._dead = True
        if self._dead:
            raise TrainerCrashed(f"the trainer died at {name}")
