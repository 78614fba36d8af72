"""Topics that say which of their metrics counts, and which does not."""

from __future__ import annotations

import pytest

from researcher.planner.matching import read
from tests.contracts.planner_contract import ARITHMETIC
from tests.researcher.planner.test_topics import ACC, REWARD, UP, sides

WALL = "wall_s"


@pytest.mark.parametrize(
    ("topic", "metric"),
    [
        ("Wall time is not a concern. Does group size {a} give better held-out accuracy than {b} on sums?", ACC),
        ("We do not care about wall time. Is group size {a} better than {b}?", ACC),
        ("Ignore wall time. Is group size {a} better than {b} in held-out accuracy?", ACC),
        ("Wall time does not matter. Is group size {a} better than {b}?", ACC),
        ("Wall time is irrelevant. Is group size {a} better than {b}?", ACC),
        ("Regardless of wall time, is group size {a} better than {b} in final reward?", REWARD),
        ("Is group size {a} better than {b}, wall time and steps to threshold being irrelevant?", ACC),
        ("We don't care about wall time or final reward. Is {a} a better group size than {b}?", ACC),
        ("We don't care about final reward, only about held-out accuracy. Is group size {a} better than {b}?", ACC),
        ("Does group size {a} give higher accuracy than {b}, not final reward?", ACC),
        ("Final reward is noisy, so use held-out accuracy. Is group size {a} better than {b}?", ACC),
        ("Larger groups take longer. Does {a} give a higher final reward than {b}?", REWARD),
        ("Larger groups are slower in wall time. Is {a} better than {b} in held-out accuracy?", ACC),
        ("Training reward can be hacked. Does group size {a} beat {b} on sums in held-out accuracy?", ACC),
        ("We use the final reward. Does group size {a} beat {b}?", REWARD),
        ("Secondary metric: wall time. Primary metric: held-out accuracy. Group size {a} beats {b}.", ACC),
        ("Group size {a} beats {b}. Wall time is secondary, held-out accuracy is the primary metric.", ACC),
    ],
)
def test_the_metric_that_counts_decides(topic: str, metric: str) -> None:
    for a, b in ((16, 4), (4, 16)):
        reading = read(topic.format(a=a, b=b), ARITHMETIC.instrument)
        assert (*sides(reading), reading.metric.name, reading.direction) == ([a], [b], metric, UP)
        assert not any("nothing differs" in line for line in reading.assumptions)


def test_what_does_not_count_is_left_out_aloud() -> None:
    reading = read("Wall time does not matter. Compare group sizes 4 and 16 in final reward.", ARITHMETIC.instrument)
    assert "'wall time does not matter' says what does not count, and is left out." in reading.assumptions
    assert reading.direction_assumed


@pytest.mark.parametrize(
    ("topic", "metric"),
    [
        ("The group size does not matter for final reward: 4 vs 16", REWARD),
        ("Does group size 4 or 16 not matter for wall time?", WALL),
        ("Wall time matters. Is group size 16 better than 4?", WALL),
    ],
)
def test_a_factor_that_does_not_matter_leaves_its_metric(topic: str, metric: str) -> None:
    assert read(topic, ARITHMETIC.instrument).metric.name == metric
