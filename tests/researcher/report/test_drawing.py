"""Axes and curves are drawn from the numbers that they are given."""

from __future__ import annotations

import re

import pytest

from researcher.models import Claim
from researcher.report.drawing import Interval, effects, learning_curves, sparkline, ticks
from tests.fakes.study import done_trial, study_plan


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1, 12, [0, 2, 4, 6, 8, 10, 12]),
        (-0.035, 0.045, [-0.04, -0.02, 0.0, 0.02, 0.04, 0.06]),
        (0.0, 0.0, [-0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6]),
    ],
)
def test_ticks_are_round_numbers_around_the_values(low: float, high: float, expected: list[float]) -> None:
    found = ticks(low, high, 8)
    assert found[0] <= low
    assert found[-1] >= high
    assert found == pytest.approx(expected)


def test_a_sparkline_spans_the_range_of_all_that_it_stands_beside() -> None:
    assert sparkline([(1, 0.0), (2, 0.5)], [[(1, 0.0), (2, 1.0)]]) == "▁▅"
    assert sparkline([(1, 0.0), (2, 0.5), (3, 1.0)]) == "▁▅█"
    assert sparkline([(1, 0.4), (2, 0.4)]) == "▁▁"
    assert sparkline([]) == ""


def test_curves_have_a_line_per_seed_and_a_bold_one_per_arm() -> None:
    plan = study_plan()
    trials = [done_trial(plan, "lr=base", seed, 0.1 * seed) for seed in range(3)]
    svg = learning_curves([("lr=base", trials), ("lr=4e-05", [])], "reward_mean", "reward")
    assert svg.count('stroke-opacity="0.4"') == 3
    assert svg.count('stroke-width="2.8" stroke-opacity="1"') == 1 + svg.count('points=""')
    assert ">lr=4e-05<" in svg


def test_nothing_recorded_is_nothing_drawn() -> None:
    assert learning_curves([("lr=base", [])], "reward_mean", "reward") == ""


@pytest.mark.parametrize("letters", [10, 80])
def test_the_names_of_effects_are_not_cut(letters: int) -> None:
    low, diff, high = (Claim(name=str(value), expression="1", value=value, text="") for value in (0.1, 0.2, 0.3))
    svg = effects([Interval(label="m" * letters, verdict="supported", diff=diff, low=low, high=high, margin=0.1)])
    [end] = re.findall(r'<text x="([\d.]+)" [^>]*>m+<', svg)
    [width] = re.findall(r'viewBox="0 0 (\d+) ', svg)
    assert 7 * letters < float(end) < float(width) - 480
