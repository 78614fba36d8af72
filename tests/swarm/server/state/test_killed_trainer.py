"""A step that kills the trainer each time it is made costs its run, and not the server."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from foundation.clock import ManualClock
from swarm.engine.seam import EngineHealth, RunContext, StepOutcome, TrainBatch, TrainerCrashed
from swarm.engine.training.supervisor import BackOff, ChildCommand, ChildProcess, Supervisor
from swarm.server.training_loop import CRASHES_ALLOWED
from tests.fakes.engine import FaultyEngine
from tests.swarm.server.state.world import running

pytestmark = pytest.mark.anyio


class KilledEngine(FaultyEngine):
    """Its trainer is a real child under a real supervisor. deadly: each `train` ends it, as a system without memory does."""

    def __init__(self, folder: Path, clock: ManualClock) -> None:
        super().__init__()
        self.deadly = False
        self._down = asyncio.Event()
        self._command = ChildCommand(
            name="trainer",
            argv=[sys.executable, "-c", "import time; time.sleep(600)"],
            env=dict(os.environ),
            log_path=folder / "trainer.log",
        )
        self.supervisor = Supervisor(
            start=lambda: ChildProcess.start(self._command),
            ready=_at_once,
            on_health=self._heard,
            clock=clock,
            boot_s=20,
        )

    async def boot(self) -> None:
        await self.supervisor.boot()
        await super().boot()

    async def open_run(self, run: RunContext, *, at_step: int | None = None) -> int:
        await self.supervisor.settled()
        return await super().open_run(run, at_step=at_step)

    async def train(self, batch: TrainBatch) -> StepOutcome:
        child = self.supervisor.child
        if not self.deadly or child is None:
            return await super().train(batch)
        self._down.clear()
        await child.stop(grace_s=0)
        await self._down.wait()
        raise TrainerCrashed("the trainer ended during train")

    def _heard(self, health: EngineHealth) -> None:
        if not health.ready:
            self._down.set()
        self.tell(health)


async def _at_once(child: ChildProcess) -> None:
    """Such a child serves as soon as it is there."""


async def test_a_run_whose_step_kills_the_trainer_is_given_up_before_the_engine_is(tmp_path: Path) -> None:
    clock = ManualClock()
    engine = KilledEngine(tmp_path, clock)
    async with running(tmp_path, engine, clock) as world:
        try:
            await world.begin(limits={"steps": 1})
            engine.deadly = True
            await world.batch()
            await world.hurry(lambda: world.has_status("failed"))
            assert "without completing a step" in ((await world.service.report(world.run_id)).reason or "")
            engine.deadly = False
            await world.hurry(lambda: engine.supervisor.health.ready)
            await world.begin(limits={"steps": 1})
            await world.batch()
            await world.hurry(lambda: world.has_status("complete"))
        finally:
            await engine.supervisor.shutdown()


def test_a_run_may_crash_less_often_than_its_engine() -> None:
    assert BackOff().failures > CRASHES_ALLOWED + 1
