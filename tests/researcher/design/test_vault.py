"""Held-out tasks that no exploration scored: how they are shared out, and how a plan asks for them."""

from __future__ import annotations

import pytest

from researcher.describe import plan_lines
from researcher.design.planning import split_heldout
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan
from tests.fakes.specs import planned


@pytest.mark.parametrize(
    ("available", "wanted", "shares"),
    [(200, 32, (32, 32)), (64, 32, (32, 32)), (63, 32, (31, 32)), (40, 32, (20, 20)), (3, 8, (1, 2)), (2, 1, (1, 1))],
)
def test_explorations_and_confirmations_score_different_tasks(
    available: int, wanted: int, shares: tuple[int, int]
) -> None:
    explored, confirmed = split_heldout(available, wanted)
    assert (explored, confirmed) == shares
    assert explored + confirmed <= available


@pytest.mark.parametrize("available", [0, 1])
def test_an_instrument_without_tasks_for_both_is_refused(available: int) -> None:
    with pytest.raises(PlanningRefused, match=f"has {available} in all"):
        split_heldout(available, 8)


def test_a_plan_says_which_held_out_tasks_are_scored() -> None:
    plan = planned(heldout_from=20, heldout_tasks=12)
    assert (plan.heldout_from, plan.heldout_tasks, plan.heldout_upto) == (20, 12, 32)
    assert Plan.model_validate_json(plan.canonical()) == plan
    assert any("tasks 21 to 32" in line for line in plan_lines(plan))


def test_a_plan_that_skips_none_is_the_plan_it_was() -> None:
    plan = planned()
    assert "heldout_from" not in plan.canonical()
    assert planned(heldout_tasks=plan.heldout_tasks).digest() == plan.digest() != planned(heldout_from=8).digest()
    assert not any("held out" in line for line in plan_lines(plan))
