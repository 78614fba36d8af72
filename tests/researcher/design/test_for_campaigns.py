"""What a campaign asks of a plan: another level than 0.05, and held-out tasks that no exploration scored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bench.made_up_studies import INSTRUMENT
from researcher.analysis.power import hypothesis_power, hypothesis_seeds
from researcher.describe import plan_lines
from researcher.design.planning import split_heldout
from researcher.design.pricing import price_of
from researcher.design.stages import with_seeds
from researcher.instruments.catalogue import read_instrument
from researcher.refusals import PlanningRefused
from researcher.study.plan import ALPHA, Plan
from tests.fakes.specs import planned
from tests.fakes.study import done_trial

KITCHEN = read_instrument(Path(__file__).parents[2] / "instruments" / "kitchen")
SECOND = ALPHA * 6 / (math.pi**2 * 4)
"""What the second confirmation of a campaign may spend."""
THREE = {"learning_rate": {"levels": [1e-5, 2e-5, 4e-5]}}


def at(alpha: float, **fields: Any) -> Plan:
    return planned(INSTRUMENT, alpha=alpha, **fields)


@pytest.mark.parametrize("design", ["compare", "race", "trend", "balance"])
def test_every_hypothesis_of_a_plan_is_tested_at_its_level(design: str) -> None:
    plan = at(SECOND, design=design, compare=THREE)
    assert {hypothesis.alpha for hypothesis in plan.hypotheses} == {SECOND}
    assert (
        at(ALPHA, design=design, compare=THREE).digest() == planned(INSTRUMENT, design=design, compare=THREE).digest()
    )


def test_looks_spend_the_level_of_the_plan_and_no_more() -> None:
    plan = at(SECOND, looks=3, seeds={"min": 6, "max": 12})
    assert math.fsum(stage.spends or 0.0 for stage in plan.stages) == pytest.approx(SECOND)
    sized = plan.model_copy(update={"stages": with_seeds(plan.stages, 9)})
    assert math.fsum(stage.spends or 0.0 for stage in sized.stages) == pytest.approx(SECOND)


def test_orders_are_judged_at_the_level_of_the_plan() -> None:
    plan = at(SECOND, design="balance", compare=THREE)
    orders = [branch.when.alpha for branch in plan.branches if branch.when.kind == "order"]
    assert set(orders) == {SECOND}


def test_a_stricter_level_takes_more_seeds_and_leaves_less_power() -> None:
    usual, strict = at(ALPHA, seeds={"min": 4, "max": 12}), at(SECOND, seeds={"min": 4, "max": 12})
    [asked], floor = usual.hypotheses, usual.stages[0]
    values = [0.0, 0.1, 0.15, 0.2]
    seen = [done_trial(usual, floor.arms[0], seed, value) for seed, value in enumerate(values)]
    [other] = strict.hypotheses
    assert hypothesis_seeds(strict, other, seen) > hypothesis_seeds(usual, asked, seen)
    assert hypothesis_power(strict, other, seen) < hypothesis_power(usual, asked, seen)


def test_the_price_counts_seeds_at_the_level_of_the_plan() -> None:
    plans = [planned(KITCHEN, alpha=alpha, compare={"hints": {"levels": [False, True]}}) for alpha in (ALPHA, SECOND)]
    usual, strict = (price_of(plan, KITCHEN.instrument, servers=1).seeds_needed for plan in plans)
    assert usual is not None
    assert strict is not None
    assert strict > usual


@pytest.mark.parametrize("alpha", [0.0, 0.5, -0.1, math.nan])
def test_a_level_that_is_none_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha must lie between"):
        at(alpha)


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
