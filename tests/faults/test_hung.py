"""SIGSTOP of the real children of an engine, at each phase: named in status, running again, and no step lost or made twice."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from foundation.clock import ManualClock, SystemClock
from swarm.engine.local.engine import LocalEngine
from swarm.engine.seam import Engine
from swarm.engine.training.limits import LEAST_LIMIT_S
from swarm.engine.training.supervisor import BackOff, Supervisor
from swarm.engine.verl.engine import VerlEngine, VerlLayout
from swarm.models.folder import ModelFolder
from swarm.protocol.episodes import EpisodeAbort
from swarm.protocol.status import Hang, Phase
from tests.fakes.engine import FaultyEngine
from tests.fakes.training_engine import TrainingEngine
from tests.swarm.engine.verl.platform_environment import ENVIRONMENT
from tests.swarm.server.state.world import World

pytestmark = [pytest.mark.campaign, pytest.mark.anyio]
_LOG = logging.getLogger(__name__)
PATIENCE_S = 600.0
"""A start of vLLM on a machine that has a lot else to do."""
NAMED_S = 30.0
"""After the limit."""


@asynccontextmanager
async def serving(folder: Path, engine: Engine) -> AsyncIterator[World]:
    """A server's coordinator over a real engine, in real time."""
    world = World(folder, cast(FaultyEngine, engine), cast(ManualClock, SystemClock()))
    await world.start()
    try:
        yield world
    finally:
        await world.stop()
        await engine.shutdown()


