"""What a topic concedes before its claim frames it: the claim is of the other clause, and so is the treatment."""

from __future__ import annotations

from typing import Any

import pytest

from researcher.planner.matching import read
from tests.contracts.planner_contract import ARITHMETIC
from tests.researcher.planner.test_topics import ACC, AUC, DOWN, UP, sides


@pytest.mark.parametrize(
    ("topic", "factor", "treatments", "baselines", "metric", "direction"),
    [
        ("Group size 16 is slow, but does 4 lose accuracy?", "group_size", [4], [16], ACC, DOWN),
        ("A learning rate of 1e-5 is stable, but does 4e-5 learn faster?", "learning_rate", [4e-5], [1e-5], AUC, UP),
        ("GRPO is popular, yet does RLOO beat it?", "algorithm", ["rloo"], ["grpo"], AUC, UP),
        ("Although a group size of 4 is cheap, 16 reaches a higher accuracy.", "group_size", [16], [4], ACC, UP),
        ("Although LoRA is cheaper, full fine-tuning is more accurate.", "parameters", ["full"], ["lora"], ACC, UP),
        ("Although GRPO is the standard, RLOO learns faster.", "algorithm", ["rloo"], ["grpo"], AUC, UP),
        ("Even though a group size of 16 is slower, it is more accurate than 4.", "group_size", [16], [4], ACC, UP),
        ("Even though a group size of 16 is slower than 4, it is more accurate.", "group_size", [16], [4], ACC, UP),
        ("Although lr 4e-5 learns faster than 1e-5, it is less accurate.", "learning_rate", [4e-5], [1e-5], ACC, DOWN),
        ("Although RLOO beats GRPO on reward, it is less accurate.", "algorithm", ["rloo"], ["grpo"], ACC, DOWN),
    ],
)  # fmt: skip
def test_what_is_conceded_is_neither_claimed_nor_the_treatment(
    topic: str, factor: str, treatments: list[Any], baselines: list[Any], metric: str, direction: str
) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.factor.name, *sides(reading)) == (factor, treatments, baselines)
    assert (reading.metric.name, reading.direction) == (metric, direction)
    assert any("tells why it is asked" in line for line in reading.assumptions)


@pytest.mark.parametrize(
    "topic",
    [
        "Larger groups take longer. Is a group size of 16 more accurate than 4?",
        "Although larger groups take longer, a group size of 16 is more accurate than 4.",
        "Is a group size of 16 more accurate than 4 and does it take more time?",
    ],
)
def test_a_metric_in_another_form_counts_beside_one_by_name(topic: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert sides(reading) == ([16], [4])
    assert (reading.metric.name, reading.direction) == (ACC, UP)
