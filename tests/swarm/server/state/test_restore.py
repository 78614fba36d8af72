"""Going back to a checkpoint: a new branch of the run, and the ledger says what became of the old one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foundation.clock import ManualClock
from swarm.protocol.episodes import DropReason, EpisodeAbort
from swarm.protocol.errors import ErrorCode
from swarm.protocol.status import Phase, RestoreRequest, RunRequest
from swarm.protocol.teams import Decider, EpisodeCommit, EpisodePreparation, TeamResult
from swarm.server.storage.reader import Reader
from tests.fakes.engine import FaultyEngine
from tests.swarm.server.state.world import PATIENCE_S, World, running, spec

pytestmark = pytest.mark.anyio


async def steps(world: World, first: int, last: int) -> None:
    for step in range(first, last + 1):
        await world.batch()
        await world.until_step(step)


async def restored(world: World, step: int, key: str | None = None) -> int:
    """Go back; returns the branch."""
    wish = RestoreRequest(step=step, idempotency_key=key)
    report = await world.service.restore_run(world.run_id, wish, "ann")
    assert report.step == step
    return report.branch


async def test_a_restored_run_goes_on_from_the_checkpoint_on_a_new_branch(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 4}, checkpoint={"every_steps": 2, "keep": 5})
        await steps(world, 1, 3)
        ended, held = await world.episode("t-1"), await world.claim("t-1")
        old = world.engine.made[2]
        assert await restored(world, 2) == 1
        assert await world.states() == ["trained 1"] * 4 + ["trained 2"] * 4 + ["dropped superseded"] * 6
        entry = await world.service.entry(ended.episode_id)
        assert "restored to step 2 on branch 1 by ann" in (entry.detail or "")
        assert (await world.refused(world.end(held))).code is ErrorCode.LEASE_LOST
        lease = await world.claim("t-1", wait_s=60)
        assert (lease.weights_version.branch, lease.weights_version.step) == (1, 2)
        await world.call(lease)
        await world.end(lease, 0.0)
        for task, reward in (("t-1", 1.0), ("t-2", 1.0), ("t-2", 0.0)):
            await world.episode(task, reward)
        await world.until_step(3)
        await world.batch()
        await world.until_status("complete")
        assert [batch.step for batch in world.engine.made] == [1, 2, 3, 4]
        assert world.engine.made[2] != old
        report = await world.service.report(world.run_id)
        assert [(step.step, step.branch) for step in report.steps] == [(1, 0), (2, 0), (3, 1), (4, 1)]


async def test_a_trainer_that_dies_on_the_new_branch_comes_back_on_it(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 9}, checkpoint={"every_steps": 2, "keep": 5})
        await steps(world, 1, 4)
        await world.service.request_checkpoint(world.run_id)
        await restored(world, 2)
        await steps(world, 3, 3)
        new = world.engine.made[2]
        world.engine.crash_at["train"] = 1
        batch = asyncio.create_task(world.batch())
        await world.hurry(batch.done)
        await world.hurry(lambda: len(world.engine.made) == 4)
        assert world.engine.made[2] == new
        assert "open 2" in world.engine.log[-8:]


async def test_a_restarted_server_goes_on_with_the_new_branch(tmp_path: Path) -> None:
    engine, clock = FaultyEngine(), ManualClock()
    async with running(tmp_path, engine, clock) as world:
        run_id = await world.begin(limits={"steps": 9}, checkpoint={"every_steps": 2})
        await steps(world, 1, 4)
        await world.service.request_checkpoint(run_id)
        await restored(world, 2)
    async with running(tmp_path, FaultyEngine().adopt(engine), clock) as world:
        world.run_id = run_id
        lease = await world.claim("t-1", wait_s=60)
        assert (lease.weights_version.branch, lease.weights_version.step) == (1, 2)
        assert [batch.step for batch in world.engine.made] == [1, 2]


async def test_a_complete_run_can_be_restored_to_the_hosted_model(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 1})
        await world.episode("e-1", kind="eval")
        await world.batch()
        await world.until_status("complete")
        await world.episode("e-1", kind="eval")
        assert await restored(world, 0) == 1
        assert (await world.service.report(world.run_id)).status == "running"
        assert await world.states() == ["dropped eval"] + ["dropped superseded"] * 5
        progress = [(p.task_id, p.kind, p.step, p.ended) for p in await world.service.tasks()]
        assert progress == [("e-1", "eval", 0, 1)]
        await world.batch()
        await world.until_status("complete")


async def test_an_empty_key_restores_each_time(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 9}, checkpoint={"every_steps": 1, "keep": 5})
        await steps(world, 1, 1)
        assert [await restored(world, 0, key="") for _ in range(2)] == [1, 2]


async def test_a_failed_run_can_be_restored_and_trained_differently(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 3})
        await steps(world, 1, 2)
        await world.until_phase(Phase.ROLLING)
        world.engine.refuse = "the loss is not finite"
        await world.batch()
        await world.until_status("failed")
        await restored(world, 2)
        await world.service.patch_run(world.run_id, {"optimizer": {"learning_rate": 1e-6}}, None, "ann")
        await world.batch()
        await world.until_status("complete")
        assert (await world.states()).count("trained 3") == 4


async def test_a_restore_waits_for_the_step_under_way_and_supersedes_it(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 9}, checkpoint={"every_steps": 1})
        await steps(world, 1, 1)
        await world.until_phase(Phase.ROLLING)
        world.engine.gate = asyncio.Event()
        await world.batch()
        await world.until_phase(Phase.UPDATING)
        waiting = asyncio.create_task(restored(world, 1))
        await world.pause()
        assert not waiting.done()
        other = await world.refused(world.service.restore_run(world.run_id, RestoreRequest(step=0), "bob"))
        assert other.code is ErrorCode.SERVER_BUSY
        world.engine.gate.set()
        assert await waiting == 1
        assert (await world.states())[4:] == ["dropped superseded"] * 4


async def test_a_restore_that_waits_for_the_engine_is_refused_when_another_run_took_the_place(tmp_path: Path) -> None:
    engine, clock = FaultyEngine(), ManualClock()
    async with running(tmp_path, engine, clock) as world:
        run_id = await world.begin(limits={"steps": 2}, checkpoint={"every_steps": 1})
        await steps(world, 1, 1)
        await world.service.patch_run(run_id, {"optimizer": {"learning_rate": 1e-6}}, None, "ann")
        await world.batch()
        await world.until_status("complete")
    world = World(tmp_path, FaultyEngine().adopt(engine), clock)
    world.run_id = run_id
    await world.service.start()  # not the training_loop: the engine boots
    waiting = asyncio.create_task(restored(world, 2))
    await world.pause()
    other = (await world.service.create_run(RunRequest(spec=spec()), by="bob")).run_id
    world.task = asyncio.create_task(world.training_loop.run())
    async with asyncio.timeout(PATIENCE_S):
        refusal = await world.refused(waiting)
    assert (refusal.code, "replaced by another" in refusal.detail) == (ErrorCode.OVER_LIMIT, True)
    world.run_id = other
    await steps(world, 1, 1)
    await world.stop()


async def test_a_checkpoint_that_was_waited_for_cannot_come_once_the_run_was_restored(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 9}, checkpoint={"every_steps": 9})
        await steps(world, 1, 1)
        await world.until_phase(Phase.ROLLING)
        world.engine.gate = asyncio.Event()
        await world.batch()
        await world.until_phase(Phase.UPDATING)
        wanted = asyncio.create_task(world.service.request_checkpoint(world.run_id))
        waiting = asyncio.create_task(restored(world, 0))
        await world.pause()
        world.engine.gate.set()
        assert await waiting == 1
        async with asyncio.timeout(PATIENCE_S):
            refusal = await world.refused(wanted)
        assert refusal.code is ErrorCode.ENGINE_FAILED
        assert "restored" in refusal.detail


async def test_a_repeated_restore_with_its_key_makes_one_branch(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(checkpoint={"every_steps": 1})
        assert await restored(world, 0, "k") == await restored(world, 0, "k") == 1
        await steps(world, 1, 2)
        await world.service.request_checkpoint(world.run_id)
        assert await restored(world, 1, "later") == 2
        again = await world.service.restore_run(world.run_id, RestoreRequest(step=0, idempotency_key="k"), "ann")
        assert (again.branch, again.step) == (2, 1)
        other = world.service.restore_run(world.run_id, RestoreRequest(step=2, idempotency_key="k"), "ann")
        assert (await world.refused(other)).code is ErrorCode.IDEMPOTENCY_CONFLICT


@pytest.mark.parametrize(("step", "reason"), [(0, DropReason.SUPERSEDED), (1, DropReason.EVAL)])
async def test_an_evaluation_that_its_team_decides_after_the_restore_is_of_the_step_that_played_it(
    tmp_path: Path, step: int, reason: DropReason
) -> None:
    engine, clock = FaultyEngine(), ManualClock()
    async with running(tmp_path, engine, clock) as world:
        run_id = await world.begin(limits={"steps": 9}, checkpoint={"every_steps": 1})
        await steps(world, 1, 1)
        await world.service.request_checkpoint(run_id)
        lease = await world.claim("e-1", kind="eval", wait_s=60)
        await world.call(lease)
        decider = Decider(url="http://127.0.0.1:1", episode_id="ep-elsewhere", key="swd_k")
        wish = EpisodePreparation(lease=lease.lease, decider=decider, result=TeamResult(reward=1.0))
        await world.service.prepare(lease.episode_id, wish, "sealed")
        await restored(world, step)
    async with running(tmp_path, FaultyEngine().adopt(engine), clock) as world:
        await world.service.commit(lease.episode_id, EpisodeCommit(lease=lease.lease))
        assert (await world.service.entry(lease.episode_id)).reason is reason
        evaluated = await world.service.read(lambda reader: reader.held_out(run_id))
        assert [row.step for row in evaluated] == ([1] if reason is DropReason.EVAL else [])


@pytest.mark.parametrize("decision", ["commit", "abort"])
async def test_evaluations_of_a_step_that_is_made_again_get_numbers_of_their_own(tmp_path: Path, decision: str) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 9}, checkpoint={"every_steps": 1})
        await steps(world, 1, 1)
        await world.service.request_checkpoint(world.run_id)
        old = await world.claim("e-1", kind="eval", wait_s=60)
        await world.call(old)
        decider = Decider(url="http://127.0.0.1:1", episode_id="ep-elsewhere", key="swd_k")
        wish = EpisodePreparation(lease=old.lease, decider=decider, result=TeamResult(reward=1.0))
        await world.service.prepare(old.episode_id, wish, "sealed")
        await restored(world, 0)
        await steps(world, 1, 1)
        await world.until_phase(Phase.ROLLING)
        await world.claim("e-1", kind="eval")
        if decision == "commit":
            await world.service.commit(old.episode_id, EpisodeCommit(lease=old.lease))
        else:
            await world.service.abort(old.episode_id, EpisodeAbort(lease=old.lease, reason="late"))
        await world.claim("e-1", kind="eval")
        rows = world.service.state.live.values()
        assert sorted(live.row.ordinal for live in rows if live.row.kind == "eval") == [0, 1]


@pytest.mark.parametrize("prepared", [False, True])
async def test_an_abort_while_the_past_is_read_for_a_restore_gives_its_number_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepared: bool
) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 9}, checkpoint={"every_steps": 1})
        await world.episode("e-1", kind="eval")
        held = await world.claim("e-1", kind="eval", idle_limit_s=1e4)
        if prepared:
            decider = Decider(url="http://127.0.0.1:1", episode_id="ep-elsewhere", key="swd_k")
            wish = EpisodePreparation(lease=held.lease, decider=decider, result=TeamResult(reward=1.0))
            await world.service.prepare(held.episode_id, wish, "sealed")
        await steps(world, 1, 1)
        await world.service.request_checkpoint(world.run_id)
        await world.until_phase(Phase.ROLLING)
        read = world.service.read

        async def read_while_it_is_aborted(query: Callable[[Reader], Any]) -> Any:
            found = await read(query)
            monkeypatch.undo()
            await world.service.abort(held.episode_id, EpisodeAbort(lease=held.lease, reason="never mind"))
            return found

        monkeypatch.setattr(world.service, "read", read_while_it_is_aborted)
        await restored(world, 0)
        await world.claim("e-1", kind="eval", wait_s=60)
        assert [live.row.ordinal for live in world.service.state.live.values()] == [1]


async def test_an_abort_that_is_being_written_at_a_restore_gives_its_number_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 9}, checkpoint={"every_steps": 1})
        held = await world.claim("e-1", kind="eval", idle_limit_s=1e4)
        await steps(world, 1, 1)
        await world.service.request_checkpoint(world.run_id)
        commit, disk = world.store.commit, threading.Event()

        def slow_commit() -> None:
            assert disk.wait(PATIENCE_S)
            commit()

        monkeypatch.setattr(world.store, "commit", slow_commit)
        abort = asyncio.create_task(
            world.service.abort(held.episode_id, EpisodeAbort(lease=held.lease, reason="never mind"))
        )
        waiting = asyncio.create_task(restored(world, 0))
        for _ in range(5):
            await asyncio.sleep(0)
            await world.service.read(lambda reader: None)
        disk.set()
        await asyncio.gather(abort, waiting)
        await world.claim("e-1", kind="eval", wait_s=60)
        assert [live.row.ordinal for live in world.service.state.live.values()] == [0]


async def test_a_checkpoint_that_is_not_kept_cannot_be_restored(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 9}, checkpoint={"every_steps": 1, "keep": 2})
        await steps(world, 1, 3)
        await world.service.request_checkpoint(world.run_id)
        refusal = await world.refused(world.service.restore_run(world.run_id, RestoreRequest(step=1), "ann"))
        assert (refusal.code, refusal.fields["checkpoints"]) == (ErrorCode.NOT_FOUND, [0, 2, 3])
        await world.service.stop_run(world.run_id)
        await world.until_phase(Phase.IDLE)
        await world.begin()
        world.run_id, newest = "run-gone", world.run_id
        assert (
            await world.refused(world.service.restore_run("run-gone", RestoreRequest(step=0), "a"))
        ).code == "not_found"
        world.run_id = newest


@pytest.mark.parametrize("damage", ["missing", "cut short"])
async def test_a_damaged_checkpoint_is_refused_and_the_others_can_still_be_restored(
    tmp_path: Path, damage: str
) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin(limits={"steps": 9}, checkpoint={"every_steps": 1, "keep": 5})
        await steps(world, 1, 3)
        await world.service.request_checkpoint(run_id)
        file = tmp_path / "runs" / run_id / "step-00000001.json"
        file.unlink() if damage == "missing" else file.write_bytes(file.read_bytes()[:9])
        refusal = await world.refused(world.service.restore_run(run_id, RestoreRequest(step=1), "ann"))
        assert (refusal.code, refusal.fields["checkpoints"]) == (ErrorCode.NOT_FOUND, [0, 2, 3])
        assert str(file) in refusal.detail
        assert await restored(world, 2) == 1
        assert await world.states() == ["trained 1"] * 4 + ["trained 2"] * 4 + ["dropped superseded"] * 4
        await steps(world, 3, 3)


async def test_superseded_episodes_keep_their_reason_when_the_branch_is_trained_again(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 2}, checkpoint={"every_steps": 1})
        await steps(world, 1, 1)
        await world.service.request_checkpoint(world.run_id)
        await restored(world, 0)
        await world.batch()
        await world.until_step(1)
        await world.service.request_checkpoint(world.run_id)
        assert await world.states() == ["dropped superseded"] * 4 + ["trained 1"] * 4
        page = await world.service.ledger(reason=DropReason.SUPERSEDED)
        assert len(page.entries) == 4
        assert len((await world.service.ledger(step=1)).entries) == 4
