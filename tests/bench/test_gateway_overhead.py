"""The interval of the gateway's ratio: 95 %, or none."""

from __future__ import annotations

import pytest
from scipy import stats

from bench.gateway_overhead import LEAST_ROUNDS, middle


@pytest.mark.parametrize("n", range(LEAST_ROUNDS, 60))
def test_the_interval_holds_the_median_in_95_percent_of_cases_and_is_the_shortest_that_does(n: int) -> None:
    _, low, high = middle([*range(1, n + 1)])
    assert low + high == n + 1
    cuts = [1 - 2 * stats.binom.cdf(cut - 1, n, 0.5) for cut in (low, low + 1)]
    assert cuts[0] >= 0.95 > cuts[1]


def test_fewer_rounds_than_an_interval_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="takes 6 values, got 5"):
        middle([1.0] * (LEAST_ROUNDS - 1))
