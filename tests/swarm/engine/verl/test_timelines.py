"""Merged timelines: which calls share a row, and that nothing is lost or trained twice."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.engine.seam import TrainCall, TrainingRefused
from swarm.engine.training.selection import branches, select
from swarm.engine.tree import Branch
from swarm.engine.verl.timelines import Row, by_temperature, filled_up, merged, side_by_side
from tests.swarm.engine.batches import branching_batch, call


def branch(made: TrainCall, advantage: float = 1.0, weight: float = 0.5) -> Branch:
    return Branch(call=made, advantage=advantage, weight=weight)


def row_of(*calls: TrainCall, **fields: Any) -> list[Row]:
    return merged([branch(made, **fields) for made in calls], ["ep"] * len(calls))


def test_a_turn_that_continues_another_stands_in_its_row() -> None:
    (row,) = row_of(call("a", [1, 2], [3, 4]), call("b", [1, 2, 3, 4, 9], [5]))
    assert row.ids == [1, 2, 3, 4, 9, 5]
    assert row.mask == [0, 0, 1, 1, 0, 1]
    assert row.uses == [(0, 2), (1, 5)]
    assert row.weight == [0, 0, 0.5, 0.5, 0, 0.5]


def test_each_token_keeps_its_own_calls_advantage_and_recorded_logprob() -> None:
    first, second = call("a", [1], [3], logprobs=[-0.5]), call("b", [1, 3, 9], [5], logprobs=[-0.25])
    (row,) = merged([branch(first, advantage=2.0), branch(second, advantage=-1.0)], ["ep", "ep"])
    assert row.advantage == [0, 2.0, 0, -1.0]
    assert row.recorded == [0, -0.5, 0, -0.25]


def test_a_turn_is_appended_to_the_longest_row_that_it_continues() -> None:
    rows = row_of(call("a", [1], [3]), call("b", [1, 3, 4], [5]), call("c", [1, 3, 4, 5, 6], [7]))
    assert [row.ids for row in rows] == [[1, 3, 4, 5, 6, 7]]


def test_a_fork_gets_a_row_of_its_own() -> None:
    rows = row_of(call("a", [1, 2], [3]), call("b", [1, 2, 3, 8], [5]), call("c", [1, 2, 3, 9], [6]))
    assert sorted(row.ids for row in rows) == [[1, 2, 3, 8, 5], [1, 2, 3, 9, 6]]
    assert sum(sum(row.mask) for row in rows) == 3


def test_equal_calls_are_rows_of_their_own() -> None:
    rows = row_of(call("a", [1, 2], [3]), call("b", [1, 2], [3]))
    assert [row.ids for row in rows] == [[1, 2, 3], [1, 2, 3]]


def test_another_temperature_is_another_row() -> None:
    rows = row_of(call("a", [1], [3]), call("b", [1, 3, 4], [5], temperature=0.5))
    assert [row.temperature for row in rows] == [1.0, 0.5]


def test_episodes_do_not_share_rows() -> None:
    first, second = call("a", [1], [3]), call("b", [1, 3, 4], [5])
    assert len(merged([branch(first), branch(second)], ["one", "two"])) == 2


def test_every_use_of_a_batch_stands_in_one_row() -> None:
    batch = branching_batch(algorithm={"kl": 0.1})
    lessons = select(batch).trained
    made = branches(lessons, batch.spec.algorithm)
    episode = {made.call_id: lesson.episode_id for lesson in lessons for made in lesson.calls}
    rows = merged(made, [episode[made.call.call_id] for made in made])
    assert sorted(index for row in rows for index, _ in row.uses) == list(range(len(made)))
    assert sum(sum(row.mask) for row in rows) == sum(len(one.call.sampled_ids) for one in made)
    assert sum(sum(row.weight) for row in rows) == pytest.approx(1.0)
    for row in rows:
        for index, at in row.uses:
            wanted = made[index].call
            assert row.ids[: at + len(wanted.sampled_ids)] == wanted.prompt_ids + wanted.sampled_ids


def test_a_call_without_provenance_or_twice_in_the_batch_is_refused() -> None:
    with pytest.raises(TrainingRefused):
        row_of(call("a", [1], [3, 4], logprobs=[-1.0]))
    with pytest.raises(TrainingRefused):
        row_of(call("a", [1], [3]), call("a", [1], [4]))


def test_rows_are_filled_up_with_rows_that_train_nothing() -> None:
    rows = filled_up(row_of(call("a", [1], [3])), 2)
    assert len(rows) == 2
    assert sum(rows[1].mask) == sum(rows[1].weight) == 0


def test_padded_rows_are_cut_so_that_no_rank_computes_more_than_its_tokens() -> None:
    sizes = [200] * 60 + [4000] + [1, 30_000]
    rows = [Row(temperature=1.0, ids=[0] * size) for size in sizes]
    parts = side_by_side(rows, ranks=2, tokens=16_384)
    assert sorted(map(id, rows)) == sorted(id(row) for part in parts for row in part)
    for part in parts:
        share, longest = -(-len(part) // 2), max(len(row.ids) for row in part)
        assert share * longest <= 16_384 or share == 1
    assert [len(part) for part in parts] == [2, 61]


def test_rows_of_one_length_are_one_part() -> None:
    rows = [Row(temperature=1.0, ids=[0] * 512) for _ in range(64)]
    assert side_by_side(rows, ranks=2, tokens=16_384) == [rows]
    assert side_by_side([], ranks=2, tokens=16_384) == []


def test_rows_of_one_temperature_come_together() -> None:
    rows = [Row(temperature=temperature) for temperature in (1.0, 0.5, 1.0)]
    assert [[row.temperature for row in part] for part in by_temperature(rows)] == [[1.0, 1.0], [0.5]]
    assert filled_up([rows[1]], 2)[1].temperature == 0.5
