"""Repeated n-grams are found within an answer and across tasks, and nowhere else."""

from __future__ import annotations

import pytest

from swarm.engine.training.repetition import EPISODES, LONGEST, repetition_metrics
from tests.swarm.engine.batches import batch, conversation, group


def shares(*answers: list[list[int]]) -> tuple[float, float]:
    """Within and across, of one group for each list of answers."""
    groups = [
        group(f"g{number}", *(conversation(f"g{number}-{each}", 0.0, [ids]) for each, ids in enumerate(own)))
        for number, own in enumerate(answers)
    ]
    found = repetition_metrics(batch(*groups))
    assert set(found) == {"repetition_within", "repetition_across"}
    return found["repetition_within"], found["repetition_across"]


def test_answers_of_their_own_repeat_nothing() -> None:
    assert shares([list(range(100, 120))], [list(range(200, 220))]) == (0.0, 0.0)


def test_short_answers_are_equal_without_being_repetitive() -> None:
    assert shares([[7, 8, 9]], [[7, 8, 9]]) == (0.0, 0.0)
    assert shares([[]], [[7]]) == (0.0, 0.0)


def test_a_loop_is_seen_within_its_answer_alone() -> None:
    within, across = shares([[1, 2] * 20], [list(range(200, 240))])
    assert within == pytest.approx((1 - 2 / 37) / 2)
    assert across == 0.0


def test_one_answer_to_all_tasks_is_seen_across_them_and_within_a_task_is_none() -> None:
    said = list(range(100, 120))
    assert shares([said], [said]) == (0.0, 1.0)
    assert shares([said, said]) == (0.0, 0.0)
    assert shares([said], [[*said[:10], *range(300, 310)]])[1] == pytest.approx(3 / 13)


def test_of_a_large_batch_a_part_of_every_task_is_looked_at() -> None:
    many = [[[1, 2] * 10 for _ in range(8)] for _ in range(EPISODES // 2)]
    assert shares(*many)[1] == 1.0
    assert shares([[*range(1000, 1000 + LONGEST), *([1] * 500)]])[0] == 0.0
