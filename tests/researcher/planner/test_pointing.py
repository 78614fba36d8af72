"""Topics that point at a level instead of naming it again, that ask which of two it is, or that say less than a level."""

from __future__ import annotations

from typing import Any

import pytest

from researcher.planner.matching import read
from tests.contracts.planner_contract import ARITHMETIC
from tests.researcher.planner.test_topics import ACC, AUC, DOWN, UP, refusal, sides

POINTED: list[tuple[str, list[Any], list[Any], str, str]] = [
    ("Group sizes 4 and 16: the larger is better", [16], [4], ACC, UP),
    ("Of group sizes 4 and 16, is the larger one better?", [16], [4], ACC, UP),
    ("Group sizes 4 and 16: is the larger better?", [16], [4], ACC, UP),
    ("Group size 16 or 4: is the smaller of the two worse?", [4], [16], ACC, DOWN),
    ("Temperatures 0.7 and 1.0: the lower one is better for accuracy", [0.7], [1.0], ACC, UP),
    ("Of lr 1e-5 and 4e-5 the smaller one should reach a higher accuracy", [1e-5], [4e-5], ACC, UP),
    ("We compare GRPO and RLOO; the latter should be better.", ["rloo"], ["grpo"], ACC, UP),
    ("We compare GRPO and RLOO; is the former slower than the latter?", ["grpo"], ["rloo"], AUC, DOWN),
    ("Does lr 1e-5 or 4e-5 give higher accuracy? I think the second does.", [4e-5], [1e-5], ACC, UP),
    ("Is GRPO the worst of GRPO, RLOO, PPO?", ["grpo"], ["rloo", "ppo"], AUC, DOWN),
    ("Is GRPO the best of GRPO, RLOO and PPO?", ["grpo"], ["rloo", "ppo"], AUC, UP),
    ("Does group size 4 give the lowest accuracy among 4, 8 and 16?", [4], [8, 16], ACC, DOWN),
    ("Is bigger better for group size?", [8], [4], ACC, UP),
    ("Does the larger group size help, 4 or 16?", [16], [4], AUC, UP),
    ("Group sizes 4 and 16: the largest is better", [16], [4], ACC, UP),
    ("Of group sizes 4 and 16, the smallest of the two is better", [4], [16], ACC, UP),
    ("Does a learning rate from 1e-5 up to 1e-4 speed up learning?", [1e-4], [1e-5], AUC, UP),
    ("Does raising lr from 1e-5 up to 1e-4 speed up learning?", [1e-4], [1e-5], AUC, UP),
]


@pytest.mark.parametrize(("topic", "treatments", "baselines", "metric", "direction"), POINTED)
def test_what_is_claimed_is_claimed_of_the_level_that_is_pointed_at(
    topic: str, treatments: list[Any], baselines: list[Any], metric: str, direction: str
) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert sides(reading) == (treatments, baselines)
    assert (reading.metric.name, reading.direction, reading.direction_assumed) == (metric, direction, False)


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("Compare group sizes 4, 8 and 16: is the larger one better?", "'the larger' may be any level of group_size"),
        ("GRPO and RLOO: is the smaller one better?", "name the level itself (grpo or rloo)"),
        ("Group sizes 4 and 16: is the larger or the smaller better?", "name the level itself (4 or 16)"),
        ("Arm A uses lr 1e-5, arm B uses lr 4e-5: is B better?", "'B' stands for a level of learning_rate"),
        ("Option A is GRPO and option B is RLOO. Does B win?", "'B' stands for a level of algorithm"),
        ("A: group size 4, B: group size 16. Is B better?", "'B' stands for a level of group_size"),
        ("Do you need more than 4 rollouts?", "on which side of 4 a level of group_size lies"),
        ("Do you need more than 4 rollouts for accuracy?", "on which side of 4 a level of group_size lies"),
        ("Do you need more than 8 tokens?", "on which side of 8 a level of max_tokens lies"),
        ("Do we need fewer than 32 tokens?", "on which side of 32 a level of max_tokens lies"),
        ("Is fewer than 32 tokens enough?", "on which side of 32 a level of max_tokens lies"),
        ("Are 16 or more rollouts better?", "on which side of 16 a level of group_size lies"),
    ],
)
def test_what_may_be_any_level_is_refused(topic: str, says: str) -> None:
    refused = refusal(topic)
    assert says in str(refused)
    assert refused.nearest


