"""The arithmetic instrument: splits that cannot leak, streams that can be repeated, rewards, and its description."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.arithmetic import workflow
from studies.arithmetic.reward import score
from swarm.client import Task
from tests.studies.declarations import assert_declaration_fits_the_code

FOLDER = Path(__file__).parents[2] / "studies" / "arithmetic"


def take(stream: object, count: int) -> list[Task]:
    return list(itertools.islice(stream, count))  # type: ignore[call-overload]


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_no_sum_is_both_trained_and_held_out_nor_its_mirror_image(digits: int) -> None:
    train = {frozenset(task.id.split("+")) for task in take(workflow.tasks("train", 0, None, digits=digits), 3000)}
    held_out = {frozenset(task.id.split("+")) for task in take(workflow.tasks("heldout", 0, 500, digits=digits), 500)}
    assert train.isdisjoint(held_out)


def test_one_digit_sums_are_81_of_which_24_are_held_out() -> None:
    held_out = list(workflow.tasks("heldout", 0, 1000))
    train = {task.id for task in take(workflow.tasks("train", 0, None), 1000)}
    assert len({task.id for task in held_out}) == len(held_out) == 24
    assert len(train) == 81 - 24


@given(seed=st.integers(0, 2**31 - 1), digits=st.integers(1, 4))
def test_a_stream_depends_on_its_seed_alone(seed: int, digits: int) -> None:
    once = take(workflow.tasks("train", seed, None, digits=digits), 100)
    assert once == take(workflow.tasks("train", seed, 100, digits=digits), 1000)
    assert once != take(workflow.tasks("train", seed + 1, None, digits=digits), 100)


def test_every_seed_is_evaluated_on_the_same_held_out_tasks() -> None:
    assert list(workflow.tasks("heldout", 1, 50, digits=4)) == list(workflow.tasks("heldout", 2, 50, digits=4))


def test_operands_have_the_digits_that_were_asked_for() -> None:
    for task in take(workflow.tasks("train", 3, None, digits=3), 50):
        a, b = task.id.split("+")
        assert len(a) == len(b) == 3
        assert task.metadata["total"] == int(a) + int(b)
        assert task.query == f"What is {a}+{b}? Answer with the number only."


@pytest.mark.parametrize(("split", "digits"), [("test", 1), ("train", 0), ("train", 10)])
def test_what_is_no_split_or_no_number_of_digits_is_refused(split: workflow.Split, digits: int) -> None:
    with pytest.raises(ValueError, match="must"):
        workflow.tasks(split, 0, 1, digits=digits)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("8", 1.0),
        (" 8\n", 1.0),
        ("3 + 5 = 8", 1.0),
        ("8.", 1.0),
        ("The answer is 8!", 1.0),
        ("8 is 3 + 5", 0.0),
        ("-8", 0.0),
        ("18", 0.0),
        ("eight", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_counts_when_its_last_number_is_the_sum(answer: str, reward: float) -> None:
    assert score(answer, 8) == reward


def test_its_description_fits_the_code() -> None:
    assert_declaration_fits_the_code("arithmetic")
