"""The countdown instrument: splits, what expressions are worth, and episodes against the echo engine."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from bench.serving import ServerProcess
from studies.countdown import workflow
from studies.countdown.expression import last_expression, read
from studies.countdown.reward import score
from tests.studies.declarations import assert_declaration_fits_the_code, declared
from tests.studies.playing import played, take, trained

pytestmark = pytest.mark.anyio


def test_its_description_fits_the_code() -> None:
    assert_declaration_fits_the_code("countdown")


@pytest.mark.parametrize("numbers", [2, 3, 5])
def test_no_countdown_is_both_trained_and_held_out_in_whatever_order(numbers: int) -> None:
    train = take(workflow.tasks("train", 0, None, numbers=numbers), 1500)
    held_out = list(workflow.tasks("heldout", 0, None, numbers=numbers))
    keys = [
        {(tuple(sorted(t.metadata["numbers"])), t.metadata["target"]) for t in tasks} for tasks in (train, held_out)
    ]
    assert keys[0].isdisjoint(keys[1])
    assert len(keys[1]) == len(held_out) >= 100


def test_a_stream_depends_on_its_seed_alone_and_every_seed_is_evaluated_alike() -> None:
    once = take(workflow.tasks("train", 1, None), 50)
    assert once == take(workflow.tasks("train", 1, 50), 100)
    assert once != take(workflow.tasks("train", 2, None), 50)
    assert list(workflow.tasks("heldout", 1, 20)) == list(workflow.tasks("heldout", 2, 20))


@pytest.mark.parametrize(("split", "numbers", "largest"), [("test", 3, 20), ("train", 1, 20), ("train", 3, 4)])
def test_what_is_no_countdown_is_refused(split: workflow.Split, numbers: int, largest: int) -> None:
    with pytest.raises(ValueError, match="must"):
        workflow.tasks(split, 0, 1, numbers=numbers, largest=largest)


def test_right_wrong_and_empty_answers_are_worth_less_and_less() -> None:
    answers = ["(7-3)*5", "7*3+5", "7*3*5", "7+3", "8+9", "about 20", "no idea", ""]
    worth = [score(answer, [3, 5, 7], 20) for answer in answers]
    assert worth == sorted(worth, reverse=True)
    assert (worth[0], worth[-2:]) == (1.0, [0.0, 0.0])
    assert len(set(worth[:-1])) == len(worth) - 1
    assert max(worth[1:]) <= 0.6


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("5 × (7 − 3)", True),
        ("(7-3)*5 = 20", True),
        ("Let me see: 7-3=4 and so 5*(7-3)", True),
        ("20", False),
        ("3+5+7+5", False),
        ("3+5*7/0", False),
        ("5*(7-3", False),
        ("5**7-3", False),
        ("((7-3))*5", True),
    ],
)
def test_an_expression_counts_when_it_has_each_number_once_and_the_value(answer: str, right: bool) -> None:
    assert (score(answer, [3, 5, 7], 20) == 1.0) is right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("**(2+7)*3**", True),
        ("The answer is **(2+7)*3 = 27**.", True),
        ("So:\n- (2+7)*3", True),
        (r"\((2+7)*3\)", True),
        (r"\[(2+7)*3\]", True),
        ("$(2+7)*3$ or `27`", True),
        ("(2+7)*3 - done", True),
        ("The expression is (2+7)*3 (which is 27)", True),
        ("It can be made (by (2+7)*3).", True),
        ("2**(2+7)*3", False),
        ("x*(2+7)*3", False),
        ("(2+7)*3*x", False),
        ("-(2+7)*3", False),
        ("(2+7*3", False),
        ("2+7)*3", False),
    ],
)
def test_how_an_answer_is_set_in_print_changes_nothing(answer: str, right: bool) -> None:
    assert (score(answer, [2, 3, 7], 27) == 1.0) is right


@pytest.mark.parametrize(
    "answer", ["(" * 20_000, " (" * 20_000, "- " * 20_000, "*" * 20_000, " " * 20_000, "1+" * 20_000]
)
def test_answers_of_nothing_but_signs_take_no_time(answer: str) -> None:
    began = time.process_time()
    assert score(answer, [2, 3, 7], 27) <= 0.1
    assert time.process_time() - began < 1.0


def test_an_expression_is_worked_out_exactly_and_never_executed() -> None:
    assert read("1/3+1/3+1/3") == last_expression("It is 1/3+1/3+1/3.")
    found = read("1/3+2/3")
    assert found is not None
    assert found.value == Fraction(1)
    assert read("9**9**9") is None
    assert read("__import__('os')") is None
    assert read("(" * 60 + "1+2" + ")" * 60) is None


async def test_episodes_are_played_to_their_rewards(echo_server: ServerProcess) -> None:
    _, loaded = declared("countdown")
    report, entries = await played(echo_server.url, loaded, loaded.tasks("heldout", 0, 6))  # type: ignore[arg-type]
    assert (report.ended, report.crashed) == (6, 0)
    assert {entry.calls for entry in entries} == {1}
    rewards = [entry.reward for entry in entries]
    assert all(reward is not None and 0.0 <= reward <= 0.6 for reward in rewards)


async def test_a_training_runs_to_its_end(echo_server: ServerProcess) -> None:
    _, loaded = declared("countdown")
    report = await trained(echo_server.url, loaded, loaded.tasks("train", 0, None))  # type: ignore[arg-type]
    assert (report.run_over, report.crashed) == (True, 0)
