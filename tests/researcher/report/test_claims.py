"""Every number is printed by one set of rules."""

from __future__ import annotations

import pytest

from researcher.instruments.instrument import Metric
from researcher.report.claims import ABSENT, Ledger, Style, decimals_of, printed
from researcher.report.records import Records
from tests.fakes.concluded_study import supported


@pytest.mark.parametrize(
    ("value", "style", "text"),
    [
        (0.12345, Style.VALUE, "0.123"),
        (0.12345, Style.DIFF, "+0.123"),
        (-0.12345, Style.DIFF, "−0.123"),
        (-0.00001, Style.DIFF, "0.000"),
        (12345.0, Style.COUNT, "12,345"),
        (10_000, Style.SEEDS, "10,000 or more"),
        (7, Style.SEEDS, "7"),
        (0.95, Style.PERCENT, "95 %"),
        (0.975, Style.PERCENT, "97.5 %"),
        (0.99999, Style.PERCENT, "above 99.9 %"),
        (1.0, Style.PERCENT, "100 %"),
        (0.00004, Style.P, "below 0.001"),
        (0.0314, Style.P, "0.031"),
        (88.04, Style.SECONDS, "88.0 s"),
        (723.0, Style.SECONDS, "12 min 3 s"),
        (3 * 3600 + 5 * 60, Style.SECONDS, "3 h 5 min"),
        (4e-5, Style.PLAIN, "4e-05"),
        (-0.25, Style.PLAIN, "−0.25"),
        (3.0, Style.PLAIN, "3"),
        ("0123456789abcdef", Style.SHORT, "0123456789ab"),
        ("supported", Style.WORD, "supported"),
        (None, Style.COUNT, ABSENT),
    ],
)
def test_values_are_printed(value: float | str | None, style: Style, text: str) -> None:
    assert printed(value, style, 3) == text


@pytest.mark.parametrize(("margin", "decimals"), [(0.1, 3), (0.05, 3), (0.08, 3), (2.0, 2), (10.0, 1), (100.0, 0)])
def test_decimals_follow_from_the_smallest_effect_of_interest(margin: float, decimals: int) -> None:
    assert decimals_of(Metric(name="m", kind="wall_s", margin=margin)) == decimals


def test_a_name_stands_for_one_expression_only() -> None:
    ledger = Ledger(Records(supported()))
    first = ledger.claim("done", 'count_trials(status="done")', Style.COUNT)
    assert ledger.claim("done", 'count_trials(status="done")', Style.COUNT) == first
    with pytest.raises(ValueError, match="done"):
        ledger.claim("done", "count_trials()", Style.COUNT)
    assert [claim.name for claim in ledger.claims] == ["done"]
