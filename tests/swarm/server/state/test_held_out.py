"""Which checkpoint does best on the eval episodes, and that it stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.protocol.episodes import DropReason
from swarm.protocol.errors import ErrorCode
from swarm.protocol.summary import LedgerFilter
from swarm.server.state.rows import HeldOutRow
from swarm.server.state.runs import best_of, kept_steps
from tests.swarm.server.state.world import World, running

pytestmark = pytest.mark.anyio


def row(step: int, reward: float, episodes: int = 10) -> HeldOutRow:
    return HeldOutRow(step=step, reward=reward, episodes=episodes)


def test_the_best_is_the_kept_step_with_the_highest_mean_the_newer_of_equals() -> None:
    assert best_of([2, 4, 6], [row(2, 0.5), row(3, 0.9), row(4, 0.7), row(6, 0.7)]) == row(6, 0.7)
    assert best_of([2, 4], []) is None
    assert best_of([], [row(2, 0.5)]) is None


def test_a_step_evaluated_on_a_few_tasks_alone_is_not_the_best() -> None:
    assert best_of([2, 4], [row(2, 0.5), row(4, 1.0, episodes=8)]) == row(2, 0.5)
    assert best_of([2, 4], [row(2, 0.5), row(4, 1.0, episodes=9)]) == row(4, 1.0, episodes=9)


def test_the_rule_keeps_the_newest_and_the_best() -> None:
    assert kept_steps([2, 4, 6, 8], 2, 2) == [2, 6, 8]
    assert kept_steps([2, 4, 6, 8], 2, 8) == [6, 8]
    assert kept_steps([2], 2, None) == [2]


async def evaluate(world: World, reward: float) -> None:
    lease = await world.claim("held-out", kind="eval", wait_s=1e2)
    await world.call(lease)
    await world.end(lease, reward)


async def test_the_best_checkpoint_is_marked_in_the_report_and_can_be_restored(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(checkpoint={"every_steps": 1, "keep": 1}, limits={"steps": 4})
        for step, reward in enumerate((0.9, 0.1, 0.3, 0.2), start=1):
            await world.batch()
            await world.until_step(step)
            await evaluate(world, reward)
        await world.until_status("complete")
        report = await world.service.report(world.run_id)
        assert [(kept.step, kept.held_out, kept.best) for kept in report.checkpoints] == [
            (1, 0.9, True),
            (4, 0.2, False),
        ]
        assert sorted(path.name for path in (tmp_path / "runs" / world.run_id).iterdir()) == [
            "step-00000001.json",
            "step-00000004.json",
        ]


async def test_an_evaluation_without_a_call_counts_nowhere_and_its_number_is_given_again(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        silent = await world.claim("held-out", kind="eval")
        await world.end(silent, 1.0)
        entry = await world.service.entry(silent.episode_id)
        assert (entry.state, entry.reason, entry.cause) == ("dropped", DropReason.NO_CALLS, "rollout")
        assert world.store.read.held_out(world.run_id) == []
        assert await world.service.tasks() == []
        await evaluate(world, 0.25)
        ordinals = [row.ordinal for row in world.store.read.ledger(LedgerFilter(), 0, 10)]
        assert ordinals == [0, 0]
        (held_out,) = world.store.read.held_out(world.run_id)
        assert (held_out.reward, held_out.episodes) == (0.25, 1)


async def test_what_a_person_played_by_hand_is_an_evaluation_and_no_score_of_the_weights(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await world.claim("held-out", kind="eval")
        assert (await world.end(lease, 1.0, by_hand=True)).dropped is None
        entry = await world.service.entry(lease.episode_id)
        assert (entry.reason, entry.cause, entry.reward) == (DropReason.EVAL, None, 1.0)
        assert world.store.read.held_out(world.run_id) == []
        train = await world.claim()
        refusal = await world.refused(world.end(train, 1.0, by_hand=True))
        assert (refusal.code, refusal.fields["errors"][0]["field"]) == (ErrorCode.INVALID_SPEC, "by_hand")


async def test_an_evaluation_counts_for_weights_that_played_all_of_it_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(checkpoint={"every_steps": 1, "keep": 5}, limits={"steps": 9})
        await world.batch()
        await world.until_step(1)
        straddling, late = [await world.claim("held-out", kind="eval", wait_s=1e2) for _ in range(2)]
        await world.call(straddling)
        await evaluate(world, 0.2)
        await world.batch()
        await world.until_step(2)
        for lease in (straddling, late):
            await world.call(lease)
            await world.end(lease, 1.0)
        await evaluate(world, 0.1)
        await world.service.request_checkpoint(world.run_id)
        kept = (await world.service.report(world.run_id)).checkpoints
        assert [(one.step, one.held_out, one.best) for one in kept] == [(1, 0.2, True), (2, 0.1, False)]
