"""Claims in the queue: who is tried, and in which order."""

from __future__ import annotations

import pytest

from swarm.protocol.episodes import EpisodeClaim, WeightsVersion
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.server.state.admission import NotYet
from swarm.server.state.episodes import GrantedLease
from swarm.server.state.waiting import Waiting

pytestmark = pytest.mark.anyio

FULL = NotYet(code=ErrorCode.DRAINING, detail="full")


def claim(client: str, task: str, **fields: str) -> EpisodeClaim:
    return EpisodeClaim.model_validate(
        {"run_id": "r", "client_id": client, "client_version": "v", "kind": "train", "task_id": task, **fields}
    )


def lease(episode_id: str) -> GrantedLease:
    version = WeightsVersion(run_id="r")
    return GrantedLease(
        episode_id=episode_id, lease="", api_key="", group_id=None, slot=None, weights_version=version, expires_at=0.0
    )


async def test_who_came_first_is_tried_first_and_nobody_behind_one_who_must_wait() -> None:
    waiting = Waiting()
    for client, task in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "y"), ("e", "z")):
        waiting.join(claim(client, task), FULL)
    tried: list[str] = []

    def attempt(asked: EpisodeClaim) -> GrantedLease | NotYet:
        tried.append(asked.client_id)
        return NotYet(code=ErrorCode.DRAINING, detail="no y") if asked.task_id == "y" else lease(asked.client_id)

    granted = waiting.admit(attempt)
    assert tried == ["a", "b", "c", "e"]
    assert [waiter.claim.client_id for waiter, _ in granted] == ["a", "c", "e"]
    tried.clear()
    assert waiting.admit(lambda asked: tried.append(asked.client_id) or FULL) == []
    assert tried == ["b"]


async def test_who_gave_up_is_not_tried_and_a_repetition_waits_for_the_same_answer() -> None:
    waiting = Waiting()
    one, again = (waiting.join(claim("a", "x", idempotency_key="k"), FULL) for _ in range(2))
    assert one is again
    waiting.give_up(one)
    assert len(waiting.admit(lambda asked: FULL)) == 0
    waiting.give_up(one)
    granted = waiting.admit(lambda asked: lease("late"))
    assert granted == []
    assert waiting.join(claim("a", "x", idempotency_key="k"), FULL) is not one


async def test_a_refusal_is_for_one_claim_alone() -> None:
    waiting = Waiting()
    waiters = [waiting.join(claim(client, "x"), FULL) for client in "ab"]

    def attempt(asked: EpisodeClaim) -> GrantedLease | NotYet:
        if asked.client_id == "a":
            raise Refusal(ErrorCode.FORBIDDEN, "not you")
        return lease(asked.client_id)

    assert [waiter for waiter, _ in waiting.admit(attempt)] == [waiters[1]]
    assert isinstance(waiters[0].answer.exception(), Refusal)
