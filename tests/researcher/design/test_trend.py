"""Trends: how a metric changes with one number, by the slope of a line over its levels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bench.made_up_studies import instrument
from researcher.analysis.comparisons import places
from researcher.instruments.catalogue import InstrumentFolder
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan, StageKind
from tests.fakes.specs import planned

SIMULATION = instrument()
RATES = (8e-5, 1e-5, 2e-5, 4e-5)


def trend(folder: InstrumentFolder = SIMULATION, **changes: Any) -> Plan:
    return planned(folder, **{"design": "trend", "compare": {"learning_rate": {"levels": RATES}}} | changes)


def test_one_hypothesis_speaks_of_the_change_over_all_levels_in_their_order() -> None:
    plan = trend(claim="increase")
    [claim] = plan.hypotheses
    assert [arm.levels["learning_rate"] for arm in plan.arms] == sorted(RATES)
    assert (claim.baseline, claim.treatment) == ("learning_rate=1e-5", "learning_rate=8e-5")
    assert claim.between_arms == ("learning_rate=2e-5", "learning_rate=4e-5")
    assert claim.sides == {arm.name for arm in plan.arms}
    assert claim.statement == "final_reward rises with learning_rate, from 1e-5 to 8e-5, on a log scale"
    assert [*places(plan, claim).values()] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    floor, compare = plan.stages
    assert (floor.kind, compare.kind) == (StageKind.NOISE_FLOOR, StageKind.COMPARE)
    assert floor.arms == ("learning_rate=4e-5",)


def test_a_factor_on_a_linear_scale_is_fitted_on_it() -> None:
    plan = trend(compare={"temperature": {"baseline": 1.0, "levels": [0.5, 2.0]}}, claim="decrease")
    assert [*places(plan, plan.hypotheses[0]).values()] == pytest.approx([0, 1 / 3, 1])
    assert plan.hypotheses[0].statement == "final_reward falls with temperature, from 0.5 to 2"


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ("none", "(no direction is claimed; this one is the better)"),
        ("equal", "changes with learning_rate by less than 0.1"),
    ],
)
def test_without_a_direction_the_statement_says_so(claim: str, said: str) -> None:
    assert said in trend(claim=claim).hypotheses[0].statement


def test_levels_that_are_no_numbers_make_no_trend() -> None:
    with pytest.raises(PlanningRefused, match="needs 3 or more levels of one number, and model has none"):
        trend(compare={}, model=["lab/a", "lab/b", "lab/c"])


def test_zero_is_refused_on_a_log_scale() -> None:
    [rate, *others] = SIMULATION.instrument.factors
    factors = (rate.model_copy(update={"low": 0.0}), *others)
    with_zero = dataclasses.replace(
        SIMULATION, instrument=SIMULATION.instrument.model_copy(update={"factors": factors})
    )
    with pytest.raises(PlanningRefused, match="0 has no place on the log scale of learning_rate"):
        trend(with_zero, compare={"learning_rate": {"levels": [0, 1e-5, 2e-5]}})