@pytest.mark.parametrize(
    "topic",
    [
        "Does lr 1e-5 or 4e-5 make learning slower?",
        "Do 4 rollouts or 16 rollouts hurt accuracy?",
        "Are sums of one digit or two digits harder?",
        "Find the worst learning rate: 1e-6, 1e-5 or 1e-4",
        "With which learning rate is the accuracy the highest: 1e-5, 4e-5 or 1e-4?",
        "At which group size is the final reward the highest?",
        "Which group size, 4 or 16, makes accuracy the highest?",
        "lr from 2e-5 up to 8e-5: which is best?",
    ],
)
def test_a_question_of_which_claims_nothing(topic: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert reading.direction_assumed
    assert any("claims no direction" in line for line in reading.assumptions)


def test_what_is_measured_may_be_the_highest() -> None:
    which = read("Which group size, 4 or 16, makes accuracy the highest?", ARITHMETIC.instrument)
    plain = read("Which group size, 4 or 16, makes accuracy highest?", ARITHMETIC.instrument)
    assert sides(which) == sides(plain)


def test_the_ends_of_a_range_are_told_and_algorithms_have_none() -> None:
    for topic in ("Does lr in the range 1e-5 to 1e-4 matter?", "lr 2e-5 up to 8e-5: which is best?"):
        notes = read(topic, ARITHMETIC.instrument).assumptions
        assert any("The ends of the range of learning_rate" in line for line in notes)
    between = read("Between GRPO and RLOO which is better?", ARITHMETIC.instrument).assumptions
    assert not any("range" in line for line in between)


@pytest.mark.parametrize(
    ("topic", "treatments", "baselines", "direction"),
    [
        ("Compare lr 1e-5 and 4e-5. We hypothesise that 4e-5 learns faster than 1e-5.", [4e-5], [1e-5], UP),
        ("We compare GRPO and RLOO. RLOO beats GRPO.", ["rloo"], ["grpo"], UP),
        ("GRPO vs RLOO over 20 steps; RLOO should win", ["rloo"], ["grpo"], UP),
        ("Group size 4 vs 8, is learning faster with 8?", [8], [4], UP),
        ("Full fine-tuning vs LoRA: does LoRA slow learning?", ["lora"], ["full"], DOWN),
        ("lr 1e-5 vs 4e-5 (is 4e-5 faster?)", [4e-5], [1e-5], UP),
        ("Group sizes 4 and 16: does it learn faster than with 4?", [16], [4], UP),
        ("Group sizes 4 and 16: 4 is the baseline. Does 16 learn faster?", [16], [4], UP),
        ("Does group size 16 beat 4? I fear that 4 is slow.", [16], [4], UP),
        ("lr 1e-5 vs 4e-5 (4e-5 is the default)", [1e-5], [4e-5], UP),
        ("KL 0 vs 0.1: does it slow learning?", [0.1], [0.0], DOWN),
        ("KL 0 vs 0.1: does the penalty slow learning?", [0.1], [0.0], DOWN),
        ("KL 0.1 vs 0: is learning faster without a KL penalty?", [0.0], [0.1], UP),
        ("Staleness 0 vs 4: does staleness slow learning?", [4], [0], DOWN),
        ("Warmup 0 or 3: does warmup speed learning up?", [3], [0], UP),
        ("Temperature 1.0 vs 0.7: does lowering it speed learning up?", [0.7], [1.0], UP),
        ("Max tokens 32 vs 64: does a longer limit slow learning?", [64], [32], DOWN),
    ],
)
def test_behind_a_heading_the_claim_says_of_which_level_it_is(
    topic: str, treatments: list[Any], baselines: list[Any], direction: str
) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (*sides(reading), reading.metric.name, reading.direction) == (treatments, baselines, AUC, direction)
