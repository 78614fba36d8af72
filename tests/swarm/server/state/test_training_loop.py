"""Training goes on by itself: steps, checkpoints, limits, and every way in which an engine or a server can die."""

from __future__ import annotations

import asyncio
import errno
import math
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from foundation.clock import ManualClock
from swarm.client.wire import read
from swarm.engine.seam import EngineHealth, ReplicaHealth
from swarm.protocol.episodes import DropReason, EpisodeAbort, TaskProgress
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.status import Phase, RunReport, RunRequest
from swarm.protocol.teams import Decider, EpisodePreparation, TeamResult
from swarm.server.state.rows import HeldOutRow
from swarm.server.storage.reader import Reader
from tests.fakes.engine import FaultyEngine
from tests.swarm.server.state.world import PATIENCE_S, World, running, spec

pytestmark = pytest.mark.anyio


def made(engine: FaultyEngine) -> list[list[str]]:
    """Episodes of each step that stands in the trainer's weights."""
    return [[e.episode_id for group in batch.groups for e in group.episodes] for batch in engine.made]


async def test_a_run_trains_to_its_limit_and_everything_is_in_a_checkpoint(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin()
        batches = [[lease.episode_id for lease in await world.batch()] for _ in range(3)]
        await world.until_status("complete")
        assert made(world.engine) == batches
        assert await world.states() == ["trained 1"] * 4 + ["trained 2"] * 4 + ["trained 3"] * 4
        report = await world.service.report(run_id)
        assert (report.step, report.status, report.reason) == (3, "complete", "reached its limit of 3 steps")
        assert [step.step for step in report.steps] == [1, 2, 3]
        assert [step.step for step in (await world.service.report(run_id, since_step=2)).steps] == [3]
        checkpoints = [line for line in world.engine.log if line.startswith("checkpoint")]
        assert checkpoints == ["checkpoint 2", "checkpoint 3"]


async def test_a_step_reports_the_trainers_metrics_and_the_servers(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin()
        first = await world.claim("t-1")
        world.clock.advance(7)
        await world.call(first)
        await world.end(first, 1.0, success=True)
        await world.episode("t-1", 0.0)
        await world.episode("t-2", 0.0)
        await world.episode("t-2", 0.0)
        await world.until_step(1)
        values = (await world.service.report(run_id)).steps[0].values
        assert (values["episodes"], values["groups"], values["success_rate"]) == (4, 2, 0.25)
        assert (values["generate_s"], values["sync_s"], values["step_s"]) == (7, 0, 7)
        assert (values["staleness_mean"], values["staleness_max"]) == (0, 0)
        assert values["sampled_tokens_mean"] > 0
        assert {"reward_mean", "loss", "grad_norm", "train_s"} <= set(values)
        assert all(math.isfinite(value) for value in values.values())


async def test_episodes_that_had_no_part_in_the_loss_are_dropped_with_the_trainers_reason(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 1})
        for task, reward in (("t-1", 1.0), ("t-1", 1.0), ("t-2", 0.0), ("t-2", 1.0)):
            await world.episode(task, reward)
        await world.until_status("complete")
        assert await world.states() == ["dropped zero_variance"] * 2 + ["trained 1"] * 2
        page = await world.service.ledger(step=1)
        assert [entry.task_id for entry in page.entries] == ["t-2", "t-2"]


async def test_groups_with_equal_rewards_do_not_count_for_an_informative_batch(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"rule": "informative_tasks"}, limits={"steps": 1})
        await world.episode("t-0", 1.0)
        await world.episode("t-0", 1.0)
        await world.batch()
        await world.until_status("complete")
        assert await world.states() == ["dropped zero_variance"] * 2 + ["trained 1"] * 4


