"""Batches that clients close by agreeing to them: who is asked, what is taken, what is shown. Real service, echo engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from foundation.clock import ManualClock
from swarm.server.agentjet.agreed import ACTIVE_S, SHOWN_S
from swarm.server.agentjet.facade import NO_EPISODE
from tests.swarm.server.agentjet.served import ASK, CLIENT, JOB, Served, replayed, serving

pytestmark = pytest.mark.anyio

ANY, ALL = (f"rollout_until_{who}_agree_sync_weight" for who in ("any_client", "all_clients"))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def served(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Served]:
    async with serving(tmp_path, facade_clock=clock) as served:
        yield served


def job(method: str) -> str:
    return JOB[:-1] + f", swarm_mode_sample_collection_method: {method}}}"


async def agree(served: Served, client: str = "c-1") -> str:
    """Why it was not taken."""
    answer = await served.post("/agree_sync_weight", {"client_uuid": client}, prefix=CLIENT)
    assert answer["success"] == (not answer["failure_reason"])
    return str(answer["failure_reason"])


async def test_a_recorded_agreement_trains_what_was_collected(served: Served) -> None:
    await replayed(served, "agree")
    assert await served.fates() == ["t1 trained 1"] * 2 + ["t2 trained 1"] * 2


async def test_a_step_takes_all_groups_when_every_active_client_agreed(served: Served) -> None:
    await served.start(job(ALL))
    for task in ("t1", "t2", "t3"):
        for reward in (0.0, 1.0):
            await served.play(task, reward, client="c-2" if task == "t3" else "c-1")
    await served.play("t4", 1.0, client="c-3", declare_client_active=False)
    assert await agree(served, "c-1") == ""
    pool = await served.get("/get_current_batch_rollout_pool_information", CLIENT)
    words = [
        (one["client_uuid"], one["allowed_sync_weight"]) for one in pool["swarm_client_instruction"]["active_clients"]
    ]
    assert words == [("c-1", True), ("c-2", False)]
    assert pool["sample_collection_method"] == ALL
    assert (pool["global_step"], await served.engine_status()) == (0, "ENGINE.ROLLING")
    assert await agree(served, "c-2") == ""
    await served.until_step(1)
    assert await served.fates() == ["t1 in_step 1"] * 2 + ["t2 in_step 1"] * 2 + ["t3 in_step 1"] * 2 + [
        "t4 dropped partial_group"
    ]


async def test_one_word_is_enough_where_any_may_agree_and_a_group_is_trained_as_it_is(served: Served) -> None:
    await served.start(job(ANY).replace("num_repeat: 2", "num_repeat: 3"))
    for reward in (0.0, 1.0):
        await served.play("t1", reward)
    await served.play("t2", 1.0, client="c-2")
    assert await agree(served) == ""
    await served.until_step(1)
    assert await served.fates() == ["t1 in_step 1"] * 2 + ["t2 dropped partial_group"]


async def test_the_sync_is_shown_until_every_client_has_seen_it_and_the_next_batch_is_unbounded(
    served: Served, clock: ManualClock
) -> None:
    await served.start(job(ALL))
    for step in (1, 2):
        for reward in (0.0, 1.0):
            await served.play(f"t{step}", reward)
        assert await agree(served) == ""
        assert await served.engine_status() == "ENGINE.WEIGHT_SYNCING"
        await served.until_step(step)
        clock.advance(SHOWN_S - 0.1)
        assert await served.engine_status() == "ENGINE.WEIGHT_SYNCING"
        clock.advance(0.2)
        assert await served.engine_status() == "ENGINE.ROLLING"
        run = served.service.state.run
        assert run is not None
        assert run.spec.batch.tasks == 2048
        assert await agree(served) != "", "who agreed is asked anew"


async def test_clients_that_are_silent_are_not_waited_for(served: Served, clock: ManualClock) -> None:
    await served.start(job(ALL))
    for reward in (0.0, 1.0):
        await served.play("t1", reward)
    await served.play("t2", 0.0, client="c-2")
    assert await agree(served) == ""
    clock.advance(ACTIVE_S - 1)
    await served.play("t3", 0.0)
    assert await served.engine_status() == "ENGINE.ROLLING"
    clock.advance(2)
    await served.until_step(1)


async def test_a_full_pool_is_trained_before_the_clients_agree(served: Served) -> None:
    await served.start(job(ALL))
    run, state = served.service.state.run, served.service.state
    assert run is not None
    await served.service.patch_run(run.run_id, {"batch": {"tasks": 4, "max_pool_episodes": 8}}, None, "me")
    for number in range(7):
        await served.play(f"t{number // 2}" if number < 4 else f"alone-{number}", float(number % 2))
    assert (run.step, len(state.pooled)) == (0, 7)
    last = await served.claim()
    await served.post("/v1/chat/completions", ASK, prefix=CLIENT, key=last["openai_api_key"])
    refused = await served.claim("c-2", throttle_policy={"current_task_id": "t9"})
    assert (refused["success"], refused["fail_cause"]) == (False, NO_EPISODE)
    await served.end(last, "alone-7", 1.0)
    waiting = asyncio.create_task(served.claim("c-2"))
    await served.until_step(1)
    assert (await waiting)["success"]
    fates = await served.fates()
    assert fates[:4] == ["t0 in_step 1"] * 2 + ["t1 in_step 1"] * 2
    assert fates[4:] == [f"alone-{number} dropped partial_group" for number in range(4, 8)] + ["- running"]


async def test_after_a_restart_clients_that_wait_are_let_go_on(served: Served, clock: ManualClock) -> None:
    await served.start(job(ALL))
    for reward in (0.0, 1.0):
        await served.play("t1", reward)
    await served.play("t2", 0.0, client="c-2")
    assert await agree(served) == ""
    served.forget()
    assert await served.engine_status() == "ENGINE.WEIGHT_SYNCING"
    clock.advance(SHOWN_S + 0.1)
    assert await served.engine_status() == "ENGINE.ROLLING"
    assert "not active" in await agree(served)
    await served.play("t2", 1.0)
    assert await agree(served) == ""
    await served.until_step(1)
    assert await served.fates() == ["t1 in_step 1"] * 2 + ["t2 in_step 1"] * 2


async def test_an_agreement_to_nothing_lets_the_clients_go_on(served: Served, clock: ManualClock) -> None:
    await served.start(job(ANY))
    await served.play("t1", 1.0)
    assert await agree(served) == ""
    assert await served.engine_status() == "ENGINE.WEIGHT_SYNCING"
    clock.advance(SHOWN_S + 0.1)
    assert await served.engine_status() == "ENGINE.ROLLING"
    await served.play("t1", 0.0)
    assert await agree(served) == ""
    await served.until_step(1)


async def test_under_other_methods_nobody_is_asked(served: Served) -> None:
    assert await agree(served) != ""
    await served.start()
    await served.play("t1", 1.0)
    assert "swarm_mode_sample_collection_method" in await agree(served)
