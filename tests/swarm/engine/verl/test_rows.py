"""Rows as verl cuts them over ranks and joins their answers."""

from __future__ import annotations

import importlib.util

import pytest

from swarm.engine.tree import Branch
from swarm.engine.verl.timelines import Row, merged
from tests.swarm.engine.batches import call

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: `make verl`"),
    pytest.mark.filterwarnings("default"),  # verl's own
]


def rows() -> list[Row]:
    calls = [call(f"c{size}", [1, 2], list(range(10, 10 + size))) for size in (1, 3, 2, 4)]
    return merged([Branch(call=made, advantage=1.0, weight=0.1) for made in calls], ["a", "b", "c", "d"])


def test_what_is_known_of_a_token_lies_where_it_was_predicted(cpu_platform: None) -> None:
    from swarm.engine.verl.learner import tensors_of

    batch = tensors_of(rows(), pad_token=0)
    assert batch["loss_mask"].unbind()[1].tolist() == [0, 1, 1, 1, 0]
    assert batch["advantage"].unbind()[0].tolist() == [0, 1, 0]


def test_answers_of_two_ranks_are_joined_in_the_order_of_the_rows(cpu_platform: None) -> None:
    from verl.utils import tensordict_utils as verl_tensors

    from swarm.engine.verl.learner import jagged, measured, tensors_of, trained

    batch = tensors_of(rows(), pad_token=0)
    answers = [
        verl_tensors.get_tensordict(
            {"log_probs": jagged([row.float() for row in part["input_ids"].unbind()])},
            non_tensor_dict={"metrics": {"loss": 0.5, "memory": number}},
        )
        for number, part in enumerate(verl_tensors.chunk_tensordict(batch, 2))
    ]
    joined = verl_tensors.concat_tensordict(answers)
    assert measured(joined)["loss"] == 0.5
    assert trained(batch, joined, "log_probs").tolist() == [2, 2, 10, 11, 2, 10, 2, 10, 11, 12]


def test_rows_are_shared_out_so_that_ranks_have_equally_much_to_compute(cpu_platform: None) -> None:
    from swarm.engine.verl.learner import balanced

    given = [Row(temperature=1.0, ids=[0] * size) for size in (500, 400, 300, 200, 100, 100, 100, 100)]
    made = balanced(given, 2)
    assert sorted(map(id, made)) == sorted(map(id, given))
    assert [sum(len(row.ids) for row in part) for part in (made[:4], made[4:])] == [900, 900]
