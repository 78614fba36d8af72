"""Questions that say which way a factor moves, before a sentence that names its levels."""

from __future__ import annotations

import pytest

from researcher.planner.matching import read
from tests.contracts.planner_contract import ARITHMETIC
from tests.researcher.planner.test_topics import ACC, AUC, DOWN, UP, refusal, sides


@pytest.mark.parametrize(
    ("topic", "levels", "is_more", "metric", "direction"),
    [
        ("Does more training help on sums? {} vs {} steps", (6, 12), True, AUC, UP),
        ("Does longer training help? {} vs {} steps on sums", (6, 12), True, AUC, UP),
        ("Is it worth training longer? {} vs {} steps", (6, 12), True, AUC, UP),
        ("Does less training hurt? {} vs {} steps", (6, 12), False, AUC, DOWN),
        ("Does less training help? {} vs {} steps", (6, 12), False, AUC, UP),
        ("Does a stronger KL penalty help? {} vs {}", (0.01, 0.1), True, AUC, UP),
        ("Does a weaker penalty help? KL {} vs {}", (0.01, 0.1), False, AUC, UP),
        ("Is learning faster with a stronger penalty? KL {} vs {}", (0.01, 0.1), True, AUC, UP),
        ("Does more capacity improve accuracy? LoRA rank {} vs {}", (4, 32), True, ACC, UP),
        ("Does accuracy change with more capacity? LoRA rank {} vs {}", (4, 32), True, ACC, UP),
        ("Does scaling up help? Group size {} vs {}", (4, 16), True, AUC, UP),
        ("Does more help? Group size {} vs {}", (4, 16), True, AUC, UP),
        ("Do harder tasks slow learning? {}- vs {}-digit sums.", (1, 2), True, AUC, DOWN),
        ("Do easier tasks speed learning up? {}- vs {}-digit sums.", (1, 2), False, AUC, UP),
    ],
)
def test_the_question_says_which_level_is_the_treatment(
    topic: str, levels: tuple[float, float], is_more: bool, metric: str, direction: str
) -> None:
    low, high = levels
    for text in (topic.format(low, high), topic.format(high, low)):
        reading = read(text, ARITHMETIC.instrument)
        assert sides(reading) == (([high], [low]) if is_more else ([low], [high]))
        assert (reading.metric.name, reading.direction) == (metric, direction)


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("Do we gain anything from more samples? 4 vs 16", "goes the other way"),
        ("Is more training better than less? 6 vs 12 steps", "goes the other way"),
        ("Does more freedom help? LoRA vs full fine-tuning", "which of lora and full is more"),
    ],
)
def test_a_question_that_leaves_it_open_is_refused(topic: str, says: str) -> None:
    assert says in str(refusal(topic))


@pytest.mark.parametrize(
    "topic",
    [
        "Is there a larger improvement? Group size 4 vs 16",
        "Does learning take longer? Group size 4 vs 16",
        "Is the final reward larger? Group size 4 vs 16",
    ],
)
def test_what_is_said_of_the_outcome_moves_no_factor(topic: str) -> None:
    assert sides(read(topic, ARITHMETIC.instrument)) == ([4], [16])
