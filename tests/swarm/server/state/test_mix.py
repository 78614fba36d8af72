"""Families of tasks: shares kept exactly, debts, patience, changes while the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.clock import ManualClock
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.quantities import MOST
from swarm.protocol.runspec import BatchSpec, MixSpec
from swarm.server.state import batching as mixes
from swarm.server.state import claims
from swarm.server.state.batching import draw, openings
from swarm.server.state.groups import Groups
from swarm.server.state.rows import MixRow
from tests.fakes.engine import FaultyEngine
from tests.swarm.server.state.world import World, running

pytestmark = pytest.mark.anyio

THREE = {"math": {"ratio": 40}, "web": {"ratio": 30}, "code": {"ratio": 30}}


def walk(row: MixRow, mix: dict[str, MixSpec], turns: int) -> list[str]:
    """Whose turns they are, one by one."""
    names = []
    for _ in range(turns):
        ahead = mixes.Turns(mixes.balance_under(row, mix))
        names.append(ahead.whose(mix))
        row = mixes.balance_after(row, mix, names[-1:])
    return names


# -- shares -------------------------------------------------------------------------------------------------------------


def test_any_fifty_groups_have_the_shares_of_the_mix_exactly() -> None:
    mix = {name: MixSpec(**family) for name, family in THREE.items()}
    names = walk(MixRow(), mix, 400)
    for start in range(350):
        assert Counter(names[start : start + 50]) == {"math": 20, "web": 15, "code": 15}


@given(weights=st.lists(st.integers(1, 12), min_size=1, max_size=6), start=st.integers(0, 40))
def test_any_window_as_long_as_the_ratios_add_up_to_has_every_share_exactly(weights: list[int], start: int) -> None:
    mix = {f"m{index}": MixSpec(ratio=weight / 8) for index, weight in enumerate(weights)}
    names = walk(MixRow(), mix, start + sum(weights))
    assert Counter(names[start:]) == {f"m{index}": weight for index, weight in enumerate(weights)}


@given(ratios=st.lists(st.floats(0.01, 100), min_size=2, max_size=5))
def test_nobody_is_ever_ahead_by_a_whole_group(ratios: list[float]) -> None:
    mix = {f"m{index}": MixSpec(ratio=ratio) for index, ratio in enumerate(ratios)}
    row = MixRow()
    for name in walk(row, mix, 60):
        row = mixes.balance_after(row, mix, [name])
        assert min(mixes.Turns(row).debts().values()) > -1


def test_new_ratios_begin_with_the_whole_groups_that_are_owed() -> None:
    old, new = {"a": MixSpec(ratio=1), "b": MixSpec(ratio=1)}, {"a": MixSpec(ratio=3), "b": MixSpec(ratio=1)}
    late = mixes.balance_after(MixRow(), old, ["a"] * 9)
    assert mixes.Turns(late).debts() == {"a": -4.5, "b": 4.5}
    assert mixes.Turns(mixes.balance_under(late, new)).debts() == {"a": -4, "b": 4}
    assert walk(late, new, 4) == ["b", "b", "b", "b"]


@pytest.mark.parametrize("mix", [{}, THREE])
def test_bounds_that_are_out_of_all_reach_are_not_counted_through(mix: dict[str, Any]) -> None:
    batch = BatchSpec.model_validate({"tasks": MOST // 4, "group_size": 2, "max_pool_episodes": MOST, "mix": mix})
    balance = mixes.balance_under(MixRow(), batch.mix)
    drawn = draw(batch, balance, [], batch.tasks, frozenset())
    assert (set(drawn.missing), drawn.complete) == (set(mix) or {mixes.EVERYTHING}, False)
    assert openings(batch, balance, Groups(), batch.tasks, frozenset()) == set(drawn.missing)


# -- a run ----------------------------------------------------------------------------------------------------------------


async def group(world: World, mix: str, *, wait_s: float = 0, **fields: Any) -> str:
    """A whole group of two episodes of a fresh task; its id."""
    world.tasks = getattr(world, "tasks", 0) + 1  # type: ignore[attr-defined]
    task = f"{mix}-{world.tasks}"  # type: ignore[attr-defined]
    first = await world.claim(task, mix=mix, wait_s=wait_s, **fields)
    second = await world.claim(task, mix=mix, **fields)
    for reward, lease in enumerate((first, second)):
        await world.call(lease)
        await world.end(lease, float(reward))
    assert first.group_id is not None
    return first.group_id


async def trained_mixes(world: World) -> list[str]:
    """Mix of every trained group, in the order of their turns."""
    page = await world.service.ledger(limit=1000)
    mix_of = {entry.episode_id: str(entry.mix) for entry in page.entries}
    return [mix_of[one.episodes[0].episode_id] for batch in world.engine.made for one in batch.groups]


async def family(world: World, mix: str, groups: int) -> None:
    """A client of one family: claims whenever it may."""
    for _ in range(groups):
        await group(world, mix, wait_s=120, client_id=mix)


async def test_with_clients_of_every_speed_steps_keep_the_mix_exactly(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"tasks": 5, "mix": THREE}, max_staleness=1, limits={"steps": 20})
        shares = {"math": 40, "web": 30, "code": 30}
        clients = [asyncio.create_task(family(world, name, groups)) for name, groups in shares.items()]
        await world.until_status("complete")
        await asyncio.gather(*clients)
        names = await trained_mixes(world)
        assert len(names) == 100
        for start in range(51):
            assert Counter(names[start : start + 50]) == {"math": 20, "web": 15, "code": 15}
        by_mix = (await world.service.status()).pool.by_mix
        assert {name: (status.trained_groups, status.debt) for name, status in by_mix.items()} == {
            "math": (40, 0),
            "web": (30, 0),
            "code": (30, 0),
        }
        last = (await world.service.report(world.run_id)).steps[-1].values
        assert sum(last[f"mix_groups/{name}"] for name in THREE) == 5
        assert [last[f"mix_debt/{name}"] for name in THREE] == [0, 0, 0]


async def test_a_family_that_has_its_share_is_told_whose_turn_it_is_and_let_in_by_the_step(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"mix": {"a": {"ratio": 1}, "b": {"ratio": 1}}}, limits={"steps": 9})
        await group(world, "a")
        refusal = await world.refused(world.claim("a-x", mix="a"))
        assert refusal.code is ErrorCode.MIX_FULL
        assert 0 < refusal.fields["retry_after_s"] <= 5
        assert "turn of b" in refusal.detail
        waiting = asyncio.create_task(world.claim("a-x", mix="a", wait_s=60))
        await world.pause()
        assert not waiting.done()
        await group(world, "b")
        assert (await waiting).weights_version.step == 1


async def test_a_family_slower_than_its_patience_is_passed_and_paid_back(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        mix = {"a": {"ratio": 1}, "b": {"ratio": 1, "patience_s": 30}}
        await world.begin(batch={"tasks": 2, "mix": mix}, limits={"steps": 9})
        await group(world, "a")
        waiting = asyncio.create_task(group(world, "a", wait_s=120))
        await world.passes(29)
        assert not waiting.done()
        await world.passes(2)
        await waiting
        await world.until_step(1)
        status = (await world.service.status()).pool.by_mix["b"]
        assert (status.passed, status.debt, status.trained_groups) == (True, 1, 0)
        # Without a group of b, the others go on without waiting again.
        await group(world, "a")
        await group(world, "a")
        await world.until_step(2)
        # Back again: b is furthest behind, and takes the next turns.
        for step in (3, 4):
            await group(world, "b")
            await group(world, "b")
            await world.until_step(step)
        assert await trained_mixes(world) == ["a"] * 4 + ["b"] * 4
        status = (await world.service.status()).pool.by_mix["b"]
        assert (status.passed, status.debt) == (False, 0)


async def played_alone(world: World, mix: str, *, patiences: int) -> None:
    """All groups that one family may open, again after each patience of 30 s."""
    for _ in range(patiences):
        with contextlib.suppress(Refusal):
            while True:
                await group(world, mix)
        await world.passes(31)


@pytest.mark.parametrize(
    ("shares", "tasks", "alive", "steps"),
    [
        pytest.param(
            {"a": 1, "b": 1, "c": 1}, 2, "a", 1, id="the missing family that has the turn after is awaited too"
        ),
        pytest.param({"math": 40, "web": 30, "code": 30}, 2, "math", 1, id="the documented mix"),
        pytest.param({"math": 3, "web": 1}, 2, "web", 1, id="a ready group whose turn is not in the next step"),
        pytest.param({"a": 1, "b": 1}, 1, "a", 2, id="a step of one group, whose turn is of the missing family"),
    ],
)
async def test_one_family_alone_goes_on_when_the_patience_with_all_others_is_over(
    tmp_path: Path, shares: dict[str, int], tasks: int, alive: str, steps: int
) -> None:
    async with running(tmp_path) as world:
        mix = {name: {"ratio": ratio, "patience_s": 30} for name, ratio in shares.items()}
        await world.begin(batch={"tasks": tasks, "mix": mix}, limits={"steps": 9})
        await played_alone(world, alive, patiences=len(shares) + steps)
        await world.until_step(steps)
        assert set(await trained_mixes(world)) == {alive}


TWO_UNEVEN = {"a": {"ratio": 9, "patience_s": 30}, "b": {"ratio": 1, "patience_s": 30}}


async def test_a_family_that_is_played_is_not_passed_because_another_is_told_that_it_is_not_its_turn(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"tasks": 2, "mix": TWO_UNEVEN}, limits={"steps": 9})
        for mix in ("a", "b"):
            for _ in range(2):
                await world.claim(mix, mix=mix, idle_limit_s=600)
        for _ in range(3):
            assert (await world.refused(world.claim("b-2", mix="b"))).code is ErrorCode.MIX_FULL
            await world.passes(31)
        assert not (await world.service.status()).pool.by_mix["a"].passed


async def test_one_rollout_at_a_time_of_a_family_longer_than_its_patience_in_all_is_no_reason_to_pass_it(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"tasks": 2, "group_size": 4, "mix": TWO_UNEVEN}, limits={"steps": 9})
        await world.claim("b", mix="b", idle_limit_s=600)
        waiting = asyncio.create_task(world.claim("b-2", mix="b", wait_s=120))
        for reward in range(3):
            lease = await world.claim("a", mix="a", idle_limit_s=600)
            await world.passes(25)
            await world.call(lease)
            await world.end(lease, float(reward))
        assert not (await world.service.status()).pool.by_mix["a"].passed
        assert not waiting.done()
        await world.passes(31)  # nobody goes on with it
        await waiting


async def test_the_patience_with_a_family_whose_rollouts_are_all_lost_is_not_begun_anew_by_each(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"tasks": 2, "mix": TWO_UNEVEN}, limits={"steps": 9})
        await world.claim("b", mix="b", idle_limit_s=600)
        waiting = asyncio.create_task(world.claim("b-2", mix="b", wait_s=120))
        for _ in range(4):
            lease = await world.claim("a", mix="a", idle_limit_s=9)
            await world.passes(10)
            assert lease.episode_id not in world.service.state.live
        await waiting


async def test_a_run_does_not_take_over_how_long_the_run_before_it_waited(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin(batch={"tasks": 2, "mix": TWO_UNEVEN}, limits={"steps": 9})
        await world.claim("b", mix="b", idle_limit_s=600)
        assert (await world.refused(world.claim("b-2", mix="b"))).code is ErrorCode.MIX_FULL
        await world.claim("a", mix="a", idle_limit_s=600)  # the patience with it rests
        await world.service.stop_run(run_id)
        await world.passes(700)
        await world.until_status("stopped")
        await world.begin(batch={"tasks": 2, "mix": TWO_UNEVEN}, limits={"steps": 9})
        await group(world, "b")
        await world.passes(1)
        assert not (await world.service.status()).pool.by_mix["a"].passed


async def test_the_end_of_a_patience_is_told_once_however_often_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as world:
        mix = {"a": {"ratio": 1}, "b": {"ratio": 1, "patience_s": 30}, "c": {"ratio": 1, "patience_s": 60}}
        await world.begin(batch={"tasks": 3, "mix": mix}, limits={"steps": 9})
        told: list[str] = []
        monkeypatch.setattr(world.service.watchers, "log", lambda line, level, one_of: told.append(line))
        await group(world, "a")
        for seconds in (31, 31):
            await world.passes(seconds)
        for step, groups in ((1, 2), (2, 3)):
            for _ in range(groups):
                await group(world, "a")
            await world.until_step(step)
            await world.passes(1)
        late = [line.split("'")[1] for line in told if "keeps the others waiting" in line]
        assert late == ["b", "c"]


async def test_a_patience_that_ends_as_a_claim_begins_to_wait_lets_it_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as world:
        mix = {"a": {"ratio": 1}, "b": {"ratio": 1, "patience_s": 30}}
        await world.begin(batch={"tasks": 2, "mix": mix}, limits={"steps": 9})
        await group(world, "a")
        await world.passes(29)
        claim = claims.claim

        def slow(*given: Any) -> Any:
            answer = claim(*given)
            world.clock.advance(2)
            return answer

        monkeypatch.setattr(claims, "claim", slow)
        assert (await world.claim("a-x", mix="a", wait_s=60)).group_id


async def test_patience_runs_only_while_the_others_have_done_their_part(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        mix = {"a": {"ratio": 1, "patience_s": 30}, "b": {"ratio": 1, "patience_s": 30}}
        await world.begin(batch={"mix": mix}, limits={"steps": 9})
        await world.passes(1000)
        assert not any(status.passed for status in (await world.service.status()).pool.by_mix.values())
        await group(world, "a")
        await world.passes(20)
        await group(world, "b")
        await world.until_step(1)
        assert await trained_mixes(world) == ["a", "b"]


async def test_ratios_can_be_changed_while_the_run_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        run_id = await world.begin(batch={"mix": {"a": {"ratio": 1}, "b": {"ratio": 1}}}, limits={"steps": 9})
        stray = await group(world, "b")
        assert (await world.refused(world.claim("c-1", mix="c"))).code is ErrorCode.INVALID_SPEC
        waiting = asyncio.create_task(group(world, "b", wait_s=60))
        await world.pause()
        change = {"batch": {"mix": {"a": {"ratio": 3}, "b": None, "c": {"ratio": 1}}}}
        await world.service.patch_run(run_id, change, None, "tester")
        refusal = await world.refused(waiting)
        assert (refusal.code, refusal.fields["errors"][0]["field"]) == (ErrorCode.INVALID_SPEC, "mix")
        entries = (await world.service.ledger()).entries
        assert {entry.reason for entry in entries if entry.group_id == stray} == {"superseded"}
        for step, names in enumerate((("a", "a"), ("c", "a")), start=1):
            for name in names:
                await group(world, name)
            await world.until_step(step)
        assert sorted(await trained_mixes(world)) == ["a", "a", "a", "c"]


async def test_a_run_without_a_mix_takes_a_claims_mix_as_a_label(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.begin()
        await group(world, "x")
        await group(world, "y")
        await world.until_step(1)
        by_mix = (await world.service.status()).pool.by_mix
        assert {name: status.trained_groups for name, status in by_mix.items()} == {"x": 1, "y": 1}


async def test_debts_outlive_the_server(tmp_path: Path) -> None:
    engine, clock = FaultyEngine(), ManualClock()
    mix = {"a": {"ratio": 2}, "b": {"ratio": 1}, "c": {"ratio": 1}}
    async with running(tmp_path, engine, clock) as world:
        await world.begin(batch={"mix": mix}, limits={"steps": 9}, checkpoint={"every_steps": 1})
        for name in ("a", "b"):
            await group(world, name)
        await world.until_step(1)
        await world.service.request_checkpoint(world.run_id)
        run_id, before = world.run_id, (await world.service.status()).pool.by_mix
    async with running(tmp_path, FaultyEngine().adopt(engine), clock) as world:
        world.run_id = run_id
        assert (await world.service.status()).pool.by_mix == before
        assert before["c"].debt == 0.5
        waiting = [asyncio.create_task(group(world, name, wait_s=60)) for name in ("c", "a")]
        await asyncio.gather(*waiting)
        await world.until_step(2)
        assert sorted((await trained_mixes(world))[-2:]) == ["a", "c"]


async def test_a_batch_by_episodes_keeps_the_mix_too(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        mix = {"a": {"ratio": 1}, "b": {"ratio": 1}}
        await world.begin(batch={"rule": "episodes", "episodes": 8, "mix": mix}, limits={"steps": 2})
        clients = [asyncio.create_task(family(world, name, 4)) for name in mix]
        await world.until_status("complete")
        await asyncio.gather(*clients)
        assert Counter(await trained_mixes(world)) == {"a": 4, "b": 4}


async def test_in_an_informative_batch_groups_of_equal_rewards_count_for_no_family(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        mix = {"a": {"ratio": 1}, "b": {"ratio": 1}}
        await world.begin(batch={"rule": "informative_tasks", "mix": mix}, limits={"steps": 1})
        await group(world, "a")
        for _ in range(2):
            await world.episode("dull", 1.0, mix="b")
        assert (await world.service.status()).pool.by_mix["b"].trained_groups == 0
        await group(world, "b")
        await world.until_status("complete")
        assert Counter(await trained_mixes(world)) == {"a": 1, "b": 1}


async def test_groups_of_equal_rewards_that_were_ready_are_dropped_when_the_rule_begins_to_ask_for_differences(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as world:
        await world.begin(batch={"tasks": 2}, limits={"steps": 1})
        for _ in range(2):
            await world.episode("dull", 1.0)
        assert (await world.service.status()).pool.groups_ready == 1
        await world.service.patch_run(world.run_id, {"batch": {"rule": "informative_tasks"}}, None, "ann")
        assert await world.states() == ["dropped zero_variance"] * 2
        await world.batch()
        await world.until_status("complete")
        assert [one.task_id for one in world.engine.made[0].groups] == ["t-1", "t-2"]


async def test_two_families_are_both_waited_for_and_the_fast_one_never_fills_the_pool(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        mix = {"a": {"ratio": 1}, "b": {"ratio": 1}}
        await world.begin(batch={"mix": mix, "max_pool_episodes": 4}, max_staleness=3, limits={"steps": 9})
        await group(world, "a")
        assert (await world.refused(world.claim("a-x", mix="a"))).code is ErrorCode.MIX_FULL
        await group(world, "b")
        await world.until_step(1)
        pairs = itertools.pairwise(await trained_mixes(world))
        assert list(pairs) == [("a", "b")]
