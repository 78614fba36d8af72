"""A trainer that stops in the midst of a request: named, ended, started anew, and the step made once. Time is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from foundation.clock import ManualClock
from swarm.engine.training.limits import LEAST_LIMIT_S
from swarm.protocol.status import Hang, Phase
from tests.fakes.hanging_trainer import HangingEngine
from tests.swarm.server.state.world import PATIENCE_S, World, running

pytestmark = pytest.mark.anyio


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    clock = ManualClock()
    engine = HangingEngine(tmp_path, clock)
    async with running(tmp_path / "state", engine, clock) as made:
        try:
            yield made
        finally:
            await engine.trainer.shutdown()


def trainer_of(world: World) -> HangingEngine:
    assert isinstance(world.engine, HangingEngine)
    return world.engine


async def until(world: World, holds: Callable[[], bool], *, passes: float = 0.0) -> None:
    """Wait for another process, in whose life the test's time hardly passes."""
    async with asyncio.timeout(3 * PATIENCE_S):
        while not holds():
            if world.task is not None and world.task.done():
                world.task.result()
            await world.passes(passes)
            await asyncio.sleep(0.005)  # another process's state has no event to wait for


async def hang_of(world: World) -> Hang:
    status = await world.service.status()
    assert status.engine.hang is not None
    return status.engine.hang


@pytest.mark.parametrize("command", ["train", "export", "checkpoint"])
async def test_a_trainer_that_hangs_is_named_ended_and_its_step_made_again_once(world: World, command: str) -> None:
    engine = trainer_of(world)
    await world.begin(limits={"steps": 3}, checkpoint={"every_steps": 2})
    await world.batch()
    await world.until_step(1)
    before = engine.trainer.process_id
    engine.trainer.hang.write_text(command)
    step = asyncio.create_task(world.batch())
    await until(world, lambda: not engine.trainer.hang.exists())
    asked_at = world.clock.now()
    await world.passes(LEAST_LIMIT_S - 1)
    assert (await world.service.status()).trouble is None
    await until(world, lambda: world.service.state.situation.hang is not None, passes=1.0)
    hang = await hang_of(world)
    assert command in hang.reason
    assert hang.since == pytest.approx(asked_at, abs=1)
    assert hang.found_at - hang.since <= LEAST_LIMIT_S + 5
    await until(world, lambda: world.service.state.situation.engine_ready, passes=0.01)
    assert engine.trainer.process_id != before
    await until(world, lambda: world.service.state.situation.opened_run is not None, passes=0.5)
    await step
    third = asyncio.create_task(world.batch())
    await until(world, lambda: world.has_status("complete"), passes=0.01)
    await third
    assert (await hang_of(world)).over_at is not None
    assert (await world.service.status()).trouble is None
    trained = [name for episodes in engine.trained() for name in episodes]
    assert len(engine.trained()) == 3
    assert len(trained) == len(set(trained)) == 12
    assert set(await world.states()) == {"trained 1", "trained 2", "trained 3"}


async def test_a_trainer_that_hangs_when_a_run_is_opened_is_named_and_opens_it_again(world: World) -> None:
    engine = trainer_of(world)
    await world.until_phase(Phase.IDLE)
    engine.trainer.hang.write_text("open_run")
    beginning = asyncio.create_task(world.begin(limits={"steps": 1}))
    await until(world, lambda: not engine.trainer.hang.exists())
    await until(world, lambda: world.service.state.situation.hang is not None, passes=5.0)
    assert "reset" in (await hang_of(world)).reason
    await until(world, beginning.done, passes=0.01)
    step = asyncio.create_task(world.batch())
    await until(world, lambda: world.has_status("complete"), passes=0.01)
    await step
    assert len(engine.trained()) == 1


async def test_a_trainer_that_hangs_at_every_step_costs_its_run(world: World) -> None:
    engine = trainer_of(world)
    await world.begin(limits={"steps": 1})
    step = asyncio.create_task(world.batch())
    await step

    def hangs_again() -> bool:
        if not engine.trainer.hang.exists():
            engine.trainer.hang.write_text("train")
        return world.has_status("failed")

    await until(world, hangs_again, passes=2.0)
    report = await world.service.report(world.run_id)
    assert "without completing a step" in (report.reason or "")
    assert "has not answered" in (report.reason or "")
