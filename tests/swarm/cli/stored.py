"""A run of a real trainer in a server's state directory, without vLLM: what commands over stored runs read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foundation.clock import ManualClock
from swarm.models.folder import ModelFolder
from swarm.server.state_dir import StateDir
from tests.fakes.training_engine import TrainingEngine
from tests.swarm.server.state.world import World

SPEC: dict[str, Any] = {
    "dtype": "float32",
    "optimizer": {"learning_rate": 1e-3},
    "limits": {"steps": 4},
    "checkpoint": {"every_steps": 2, "keep": 2},
    "sampling": {"max_tokens": 12},
}
LIMIT_S = 400.0
"""Of real time: a loaded machine takes long to start a trainer."""


@dataclass(frozen=True, slots=True)
class Stored:
    state_dir: Path
    run_id: str
    model: ModelFolder
    killed: list[str]


async def stored_run(
    state_dir: Path,
    model: ModelFolder,
    *,
    kills: Sequence[dict[str, float]] = (),
    evals: dict[int, float] | None = None,
    **fields: Any,
) -> Stored:
    """Four steps. kills: for each step in turn, after how long in which command the trainer is killed.

    evals: what an eval episode at this step earns.
    """
    home = state_dir.with_name(f"{state_dir.name}-trainer")
    home.mkdir(parents=True)
    engine = TrainingEngine(model, home)

    def before(step: int) -> None:
        engine.kill_in |= kills[step - 1] if step <= len(kills) else {}

    await engine.boot()
    try:
        run_id = await run_on(engine, state_dir, model, before=before, evals=evals or {}, **fields)
    finally:
        await engine.shutdown()
    return Stored(state_dir, run_id, model, engine.killed)


async def run_on(
    engine: Any,
    state_dir: Path,
    model: ModelFolder,
    *,
    before: Callable[[int], None] = lambda step: None,
    evals: Mapping[int, float] = MappingProxyType({}),
    **fields: Any,
) -> str:
    """The id of a whole run on this engine, which is booted and stays so. before: called before each step."""
    with StateDir.open(state_dir, model=model.name) as opened:
        opened.note_model(model.path, model.fingerprint)
    world, spec = World(state_dir, engine, ManualClock()), SPEC | fields
    try:
        await world.start()
        world.service.state.allow_algorithms = True
        await world.begin(**spec)
        await _train(world, spec["limits"]["steps"], before, evals)
    finally:
        await world.stop()
    return world.run_id


async def _train(world: World, steps: int, before: Callable[[int], None], evals: Mapping[int, float]) -> None:
    for step in range(1, steps + 1):
        await world.hurry(lambda: world.service.state.situation.engine_ready)
        before(step)
        await world.batch()
        await world.hurry(lambda step=step: stands_at(world, step))  # type: ignore[misc]
        if step in evals:
            lease = await world.claim("held-out", kind="eval", wait_s=1e2)
            await world.call(lease)
            await world.end(lease, evals[step])
    await world.hurry(lambda: world.has_status("complete"))


def stands_at(world: World, step: int) -> bool:
    """Whether the step is made and the server has come to rest after it."""
    run = world.service.state.run
    situation = world.service.state.situation
    return run is not None and run.step >= step and situation.opened_run == run.run_id
