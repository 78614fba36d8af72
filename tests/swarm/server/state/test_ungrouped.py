"""Ungrouped claims: the end names the task, and with it the group. Real service and training loop, a fake engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.protocol.episodes import EpisodeAbort, EpisodeGrant, EpisodeResult
from swarm.server.state.ungrouped import GuestClaim
from tests.swarm.server.state.world import ErrorCode, World, running

pytestmark = pytest.mark.anyio


async def claim(world: World, **fields: object) -> EpisodeGrant:
    stated = {"run_id": world.run_id, "client_id": "c-1", "wait_s": 0, "idle_limit_s": 100} | fields
    return await world.service.claim(GuestClaim.model_validate(stated))


async def end(world: World, lease: EpisodeGrant, task: str, reward: float = 1.0) -> None:
    await world.service.end(lease.episode_id, EpisodeResult(lease=lease.lease, reward=reward), task_id=task)


async def play(world: World, task: str, reward: float = 1.0) -> EpisodeGrant:
    lease = await claim(world)
    await world.call(lease)
    await end(world, lease, task, reward)
    return lease


async def places(world: World) -> list[tuple[str, str | None, int | None]]:
    entries = (await world.service.ledger(limit=100)).entries
    numbers: dict[str | None, str | None] = {None: None}
    for entry in entries:
        numbers.setdefault(entry.group_id, f"group {len(numbers)}")
    return [(entry.task_id, numbers[entry.group_id], entry.slot) for entry in entries]


async def test_an_end_joins_the_open_group_of_its_task_and_a_full_one_is_followed_by_the_next(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(max_staleness=1)
        leases = [await claim(world) for _ in range(4)]
        assert all(lease.group_id is None for lease in leases)
        for lease, task in zip(leases, ("t-1", "t-2", "t-1", "t-1"), strict=True):
            await world.call(lease)
            await end(world, lease, task)
        found = await places(world)
        assert found == [("t-1", "group 1", 0), ("t-2", "group 2", 0), ("t-1", "group 1", 1), ("t-1", "group 3", 0)]


async def test_groups_of_ungrouped_episodes_are_trained_like_any_other(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        for task in ("t-1", "t-2"):
            for reward in (0.0, 1.0):
                await play(world, task, reward)
        await world.until_step(1)
        (batch,) = world.engine.made
        assert [[episode.reward for episode in group.episodes] for group in batch.groups] == [[0.0, 1.0], [0.0, 1.0]]


async def test_named_and_unnamed_claims_share_the_groups_of_a_task(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        named = await world.claim("t-1")
        await play(world, "t-1")
        assert [place[1:] for place in await places(world)] == [("group 1", 0), ("group 1", 1)]
        assert named.slot == 0


async def test_as_many_are_open_as_the_next_steps_can_use(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        leases = [await claim(world) for _ in range(4)]
        refusal = await world.refused(claim(world))
        assert refusal.code is ErrorCode.DRAINING
        await world.call(leases[0])
        await end(world, leases[0], "t-1")
        assert (await world.refused(claim(world))).code is ErrorCode.DRAINING, "it holds its place until the step"


async def test_episodes_that_are_spread_too_thin_do_not_stop_the_run(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        for task in ("t-1", "t-2", "t-3", "t-4", "t-5", "t-4", "t-5"):
            await play(world, task)
        await world.until_step(1)


async def test_a_group_waits_for_open_ungrouped_episodes_and_no_longer(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"group_patience_s": 10})
        slow = await claim(world, idle_limit_s=1000)
        await play(world, "t-1")
        await world.passes(60)
        assert world.service.state.groups.ready() == []
        await world.service.abort(slow.episode_id, _abort(slow))
        assert len(world.service.state.groups.ready()) == 1, "its patience ran out long ago"


async def test_one_that_is_too_stale_is_dropped_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(limits={"steps": 5})
        old = await claim(world)
        await world.call(old)
        for task, reward in (("t-1", 0.0), ("t-1", 1.0), ("t-2", 1.0)):
            await play(world, task, reward)
        await world.episode("t-2", 0.0)
        await world.until_step(1)
        await play(world, "t-3")
        await end(world, old, "t-3")
        assert (await world.service.entry(old.episode_id)).reason == "stale"
        (group,) = [each for each in world.service.state.groups if each.row.task_id == "t-3"]
        assert len(group.ended) == 1


async def test_after_a_restart_no_slot_is_given_twice_and_an_end_is_known(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin(batch={"tasks": 2, "group_size": 3})
        ended, lost = await play(world, "t-1"), await claim(world)
        await world.die()
    async with running(tmp_path) as world:
        world.run_id = run_id
        await world.until(lambda: world.service.state.serving)
        assert (await world.service.entry(lost.episode_id)).reason == "server_restarted"
        await end(world, ended, "t-1")
        await play(world, "t-1")
        named = await world.claim("t-1")
        assert [place[1:] for place in await places(world)] == [
            ("group 1", 0),
            (None, None),
            ("group 1", 1),
            ("group 1", 2),
        ]
        assert named.slot == 2


async def test_draws_depend_on_the_episode_and_not_on_a_task(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        one, two = await claim(world), await claim(world)
        seeds = {world.service.open_call(lease.episode_id, lease.lease).seed for lease in (one, two)}
        assert len(seeds) == 2


async def test_an_evaluation_gets_its_number_with_its_task(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        named = await world.episode("t-1", kind="eval")
        unnamed = await claim(world, kind="eval")
        await world.call(unnamed)
        await end(world, unnamed, "t-1")
        rows = [world.service.reader.episode(lease.episode_id) for lease in (named, unnamed)]
        assert [(row.task_id, row.ordinal) for row in rows if row is not None] == [("t-1", 0), ("t-1", 1)]


async def test_an_end_must_name_the_task(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        lease = await claim(world)
        await world.call(lease)
        refusal = await world.refused(world.end(lease))
        assert refusal.code is ErrorCode.INVALID_SPEC
        await end(world, lease, "t-1")


async def test_a_run_with_a_mix_refuses_claims_without_a_task(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"mix": {"a": {"ratio": 1}}})
        assert (await world.refused(claim(world, mix="a"))).code is ErrorCode.INVALID_SPEC


def _abort(lease: EpisodeGrant) -> EpisodeAbort:
    return EpisodeAbort(lease=lease.lease, reason="gave up")
