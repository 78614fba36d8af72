"""Claims in the queue: who is tried, and in which order."""

from __future__ import annotations

from swarm.protocol.episodes import EpisodeClaim, EpisodeGrant, WeightsVersion
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.server.state.claim_queue import ClaimQueue, NotYet

FULL = NotYet(code=ErrorCode.DRAINING, detail="full")


def claim(client: str, task: str, **fields: str) -> EpisodeClaim:
    return EpisodeClaim.model_validate(
        {"run_id": "r", "client_id": client, "client_version": "v", "kind": "train", "task_id": task, **fields}
    )


def lease(episode_id: str) -> EpisodeGrant:
    version = WeightsVersion(run_id="r")
    return EpisodeGrant(
        base_url="",
        episode_id=episode_id,
        lease="",
        api_key="",
        group_id=None,
        slot=None,
        weights_version=version,
        expires_at=0.0,
    )


def test_who_came_first_is_tried_first_and_nobody_behind_one_who_must_wait() -> None:
    queue = ClaimQueue()
    tickets = [
        queue.join(claim(client, task), FULL)
        for client, task in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "y"), ("e", "z"))
    ]
    tried: list[str] = []

    def attempt(wanted: EpisodeClaim) -> EpisodeGrant | NotYet:
        tried.append(wanted.client_id)
        return NotYet(code=ErrorCode.DRAINING, detail="no y") if wanted.task_id == "y" else lease(wanted.client_id)

    def full(wanted: EpisodeClaim) -> NotYet:
        tried.append(wanted.client_id)
        return FULL

    answers = queue.admit(attempt)
    assert tried == ["a", "b", "c", "e"]
    assert [ticket for ticket, _ in answers] == [tickets[0], tickets[2], tickets[4]]
    tried.clear()
    assert queue.admit(full) == []
    assert tried == ["b"]


def test_who_gave_up_is_not_tried_and_a_repetition_waits_for_the_same_answer() -> None:
    queue = ClaimQueue()
    one, again = (queue.join(claim("a", "x", idempotency_key="k"), FULL) for _ in range(2))
    assert one == again
    queue.leave(one)
    assert queue.admit(lambda wanted: lease("late")) == []
    assert queue.join(claim("a", "x", idempotency_key="k"), FULL) != one


def test_a_refusal_is_for_one_claim_alone() -> None:
    queue = ClaimQueue()
    first, second = [queue.join(claim(client, "x"), FULL) for client in "ab"]

    def attempt(wanted: EpisodeClaim) -> EpisodeGrant | NotYet:
        if wanted.client_id == "a":
            raise Refusal(ErrorCode.FORBIDDEN, "not you")
        return lease(wanted.client_id)

    answers = dict(queue.admit(attempt))
    assert isinstance(answers[first], Refusal)
    assert isinstance(answers[second], EpisodeGrant)
