from __future__ import annotations

import pytest

from foundation.durations import duration_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("8h", 28_800),
        ("90m", 5400),
        ("90min", 5400),
        ("1h30m", 5400),
        ("2d", 172_800),
        ("1.5h", 5400),
        ("45s", 45),
        ("0s", 0),
    ],
)
def test_a_time_with_its_units(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "8", "h", "30m1h", "8 h", "-8h", "8x", "٨h", "1e3s"])
def test_what_is_no_time(text: str) -> None:
    assert duration_s(text) is None