async def test_what_is_learnt_whole_fills_an_informative_batch_in_the_end(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        batch = {"rule": "informative_tasks", "max_gen_batches": 2}
        await world.begin(batch=batch, limits={"steps": 2})

        async def flat(task: str) -> None:
            await world.episode(task, 1.0)
            await world.episode(task, 1.0)

        for number in range(4):  # two steps' worth of groups
            await flat(f"t-{number}")
        await world.episode("t-1", 0.0)
        await world.episode("t-1", 1.0)
        await flat("t-9")
        await world.until_step(1)
        assert await world.states() == ["dropped zero_variance"] * 8 + ["in_step 1"] * 2 + ["dropped zero_variance"] * 2
        page = await world.service.ledger(step=1)
        assert [entry.task_id for entry in page.entries] == ["t-1", "t-1"]
        for number in range(6):  # and nothing else comes: the second step is made of such groups too
            await flat(f"t-{10 + number}")
        await world.until_status("complete")


async def test_groups_of_equal_rewards_that_fill_a_step_stay_over_a_failed_write_and_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, clock = FaultyEngine(), ManualClock()
    async with running(tmp_path, engine, clock) as world:
        batch = {"rule": "informative_tasks", "max_gen_batches": 1}
        run_id = await world.begin(batch=batch, limits={"steps": 1})
        for task in ("t-1", "t-2", "t-3"):
            for _ in range(2):
                await world.episode(task, 1.0)
        found = ["dropped zero_variance"] * 4 + ["ended"] * 2
        assert await world.states() == found
        with monkeypatch.context() as disk:
            disk.setattr(world.store, "commit", full_disk)
            assert (await world.refused(world.claim("t-4"))).code is ErrorCode.STORAGE_FULL
        await world.pause()
        assert await world.states() == found
    async with running(tmp_path, FaultyEngine().adopt(engine), clock) as world:
        world.run_id = run_id
        assert ((await world.service.status()).pool.groups_ready, await world.states()) == (1, found)


def full_disk() -> None:
    raise Refusal(ErrorCode.STORAGE_FULL, "full")


async def test_a_batch_can_be_cut_by_the_number_of_episodes(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"rule": "episodes", "episodes": 3}, limits={"steps": 1})
        await world.batch()
        await world.until_status("complete")
        assert await world.states() == ["trained 1"] * 4


async def test_a_batch_lists_groups_in_the_order_they_were_opened_and_episodes_by_slot(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 1})
        leases = [await world.claim(task) for task in ("t-2", "t-1", "t-2", "t-1")]
        for lease in reversed(leases):
            await world.call(lease)
            await world.end(lease, float(lease.slot or 0))
        await world.until_status("complete")
        ordered = [leases[0], leases[2], leases[1], leases[3]]
        assert made(world.engine) == [[lease.episode_id for lease in ordered]]


