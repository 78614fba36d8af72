"""Drawings are whole at every length of a curve, and hold nothing but numbers and escaped names."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from researcher.web import curves
from tests.fakes.study import study_plan, trials_with

NAN = re.compile(r"\b(nan|inf)\b")


@pytest.mark.parametrize("length", [1, 2, 3, 119, 120, 121, 5000])
def test_a_small_curve_of_any_length_ends_at_its_newest_point(length: int) -> None:
    line = [(step, step / length) for step in range(1, length + 1)]
    drawn = curves.small(line, 7)
    ElementTree.fromstring(drawn)
    assert NAN.search(drawn) is None
    assert len(re.findall(r"\d+\.\d,\d+\.\d", drawn)) <= 121
    assert 'cx="116.0"' in drawn or length == 1
    assert "arm1" in drawn


def test_before_the_first_point_nothing_is_drawn() -> None:
    plan = study_plan()
    assert curves.small([], 0) == ""
    assert curves.large([], {arm.name: 0 for arm in plan.arms}, plan.steps) == ""


def test_the_large_drawing_has_a_line_for_each_seed_and_a_mean_for_each_arm_with_several() -> None:
    plan = study_plan()
    trials = trials_with(plan, {"lr=base": (0.3, 0.3), "lr=4e-05": (0.5,)})
    drawn = curves.large(trials, {"lr=base": 0, "lr=4e-05": 1}, plan.steps)
    ElementTree.fromstring(drawn)
    assert drawn.count('class="seed') == 3
    assert drawn.count('class="mean') == 1


def test_interim_evaluations_are_rings_also_of_a_trial_that_trains() -> None:
    plan = study_plan()
    first, second = trials_with(plan, {"lr=base": (0.3, 0.3)})
    held = {**second.series, "heldout_reward": [(0, 0.1), (2, 0.9)]}
    drawn = curves.large([first, second.model_copy(update={"series": held})], {"lr=base": 0}, plan.steps)
    ElementTree.fromstring(drawn)
    assert drawn.count('class="held arm0"') == 1
    assert drawn.count('r="3.4"') == 2


def test_an_arms_name_is_text() -> None:
    plan = study_plan()
    trials = [trial.model_copy(update={"arm": "<b>"}) for trial in trials_with(plan, {"lr=base": (0.3, 0.4)})]
    assert "<b>" not in curves.large(trials, {"<b>": 0}, plan.steps)
