"""How numbers are printed, and how axes and curves are drawn from them."""

from __future__ import annotations

import re

import pytest

from researcher.instruments.instrument import Metric
from researcher.models import Claim
from researcher.report.claims import ABSENT, Ledger, Style, decimals_of, printed
from researcher.report.drawing import Interval, effects, learning_curves, sparkline, ticks
from researcher.report.records import Records, held_out_curve
from tests.fakes.concluded_study import supported
from tests.fakes.study import done_trial, study_plan


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
        (0.95, Style.LEVEL, "95 %"),
        (0.9924, Style.LEVEL, "99.2 %"),
        (0.99996, Style.LEVEL, "99.996 %"),
        (1 - 1e-12, Style.LEVEL, "above 99.99999 %"),
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


def test_held_out_points_are_rings_of_an_arms_mean_from_before_training_on() -> None:
    plan = study_plan()
    trials = [done_trial(plan, "lr=base", seed, 0.5) for seed in range(2)]
    around = learning_curves([("lr=base", trials)], "reward_mean", "reward")
    assert around.count('r="4.2"') == 2 + 1  # before and after, and the legend
    assert "on held-out tasks" in around
    points = {seed: [(0, 0.0), (2, 0.25 * seed), (4, 0.5)] for seed in range(2)}
    watched = [
        trial.model_copy(update={"series": {**trial.series, "heldout_reward": points[seed]}})
        for seed, trial in enumerate(trials)
    ]
    assert held_out_curve(watched[1]) == points[1]
    assert held_out_curve(trials[0]) == [(0, 0.0), (4, 0.5)]
    drawn = learning_curves([("lr=base", watched)], "reward_mean", "reward")
    assert drawn.count('r="4.2"') == 3 + 1
    assert drawn.count('stroke-dasharray="1 4"') == 1


def test_nothing_recorded_is_nothing_drawn() -> None:
    assert learning_curves([("lr=base", [])], "reward_mean", "reward") == ""


@pytest.mark.parametrize("letters", [10, 80])
def test_the_names_of_effects_are_not_cut(letters: int) -> None:
    low, diff, high = (Claim(name=str(value), expression="1", value=value, text="") for value in (0.1, 0.2, 0.3))
    svg = effects([Interval(label="m" * letters, verdict="supported", diff=diff, low=low, high=high, margin=0.1)])
    [end] = re.findall(r'<text x="([\d.]+)" [^>]*>m+<', svg)
    [width] = re.findall(r'viewBox="0 0 (\d+) ', svg)
    assert 7 * letters < float(end) < float(width) - 480