async def until(world: World, holds: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(limit_s):
        while not holds():
            if world.task is not None and world.task.done():
                world.task.result()
            await asyncio.sleep(0.05)  # another process's state has no event to wait for


async def begin(world: World, steps: int) -> None:
    await until(world, lambda: world.service.state.situation.shown_phase is Phase.IDLE)
    async with asyncio.timeout(PATIENCE_S):
        beginning = asyncio.create_task(world.begin(limits={"steps": steps}, checkpoint={"every_steps": 1}))
        await asyncio.wait({beginning})
    if (error := beginning.exception()) is not None and not isinstance(error, TimeoutError):
        raise error  # the world's own patience is shorter than a restart may take


def below(pid: int) -> list[int]:
    """Every process that came from this one, nearest first."""
    children = [int(text) for file in Path(f"/proc/{pid}/task").glob("*/children") for text in file.read_text().split()]
    return [*children, *(other for child in children for other in below(child))]


def stop(pid: int) -> float:
    """By SIGSTOP; returns when, as Unix time."""
    os.kill(pid, signal.SIGSTOP)
    return time.time()


def api_server(reaper: int) -> list[int]:
    """vLLM's, once it is there."""
    return below(reaper)[:1]


def engine_core(reaper: int) -> list[int]:
    """vLLM's, which the API server forked, once it is there."""
    return [pid for server in api_server(reaper) for pid in below(server) if b"forking_server" in command_line(pid)]


def ranks(reaper: int) -> list[int]:
    """verl's, once they are there."""
    return [pid for pid in below(reaper) if command_line(pid).startswith(b"ray::RankWorker")]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return b""


def boot_limit_s(supervisor: Supervisor) -> float:
    """How long the next start may take."""
    return supervisor._boots.limit_s(supervisor._boot)


async def started_anew(world: World, reaper: Callable[[], int | None], victims: Callable[[int], list[int]]) -> int:
    """Kill what the reaper started, all of it; the first of the victims as soon as it is there again, in mid-start."""
    first = reaper()
    os.kill(below(first or 0)[0], signal.SIGKILL)
    found: list[int] = []

    def there() -> bool:
        current = reaper()
        found[:] = [] if current is None or current == first else victims(current)
        return found != []

    await until(world, there)
    return found[0]


def stops_before(patch: pytest.MonkeyPatch, owner: Any, method: str, victim: Callable[[], int]) -> list[float]:
    """The next call of the method stops the victim first; the list gets when."""
    usual, stopped = getattr(owner, method), list[float]()

    async def hung(*args: Any, **fields: Any) -> Any:
        if not stopped:
            stopped.append(stop(victim()))
        return await usual(*args, **fields)

    patch.setattr(owner, method, hung)
    return stopped


async def named_and_over(world: World, stopped: list[float], limit_s: float) -> Hang:
    """Wait until a hang is named and over; checks that it was named in time."""
    known = world.service.state.situation.hang
    await until(world, lambda: world.service.state.situation.hang not in (None, known))
    hang = world.service.state.situation.hang
    assert hang is not None
    assert (await world.service.status()).trouble is not None
    assert hang.found_at - stopped[-1] <= limit_s + NAMED_S
    await until(world, lambda: world.service.state.situation.shown_phase is Phase.ROLLING)
    over = (await world.service.status()).engine.hang
    assert over is not None
    assert over.over_at is not None
    took = (hang.found_at - stopped[-1], over.over_at - stopped[-1])
    _LOG.warning("stopped (limit %.0f s), found %.1f s later, over %.1f s later: %s", limit_s, *took, hang.reason)
    return over


async def assert_a_stopped_start_is_found(
    world: World, supervisor: Supervisor, reaper: Callable[[], int | None], victims: Callable[[int], list[int]]
) -> None:
    """A child that is stopped while it starts anew, after the first of two steps, is named in time, and each step is made once."""
    await begin(world, 2)
    await world.batch()
    await until(world, lambda: world.step == 1)
    limit_s = boot_limit_s(supervisor)
    victim = await started_anew(world, reaper, victims)
    hang = await named_and_over(world, [stop(victim)], limit_s)
    assert "was not ready" in hang.reason
    assert hang.over_at is not None
    assert hang.over_at - hang.found_at <= limit_s
    await world.batch()
    await once(world, 2)


async def once(world: World, steps: int) -> None:
    """Every step was made of four episodes of its own."""
    await until(world, lambda: world.has_status("complete"))
    entries = (await world.service.ledger(limit=1000)).entries
    by_step = [[e.episode_id for e in entries if e.state == "trained" and e.step == step + 1] for step in range(steps)]
    assert [len(names) for names in by_step] == [4] * steps
    assert [step.step for step in (await world.service.report(world.run_id)).steps] == [*range(1, steps + 1)]


@pytest.mark.parametrize("method", ["train", "export", "checkpoint"])
async def test_a_trainer_that_is_stopped_while_it_works_is_named_and_its_step_made_once(
    tiny_llama: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    engine = TrainingEngine(tiny_llama, tmp_path / "home")
    async with serving(tmp_path / "state", engine) as world:
        await begin(world, 3)
        await world.batch()
        await until(world, lambda: world.step == 1)
        stopped = stops_before(monkeypatch, engine.trainer, method, lambda: below(engine.trainer.process_id or 0)[0])
        playing = asyncio.create_task(world.batch())
        hang = await named_and_over(world, stopped, LEAST_LIMIT_S)
        assert hang.phase is (Phase.UPDATING if method != "checkpoint" else hang.phase)
        await playing
        await until(world, lambda: world.step >= 2)
        await world.batch()
        await once(world, 3)


async def test_a_trainer_that_is_stopped_while_it_starts_is_named_and_started_again(
    tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    engine = TrainingEngine(tiny_llama, tmp_path / "home")
    async with serving(tmp_path / "state", engine) as world:
        await begin(world, 1)
        first = engine.trainer.process_id
        os.kill(below(first or 0)[0], signal.SIGKILL)
        await until(
            world,
            lambda: engine.trainer.process_id not in (None, first) and below(engine.trainer.process_id or 0) != [],
        )
        limit_s = boot_limit_s(engine.trainer._supervisor)
        stopped = [stop(below(engine.trainer.process_id or 0)[0])]
        hang = await named_and_over(world, stopped, limit_s)
        assert "was not ready" in hang.reason
        await world.batch()
        await once(world, 1)


async def test_inference_that_is_stopped_is_named_and_served_again_whichever_process_of_it(
    tiny_llama: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LocalEngine(
        tiny_llama, logs=tmp_path / "logs", clock=SystemClock(), max_model_len=512, back_off=BackOff(first_s=0.05)
    )

    async with serving(tmp_path / "state", engine) as world:
        await begin(world, 3)
        await world.batch()
        await until(world, lambda: world.step == 1)
        for victims in (engine_core, api_server):
            lease = await world.claim("t-1")
            stopped = [stop(victims(engine.inference.all[0].process_id or 0)[0])]
            call = asyncio.create_task(world.call(lease))
            hang = await named_and_over(world, stopped, LEAST_LIMIT_S)
            assert "no sign of life" in hang.reason
            await asyncio.gather(call, return_exceptions=True)
            await world.service.abort(lease.episode_id, EpisodeAbort(lease=lease.lease, reason="its call failed"))
        stopped = stops_before(
            monkeypatch,
            engine.inference.all[0],
            "publish",
            lambda: engine_core(engine.inference.all[0].process_id or 0)[0],
        )
        playing = asyncio.create_task(world.batch())
        hang = await named_and_over(world, stopped, LEAST_LIMIT_S)
        assert "weights are changed" in hang.reason
        await playing
        await until(world, lambda: world.step >= 2)
        await world.batch()
        await once(world, 3)


@pytest.mark.parametrize("victims", [engine_core, api_server], ids=["core", "api"])
async def test_inference_that_is_stopped_while_it_starts_is_named_and_started_again(
    tiny_llama: ModelFolder, tmp_path: Path, victims: Callable[[int], list[int]]
) -> None:
    engine = LocalEngine(
        tiny_llama, logs=tmp_path / "logs", clock=SystemClock(), max_model_len=512, back_off=BackOff(first_s=0.05)
    )
    async with serving(tmp_path / "state", engine) as world:
        await assert_a_stopped_start_is_found(
            world, engine.inference.all[0]._supervisor, lambda: engine.inference.all[0].process_id, victims
        )


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: `make verl`")
async def test_a_rank_of_verl_that_is_stopped_while_it_starts_is_named_and_all_is_started_again(
    tiny_llama: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    layout = VerlLayout(
        max_model_len=512,
        ranks_per_node=2,
        tensor_parallel=2,
        max_num_seqs=16,
        sampling_memory=0.05,
        kv_cache_bytes=64 << 20,
        tokens_per_rank=2048,
    )
    engine = VerlEngine(tiny_llama, layout, logs=tmp_path / "logs", clock=SystemClock())
    async with serving(tmp_path / "state", engine) as world:
        await assert_a_stopped_start_is_found(world, engine.driver._supervisor, lambda: engine.driver.process_id, ranks)
