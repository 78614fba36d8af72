"""Topics that mark their arms, switch them, or deny a comparison, each with its levels either way round."""

from __future__ import annotations

from typing import Any

import pytest

from researcher.planner.matching import read
from tests.contracts.planner_contract import ARITHMETIC
from tests.researcher.planner.test_topics import ACC, DOWN, UP, sides


@pytest.mark.parametrize(("one", "other"), [(16, 4), (4, 16)])
@pytest.mark.parametrize(
    "topic",
    [
        "group size {} (baseline {}): does accuracy on sums improve?",
        "group size {}, baseline {} on sums: does accuracy improve?",
        "group size {} [control: {}] on sums",
        "treatment group size {}, control group size {} on sums",
        "Treatment is group size {}, the baseline is group size {} on sums",
        "new group size {}, baseline group size {} on sums",
    ],
)
def test_a_mark_behind_a_comma_or_bracket_belongs_to_the_level_behind_it(topic: str, one: int, other: int) -> None:
    assert sides(read(topic.format(one, other), ARITHMETIC.instrument)) == ([one], [other])


@pytest.mark.parametrize(("one", "other"), [("rloo", "grpo"), ("grpo", "rloo")])
def test_a_mark_may_stand_before_a_choice(one: str, other: str) -> None:
    assert sides(read(f"{one} (baseline {other}) on sums", ARITHMETIC.instrument)) == ([one], [other])


@pytest.mark.parametrize(
    ("topic", "treatment"),
    [("group size 4 (baseline) and 16 on sums", 16), ("group size 4, our baseline, against 16 on sums", 16)],
)
def test_a_mark_with_no_level_behind_it_belongs_to_the_level_before(topic: str, treatment: int) -> None:
    assert sides(read(topic, ARITHMETIC.instrument))[0] == [treatment]


ON, OFF = "a KL penalty", "no KL penalty"


@pytest.mark.parametrize(("one", "other", "levels"), [(ON, OFF, ([0.1], [0.0])), (OFF, ON, ([0.0], [0.1]))])
@pytest.mark.parametrize(
    ("topic", "direction"),
    [
        ("Compared with {other}, does {one} improve accuracy on sums?", UP),
        ("Going from {other} to {one} lowers accuracy on sums", DOWN),
        ("Does replacing {other} by {one} worsen accuracy on sums?", DOWN),
        ("Unlike {other}, {one} improves accuracy on sums", UP),
        ("{one} lags behind {other} in accuracy on sums", DOWN),
    ],
)
def test_a_switch_that_is_named_both_ways_is_two_levels(
    topic: str, direction: str, one: str, other: str, levels: tuple[list[Any], list[Any]]
) -> None:
    reading = read(topic.format(one=one, other=other), ARITHMETIC.instrument)
    assert (sides(reading), reading.metric.name, reading.direction) == (levels, ACC, direction)


@pytest.mark.parametrize(
    ("topic", "treatment"),
    [
        ("Does it hurt to drop KL on sums?", 0.0),
        ("Does it hurt to omit KL on sums?", 0.0),
        ("Does eliminating KL hurt on sums?", 0.0),
        ("Does accuracy drop with a KL penalty on sums?", 0.1),
    ],
)
def test_what_is_dropped_is_switched_off(topic: str, treatment: float) -> None:
    assert sides(read(topic, ARITHMETIC.instrument))[0] == [treatment]


@pytest.mark.parametrize(("one", "other"), [(16, 4), (4, 16)])
@pytest.mark.parametrize(
    ("topic", "direction"),
    [
        ("A group size of {} gains less accuracy than {} on sums", DOWN),
        ("{} rollouts are more accurate than {} rollouts on sums", UP),
        ("{} rollouts are not as accurate as {} rollouts on sums", DOWN),
    ],
)
def test_less_and_not_as_claim_the_worse(topic: str, direction: str, one: int, other: int) -> None:
    reading = read(topic.format(one, other), ARITHMETIC.instrument)
    assert (sides(reading), reading.direction) == (([one], [other]), direction)


@pytest.mark.parametrize(("one", "other"), [("LoRA", "full fine-tuning"), ("full fine-tuning", "LoRA")])
def test_not_as_good_is_worse(one: str, other: str) -> None:
    assert read(f"{one} is not as good as {other} on sums", ARITHMETIC.instrument).direction == DOWN


@pytest.mark.parametrize(("first", "second"), [(1e-5, 1e-4), (1e-4, 1e-5)])
@pytest.mark.parametrize("verb", ["worsens", "ruins", "weakens"])
def test_a_verb_behind_a_level_is_no_unit(verb: str, first: float, second: float) -> None:
    reading = read(f"Changing lr from {first} to {second} {verb} accuracy on sums", ARITHMETIC.instrument)
    assert (sides(reading), reading.direction) == (([second], [first]), DOWN)


@pytest.mark.parametrize(
    ("topic", "is_off"),
    [
        ("Does switching from no warmup to warmup raise accuracy on sums?", False),
        ("Does switching from warmup to no warmup raise accuracy on sums?", True),
    ],
)
def test_a_switch_reaches_no_further_than_its_own_name(topic: str, is_off: bool) -> None:
    assert (sides(read(topic, ARITHMETIC.instrument))[0] == [0]) is is_off


def test_what_is_computed_over_a_group_is_no_group_size() -> None:
    reading = read("Does normalising rewards by the group std hurt accuracy on sums?", ARITHMETIC.instrument)
    assert (reading.factor.name, *sides(reading)) == ("advantage_norm", ["std"], ["none"])
