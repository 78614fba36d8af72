"""What is kept of episodes that are over, beside their ledger rows: nothing that grows with their number."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from swarm.protocol.episodes import EpisodeAbort
from swarm.server.state import claims
from swarm.server.state.leases import LEAST_SWEPT, Deadlines
from tests.swarm.server.state.world import World, running

pytestmark = pytest.mark.anyio


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path) as world:
        await world.begin()
        yield world


async def test_deadlines_of_closed_episodes_are_forgotten_and_those_of_open_ones_kept(world: World) -> None:
    silent = await world.claim(idle_limit_s=3600)
    for number in range(LEAST_SWEPT + 10):
        lease = await world.claim(f"t-{number}", kind="eval", idle_limit_s=86_400)
        await world.service.abort(lease.episode_id, EpisodeAbort(lease=lease.lease, reason="not wanted"))
        assert not world.service.is_open(lease.episode_id)
    assert len(world.service.state.deadlines) < 20
    assert world.service.is_open(silent.episode_id)
    await world.passes(3601)
    assert not world.service.is_open(silent.episode_id)


def test_deadlines_that_are_kept_stay_in_their_order() -> None:
    deadlines = Deadlines()
    for number in range(LEAST_SWEPT):
        deadlines.add(float(LEAST_SWEPT - number), f"at {LEAST_SWEPT - number}")
    deadlines.sweep(lambda name: name in ("at 2", "at 3", "at 5"))
    assert deadlines.next() == 2.0
    assert deadlines.take(4.0) == ["at 2", "at 3"]
    assert len(deadlines) == 1


async def test_calls_of_old_evaluations_are_freed_while_neither_a_checkpoint_nor_another_run_comes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "TRACES_KEPT", 20)
    monkeypatch.setattr(claims, "FREED_EVERY", 10)
    ended = [await world.episode(f"t-{number}", kind="eval") for number in range(40)]
    kept = [bool((await world.service.trace(lease.episode_id)).calls) for lease in ended]
    assert kept == [False] * 19 + [True] * 21
