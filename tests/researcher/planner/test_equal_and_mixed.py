"""Topics that claim that nothing differs, and topics whose arms would have several levels at once."""

from __future__ import annotations

import pytest

from researcher.planner.matching import read
from tests.contracts.planner_contract import ARITHMETIC
from tests.researcher.planner.test_topics import refusal, sides

EQUAL = "The topic claims that nothing differs"


@pytest.mark.parametrize(
    "topic",
    [
        "The effect of group size {a} against {b} on held-out accuracy is negligible",
        "Is the difference between group sizes {a} and {b} in accuracy negligible?",
        "Does a group size of {a} give a negligible gain over {b}?",
        "Accuracy does not depend on group size between {a} and {b}",
    ],
)
def test_a_negligible_effect_is_no_difference(topic: str) -> None:
    for a, b in ((4, 16), (16, 4)):
        reading = read(topic.format(a=a, b=b), ARITHMETIC.instrument)
        assert sides(reading) == ([a], [b])
        assert reading.direction_assumed
        assert any(line.startswith(EQUAL) for line in reading.assumptions)


@pytest.mark.parametrize(
    "topic",
    ["Is the effect of group size 16 against 4 not negligible?", "Is group size between 4 and 16 better in accuracy?"],
)
def test_other_topics_claim_no_equality(topic: str) -> None:
    assert not any(line.startswith(EQUAL) for line in read(topic, ARITHMETIC.instrument).assumptions)


@pytest.mark.parametrize(
    "topic",
    [
        "Is a mix of one- and two-digit sums better than one-digit sums alone?",
        "Are one-digit sums alone better than a mix of one- and two-digit sums?",
        "Does a curriculum from one to two digits beat two digits only?",
        "Does a curriculum from two to one digits beat one digit only?",
    ],
)
def test_a_mix_of_levels_is_refused(topic: str) -> None:
    assert "is no level of digits, of which an arm has one throughout" in str(refusal(topic))


def test_a_mix_of_something_else_is_no_mix_of_levels() -> None:
    assert sides(read("Does a mix of prompts learn faster with lr 1e-5 or 4e-5?", ARITHMETIC.instrument))
