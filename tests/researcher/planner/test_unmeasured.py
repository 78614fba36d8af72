"""Topics that ask for an outcome which no metric measures: refused with the metrics that there are."""

from __future__ import annotations

import pytest

from researcher.planner.matching import read
from tests.contracts.planner_contract import ARITHMETIC
from tests.researcher.planner.test_topics import ACC, AUC, STEPS, refusal


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("Does max tokens {a} use fewer tokens than max tokens {b} on sums?", "max_tokens can be set"),
        ("Does group size {a} need more rollouts than {b}?", "group_size can be set"),
        ("Is lr {a}e-5 cheaper than {b}e-5 in tokens on sums?", "max_tokens can be set"),
        ("Does a group size of {a} need less wall time than {b} to reach a reward of 0.5?", "wall_s is that of whole"),
    ],
)
def test_an_outcome_that_is_not_measured_is_refused(topic: str, says: str) -> None:
    for a, b in ((8, 16), (16, 8)):
        refused = refusal(topic.format(a=a, b=b))
        assert says in str(refused)
        assert {"wall_s", STEPS} <= set(refused.nearest)


@pytest.mark.parametrize(
    ("topic", "metric"),
    [
        ("Does RLOO need fewer steps than GRPO to reach a reward of 0.5?", STEPS),
        ("Does group size 4 reach a reward of 0.5 sooner than 16?", STEPS),
        ("Does group size 16 use fewer steps than 4 to reach a reward of 0.5?", STEPS),
        ("Is lr 4e-5 better than 1e-5 in groups of 8?", ACC),
        ("Is lr 4e-5 faster than 1e-5 in steps?", AUC),
    ],
)
def test_what_is_counted_or_set_is_not_refused(topic: str, metric: str) -> None:
    assert read(topic, ARITHMETIC.instrument).metric.name == metric
