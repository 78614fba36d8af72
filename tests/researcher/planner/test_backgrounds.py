"""Topics that tell something before they ask: it neither turns the comparison round, nor claims, nor says what is measured."""

from __future__ import annotations

from typing import Any

import pytest

from researcher.planner.matching import read
from tests.contracts.planner_contract import ARITHMETIC
from tests.researcher.planner.test_topics import ACC, AUC, DOWN, REWARD, UP, refusal, sides


def read_as(topic: str) -> tuple[list[Any], list[Any], str, str]:
    reading = read(topic, ARITHMETIC.instrument)
    return (*sides(reading), reading.metric.name, reading.direction)


@pytest.mark.parametrize(
    ("topic", "one", "other", "metric"),
    [
        ("{b} is the standard algorithm for sums. Does {a} learn faster than {b}?", ("RLOO", "rloo"), ("GRPO", "grpo"), AUC),
        ("The standard is {b}. How does {a} compare to {b}?", ("RLOO", "rloo"), ("GRPO", "grpo"), AUC),
        ("The {b} schedule is standard. Does a {a} schedule beat a {b} schedule?", ("cosine", "cosine"), ("constant", "constant"), AUC),
        ("A temperature of {b} is standard. Does {a} give a higher final reward than {b}?", ("0.7", 0.7), ("1.0", 1.0), REWARD),
        ("A learning rate of {b} is common. Does {a} learn faster than {b} on sums?", ("4e-5", 4e-5), ("1e-5", 1e-5), AUC),
        ("A group size of {b} is popular. Does {a} beat {b}?", ("16", 16), ("4", 4), AUC),
        ("A group size of {b} is popular. Does {a} help?", ("16", 16), ("4", 4), AUC),
        ("{b} is cheap. Does {a} beat {b} on sums?", ("full fine-tuning", "full"), ("LoRA", "lora"), AUC),
        ("{b} keeps almost no state. Does {a} beat {b}?", ("AdamW", "adamw"), ("Adafactor", "adafactor"), AUC),
    ],
)  # fmt: skip
def test_the_sentence_that_compares_sets_the_levels_against_each_other(
    topic: str, one: tuple[str, Any], other: tuple[str, Any], metric: str
) -> None:
    for a, b in ((one, other), (other, one)):
        assert read_as(topic.format(a=a[0], b=b[0])) == ([a[1]], [b[1]], metric, UP)


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("Does {a} beat {b} on sums, and does {c}?", (["dapo", "gspo"], ["grpo"], AUC, UP)),
        ("Does {a} beat {c} on sums, and does {b}?", (["dapo", "grpo"], ["gspo"], AUC, UP)),
    ],
)
def test_what_is_asked_of_one_is_asked_of_the_next(topic: str, expected: tuple[list[Any], list[Any], str, str]) -> None:
    assert read_as(topic.format(a="DAPO", b="GRPO", c="GSPO")) == expected


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("Some papers claim that LoRA learns slower than full fine-tuning. Does LoRA learn faster than full fine-tuning?", (["lora"], ["full"], AUC, UP)),
        ("Some papers claim that LoRA learns faster than full fine-tuning. Does LoRA learn slower than full fine-tuning?", (["lora"], ["full"], AUC, DOWN)),
        ("Some papers claim that full fine-tuning learns slower than LoRA. Does full fine-tuning learn faster than LoRA?", (["full"], ["lora"], AUC, UP)),
        ("After raising the group size from 4 to 16 training became slower. Did the accuracy improve?", ([16], [4], ACC, UP)),
        ("After lowering the group size from 16 to 4 training became slower. Did the accuracy improve?", ([4], [16], ACC, UP)),
    ],
)  # fmt: skip
def test_a_question_claims_before_what_is_told(topic: str, expected: tuple[list[Any], list[Any], str, str]) -> None:
    assert read_as(topic) == expected


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("The former default was lr {}, the new one is {}. Is the new one better in accuracy?", (1, 0, ACC, UP)),
        ("The old lr is {}, the new one is {}. Does the new one beat the old one?", (1, 0, AUC, UP)),
        ("The old lr is {}, the new one is {}. Is the old one worse in accuracy?", (0, 1, ACC, DOWN)),
        ("Our current lr is {}, the proposed one is {}. Is accuracy higher with the proposed one?", (1, 0, ACC, UP)),
        ("The old lr is {}, the new one is {}. Is it better in accuracy than the old one?", (1, 0, ACC, UP)),
        ("The former default was lr {}, the new one is {}. Does learning get faster?", (1, 0, AUC, UP)),
    ],
)
def test_a_level_may_be_called_by_what_it_was_said_to_be(topic: str, expected: tuple[int, int, str, str]) -> None:
    treatment, baseline, metric, direction = expected
    for rates in ((1e-5, 4e-5), (4e-5, 1e-5)):
        assert read_as(topic.format(*rates)) == ([rates[treatment]], [rates[baseline]], metric, direction)


def test_a_question_of_both_that_sets_neither_against_the_other_is_refused() -> None:
    refused = refusal("The old lr is 1e-5, the new one is 4e-5. Do the old one and the new one learn faster?")
    assert "'the old' and 'the new' leave open which is claimed to be so" in str(refused)