async def test_with_no_staleness_allowed_claims_wait_while_the_step_is_made(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        world.engine.gate = asyncio.Event()
        await world.batch()
        await world.until_phase(Phase.UPDATING)
        assert (await world.refused(world.claim("t-3"))).code is ErrorCode.DRAINING
        waiting = asyncio.create_task(world.claim("t-3", wait_s=60))
        await world.passes(1)
        assert not waiting.done()
        world.engine.gate.set()
        assert (await waiting).weights_version.step == 1


async def test_with_staleness_allowed_claims_go_on_as_far_as_the_bound_lets_them(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(max_staleness=1)
        world.engine.gate = asyncio.Event()
        await world.batch()
        await world.until_phase(Phase.UPDATING)
        for task in ("t-3", "t-4"):
            await world.claim(task)
        assert (await world.refused(world.claim("t-5"))).code is ErrorCode.DRAINING


async def test_groups_that_are_too_stale_when_a_batch_is_made_are_dropped(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin(max_staleness=1, limits={"steps": None})
        slow = [await world.claim("slow", idle_limit_s=10_000) for _ in range(2)]
        for lease in slow:
            await world.call(lease)  # sampled by the weights of step 0
        for step in (1, 2):
            await world.batch()
            await world.until_step(step)
        for lease in slow:
            await world.end(lease)
        await world.batch()
        await world.until_step(3)
        assert (await world.states())[:2] == ["dropped stale"] * 2
        values = (await world.service.report(run_id)).steps[-1].values
        assert values["staleness_max"] <= 1


# -- evaluation and ends ------------------------------------------------------------------------------------------------


async def test_after_the_limit_eval_episodes_go_on_with_the_last_weights_and_train_claims_are_refused(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 1})
        await world.batch()
        await world.until_status("complete")
        refusal = await world.refused(world.claim("t-1"))
        assert (refusal.code, refusal.fields["run_status"]) == (ErrorCode.OVER_LIMIT, "complete")
        assert "limit of 1 steps" in refusal.detail
        lease = await world.episode("e-1", 0.5, kind="eval")
        assert (lease.group_id, lease.slot, lease.weights_version.step) == (None, None, 1)
        entry = await world.service.entry(lease.episode_id)
        assert (entry.state, entry.reason, entry.reward) == ("dropped", DropReason.EVAL, 0.5)


async def test_eval_claims_that_wait_for_the_limit_never_see_older_weights(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 1})
        world.engine.gate = asyncio.Event()
        await world.batch()
        last = asyncio.create_task(world.claim("t-1", wait_s=60))
        await world.until_phase(Phase.UPDATING)
        world.engine.gate.set()
        assert (await world.refused(last)).code is ErrorCode.OVER_LIMIT
        assert (await world.claim("e-1", kind="eval")).weights_version.step == 1


async def test_a_new_run_takes_the_place_of_a_complete_one(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        first = await world.begin(limits={"steps": 1})
        await world.batch()
        await world.until_status("complete")
        evaluating = await world.claim("e-1", kind="eval")
        second = await world.begin()
        assert (await world.service.entry(evaluating.episode_id)).reason is DropReason.RUN_ENDED
        assert (await world.claim("t-1")).weights_version.step == 0
        assert (await world.service.report(first)).status == "complete"
        assert (await world.service.report(second)).status == "running"


async def test_a_run_that_took_longer_than_its_wall_time_is_complete(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": None, "wall_s": 100})
        await world.episode("t-1")
        held = await world.claim("t-2")
        await world.passes(101)
        await world.until_status("complete")
        assert await world.states() == ["dropped run_ended"] * 2
        assert (await world.refused(world.end(held))).code is ErrorCode.LEASE_LOST


async def test_a_run_that_sampled_its_tokens_is_complete(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": None, "tokens": 2})
        await world.episode("t-1")
        await world.until_status("complete")
        assert "sampled tokens" in ((await world.service.report(world.run_id)).reason or "")


async def test_a_stop_lets_running_episodes_finish_checkpoints_and_goes_idle(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin(limits={"steps": None})
        await world.batch()
        await world.until_step(1)
        held = await world.claim("t-1")
        await world.service.stop_run(run_id)
        await world.until_phase(Phase.DRAINING)
        assert (await world.refused(world.claim("t-2"))).code is ErrorCode.DRAINING
        await world.call(held)
        await world.end(held)
        await world.until_phase(Phase.IDLE)
        assert await world.states() == ["trained 1"] * 4 + ["dropped run_ended"]
        status = await world.service.status()
        assert (status.run_id, status.engine.warm) == (None, True)
        assert (await world.service.report(run_id)).status == "stopped"
        assert (await world.refused(world.claim("t-1"))).code is ErrorCode.OVER_LIMIT
        assert (await world.service.stop_run(run_id)).status == "stopped"


@pytest.mark.parametrize("batches", [1, 2])
async def test_a_stop_trains_the_batches_that_the_last_episode_completes(tmp_path: Path, batches: int) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin(limits={"steps": None}, max_staleness=1)
        played = [(f"t-{number}", reward) for number in range(2 * batches) for reward in (0.0, 1.0)]
        held = [(await world.claim(task), reward) for task, reward in played]
        await world.service.stop_run(run_id)
        for lease, _ in held:
            await world.call(lease)
        await asyncio.gather(*(world.end(lease, reward) for lease, reward in held))
        await world.until_status("stopped")
        steps = [step for step in range(1, batches + 1) for _ in range(4)]
        assert await world.states() == [f"trained {step}" for step in steps]
        assert (await world.service.report(run_id)).checkpoints[-1].step == batches


async def test_a_stop_does_not_wait_longer_than_its_drain_limit(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin(limits={"drain_limit_s": 50})
        await world.claim("t-1")
        await world.service.stop_run(run_id)
        await world.until_phase(Phase.DRAINING)
        await world.passes(20)
        refusal = await world.refused(world.service.create_run(RunRequest(spec=spec()), by="other"))
        assert "is stopping: 1 open episode may still end, within 30 s" in refusal.detail
        await world.passes(31)
        await world.until_phase(Phase.IDLE)
        assert await world.states() == ["dropped run_ended"]


async def test_a_stop_does_not_wait_for_a_team_of_a_run_before_it(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        left = await world.claim("t-1")
        await world.call(left)
        decider = Decider(url="http://127.0.0.1:1", episode_id="ep-gone", key="swd_k")
        wish = EpisodePreparation(lease=left.lease, decider=decider, result=TeamResult(reward=1.0))
        await world.service.prepare(left.episode_id, wish, "sealed")
        await world.service.stop_run(world.run_id)
        await world.hurry(lambda: world.has_status("stopped"))
        await world.begin()
        at = world.clock.monotonic()
        await world.service.stop_run(world.run_id)
        await world.until_status("stopped")
        assert world.clock.monotonic() == at
        assert (await world.service.status()).pool.prepared == 1


async def test_a_checkpoint_can_be_asked_for(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin()
        assert (await world.service.request_checkpoint(run_id)).step == 0
        await world.batch()
        await world.until_step(1)
        reference = await world.service.request_checkpoint(run_id)
        assert (reference.step, reference.path) == (1, str(tmp_path / "runs" / run_id))
        assert await world.states() == ["trained 1"] * 4


async def test_a_checkpoint_asked_for_before_the_run_is_open_again_says_where_it_lies(tmp_path: Path) -> None:
    engine, clock = FaultyEngine(), ManualClock()
    async with running(tmp_path, engine, clock) as world:
        run_id = await world.begin()
        await world.batch()
        await world.until_step(1)
        await world.service.request_checkpoint(run_id)
    world = World(tmp_path, FaultyEngine().adopt(engine), clock)
    asked = asyncio.create_task(world.service.request_checkpoint(run_id))
    await world.pause()
    await world.start()
    assert (await asked).path == str(tmp_path / "runs" / run_id)
    await world.stop()


async def test_a_changed_learning_rate_holds_from_the_next_step_on(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin(limits={"steps": 2})
        await world.batch()
        await world.until_step(1)
        await world.service.patch_run(run_id, {"optimizer": {"learning_rate": 3e-4}}, None, "tester")
        await world.batch()
        await world.until_status("complete")
        assert [batch.spec.optimizer.learning_rate for batch in world.engine.made] == [1e-5, 3e-4]
        assert [step.config_version for step in (await world.service.report(run_id)).steps] == [1, 2]


# -- crashes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["train", "trained", "checkpoint", "checkpointed", "serve"])
async def test_a_trainer_that_dies_is_brought_back_by_replaying_recorded_batches(tmp_path: Path, moment: str) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 5}, checkpoint={"every_steps": 3})
        batches = []
        for step in range(1, 6):
            if step == 3:
                world.engine.crash_at[moment] = 1
            batch = asyncio.create_task(world.batch())
            await world.hurry(batch.done)
            batches.append([lease.episode_id for lease in await batch])
        await world.hurry(lambda: world.has_status("complete"))
        assert world.engine.crash_at[moment] == 0
        assert made(world.engine) == batches
        assert await world.states() == [f"trained {step}" for step in range(1, 6) for _ in range(4)]
        assert [batch.step for batch in world.engine.made] == [1, 2, 3, 4, 5]


async def test_a_run_of_an_older_version_with_a_temperature_that_is_refused_now_can_be_looked_at_and_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, clock = FaultyEngine(), ManualClock()
    async with running(tmp_path, engine, clock) as world:
        run_id = await world.begin()
    with sqlite3.connect(tmp_path / "pool" / "pool.sqlite") as db:
        ((stored,),) = db.execute("SELECT spec FROM configs")
        old = orjson.dumps({**orjson.loads(stored), "sampling": {"temperature": 0.005}})
        db.execute("UPDATE configs SET spec = ?", (old,))
    db.close()
    async with running(tmp_path, FaultyEngine().adopt(engine), clock) as world:
        await world.until_phase(Phase.ROLLING)
        (line,) = [record.message for record in caplog.records if run_id in record.message]
        assert "stop the run or patch it" in line
        assert "sampling.temperature: " in line
        report = await world.service.report(run_id)
        assert read(RunReport, report.model_dump_json().encode()).spec.sampling.temperature == 0.005
        await world.service.patch_run(run_id, {"sampling": {"temperature": 0.01}}, None, "ann")
        await world.service.stop_run(run_id)
        await world.until_status("stopped")


async def test_a_restarted_server_goes_on_with_its_run_by_itself(tmp_path: Path) -> None:
    engine, clock = FaultyEngine(), ManualClock()
    async with running(tmp_path, engine, clock) as world:
        await world.begin(checkpoint={"every_steps": 2})
        first = await world.batch()
        await world.until_step(1)
        ended = await world.episode("t-1", 1.0)
        open_one = await world.claim("t-1")
        server_id = (await world.service.status()).server_id
        run_id = world.run_id
    again = FaultyEngine().adopt(engine)
    async with running(tmp_path, again, clock) as world:
        world.run_id = run_id
        await world.until_phase(Phase.ROLLING)
        assert (await world.service.status()).server_id == server_id
        assert again.log == ["serve 0", "open 0", "train 1", "serve 1"]
        assert made(again) == [[lease.episode_id for lease in first]]
        assert (await world.service.entry(open_one.episode_id)).reason is DropReason.SERVER_RESTARTED
        assert (await world.refused(world.end(open_one))).code is ErrorCode.LEASE_LOST
        assert (await world.end(ended, 1.0, success=True)).status == "already_ended"
        mate = await world.episode("t-1", 0.0)
        assert (mate.group_id, mate.weights_version.step) == (ended.group_id, 1)
        await world.episode("t-2", 0.0)
        await world.episode("t-2", 1.0)
        await world.service.request_checkpoint(run_id)
        assert (await world.states()).count("trained 2") == 4


async def test_a_group_that_lost_everyone_makes_room_after_a_restart_too(tmp_path: Path) -> None:
    engine, clock = FaultyEngine(), ManualClock()
    async with running(tmp_path, engine, clock) as world:
        run_id = await world.begin()
        for task in ("t-1", "t-2"):
            lease = await world.claim(task)
            await world.service.abort(lease.episode_id, EpisodeAbort(lease=lease.lease, reason="x"))
    async with running(tmp_path, FaultyEngine().adopt(engine), clock) as world:
        world.run_id = run_id
        await world.until_phase(Phase.ROLLING)
        waiting = asyncio.create_task(world.claim("t-3", wait_s=100))
        await world.hurry(waiting.done)
        assert waiting.result().slot == 0


async def test_a_step_in_the_middle_of_which_the_server_died_is_made_with_its_journalled_batch(tmp_path: Path) -> None:
    engine, clock = FaultyEngine(), ManualClock()
    engine.gate = asyncio.Event()
    async with running(tmp_path, engine, clock) as world:
        run_id = await world.begin(limits={"steps": 1})
        batch = await world.batch()
        await world.until_phase(Phase.UPDATING)
    async with running(tmp_path, FaultyEngine().adopt(engine), clock) as world:
        await world.until_status("complete")
        assert made(world.engine) == [[lease.episode_id for lease in batch]]
        assert await world.states() == ["trained 1"] * 4
        assert [step.step for step in (await world.service.report(run_id)).steps] == [1]


async def test_a_complete_run_is_served_again_after_a_restart(tmp_path: Path) -> None:
    engine, clock = FaultyEngine(), ManualClock()
    async with running(tmp_path, engine, clock) as world:
        run_id = await world.begin(limits={"steps": 1})
        await world.batch()
        await world.until_status("complete")
    async with running(tmp_path, FaultyEngine().adopt(engine), clock) as world:
        world.run_id = run_id
        lease = await world.claim("e-1", kind="eval", wait_s=60)
        assert lease.weights_version.step == 1


async def test_training_that_is_refused_fails_the_run_with_the_reason(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin()
        world.engine.refuse = "the loss is not finite"
        await world.batch()
        await world.until_status("failed")
        report = await world.service.report(run_id)
        assert (report.status, report.reason) == ("failed", "the loss is not finite")
        assert await world.states() == ["dropped run_ended"] * 4
        entry = (await world.service.ledger()).entries[0]
        assert "the loss is not finite" in (entry.detail or "")
        assert (await world.refused(world.claim("t-1"))).code is ErrorCode.ENGINE_FAILED
        await world.begin()  # the next run is not harmed
        assert (await world.claim("t-1")).slot == 0


async def test_an_outcome_that_cannot_be_true_fails_the_run(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        world.engine.untrained = lambda batch: {"ep-of-another-batch": "zero_variance"}
        await world.batch()
        await world.until_status("failed")


async def test_a_trainer_that_dies_again_and_again_on_one_step_fails_the_run(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        world.engine.crash_at["train"] = 100
        await world.batch()
        await world.hurry(lambda: world.has_status("failed"))
        assert "the trainer died at train" in ((await world.service.report(world.run_id)).reason or "")


async def test_inference_that_came_back_is_given_the_weights_again_before_anyone_claims(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        await world.batch()
        await world.until_step(1)
        await world.until_phase(Phase.ROLLING)
        world.engine.log.clear()
        world.engine.tell(EngineHealth(ready=False, booting=True, reason="killed", failures=1))
        status = await world.service.status()
        assert (status.phase, status.engine.failures) == (Phase.BOOTING, 1)
        assert (await world.refused(world.claim("t-1"))).code is ErrorCode.NOT_ROLLING
        world.engine.tell(EngineHealth(ready=True, failures=1))
        assert world.service.state.situation.shown_phase is Phase.UPDATING
        await world.until_phase(Phase.ROLLING)
        assert (await world.claim("t-1")).weights_version.step == 1
        assert world.engine.log == ["serve 1"]


async def test_a_replica_that_hangs_is_named_and_the_run_goes_on_with_the_others(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 1})
        since = world.clock.now()
        well = ReplicaHealth(device="cuda:1", ready=True, reason="it was started")
        ill = ReplicaHealth(device="cuda:2", ready=False, reason="hangs", failures=1, hung_since=since)
        for reason in ("hangs", "is started anew"):
            replicas = (well, replace(ill, reason=reason))
            world.engine.tell(EngineHealth(ready=True, hung_since=since, failures=1, replicas=replicas))
            status = await world.service.status()
            assert (status.phase, status.trouble) == (Phase.ROLLING, None)
            assert status.engine.hang is not None
            assert status.engine.hang.over_at is None
            assert [(each.device, each.ready, each.reason) for each in status.engine.replicas] == [
                ("cuda:1", True, None),
                ("cuda:2", False, reason),
            ]
        world.engine.tell(EngineHealth(ready=True, failures=1, replicas=(well, replace(well, device="cuda:2"))))
        hang = (await world.service.status()).engine.hang
        assert hang is not None
        assert hang.over_at is not None
        await world.batch()
        await world.until_step(1)


async def test_an_engine_that_failed_for_good_is_said_to_have_failed(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin()
        world.engine.tell(EngineHealth(ready=False, failed_for_good=True, reason="out of memory", failures=5))
        status = await world.service.status()
        assert status.phase is Phase.FAILED
        assert status.failed is not None
        assert status.failed.reason == "out of memory"
        refusal = await world.refused(world.claim("t-1"))
        assert refusal.code is ErrorCode.ENGINE_FAILED
        assert "out of memory" in refusal.detail
        assert (await world.refused(world.service.request_checkpoint(run_id))).code is ErrorCode.ENGINE_FAILED


async def test_a_full_disk_holds_training_up_and_loses_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 1})
        world.engine.gate = asyncio.Event()
        await world.batch()
        await world.until_phase(Phase.UPDATING)
        await world.service.settled()
        world.store._db.execute("PRAGMA query_only = ON")
        world.engine.gate.set()
        for _ in range(5):
            await world.passes(1)
        assert made(world.engine)
        world.store._db.execute("PRAGMA query_only = OFF")
        await world.hurry(lambda: world.has_status("complete"))
        assert await world.states() == ["trained 1"] * 4
        assert [batch.step for batch in world.engine.made] == [1]


async def test_runs_of_a_server_do_not_share_checkpoints(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        for _ in range(2):
            await world.begin(limits={"steps": 1})
            await world.batch()
            await world.until_status("complete")
        assert len({path.parent for path in (tmp_path / "runs").glob("*/*")}) == 2
        request = RunRequest(spec=spec())
        await world.service.create_run(request, by="tester")
        await world.until_phase(Phase.ROLLING)
        assert (await world.service.status()).weights_version is not None


async def test_without_room_for_checkpoints_a_run_waits_and_the_status_says_why(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        in_the_way = tmp_path / "runs"
        in_the_way.write_text("")
        await world.service.create_run(RunRequest(spec=spec()), by="tester")
        await world.until(lambda: world.service.state.situation.storage_full is not None)
        status = await world.service.status()
        assert status.storage_full is not None
        assert status.trouble == status.storage_full.reason
        assert "make room on the disk" in status.trouble
        in_the_way.unlink()
        await world.hurry(lambda: world.service.state.situation.shown_phase is Phase.ROLLING)
        assert (await world.service.status()).trouble is None


async def test_an_engine_that_finds_no_room_to_open_a_run_is_asked_again_and_the_status_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as world:
        opened = world.engine.open_run

        async def full(*_: object, **__: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(world.engine, "open_run", full)
        await world.service.create_run(RunRequest(spec=spec()), by="tester")
        await world.until(lambda: world.service.state.situation.storage_full is not None)
        assert "No space left on device; make room on the disk" in ((await world.service.status()).trouble or "")
        monkeypatch.setattr(world.engine, "open_run", opened)
        await world.hurry(lambda: world.service.state.situation.shown_phase is Phase.ROLLING)
        assert (await world.service.status()).trouble is None


async def test_who_asks_about_every_episode_holds_up_neither_the_next_step_nor_reports_nor_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, asked_in = threading.Event(), set[str]()
    tasks, held_out = Reader.tasks, Reader.held_out

    def slow(reader: Reader, *wanted: Any) -> list[TaskProgress]:
        let_go.wait(PATIENCE_S)
        return tasks(reader, *wanted)

    def seen(reader: Reader, run_id: str) -> list[HeldOutRow]:
        asked_in.add(threading.current_thread().name)
        return held_out(reader, run_id)

    monkeypatch.setattr(Reader, "tasks", slow)
    monkeypatch.setattr(Reader, "held_out", seen)
    async with running(tmp_path) as world:
        await world.begin()
        asking = asyncio.create_task(world.service.tasks())
        await world.batch()
        try:
            await world.until_step(1)
            assert (await world.service.report(world.run_id)).step == 1
            assert not asking.done()
        finally:
            let_go.set()
        assert sum(progress.ended for progress in await asking) == 4
    assert threading.main_thread().name not in asked_in
