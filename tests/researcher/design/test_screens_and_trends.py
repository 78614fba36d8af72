"""Screens explore main effects of many factors and test nothing; trends test how a metric changes with one number."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bench.made_up_studies import instrument
from researcher.analysis.comparisons import places
from researcher.design.arms import screen_runs
from researcher.design.pricing import price_of
from researcher.design.stages import with_seeds
from researcher.instruments.catalogue import InstrumentFolder
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan, StageKind
from tests.fakes.specs import planned

SIMULATION = instrument()
TWO: dict[str, Any] = {"learning_rate": {"levels": [1e-5, 4e-5]}, "temperature": {"levels": [1.0, 0.7]}}


def screen(**changes: Any) -> Plan:
    return planned(SIMULATION, **{"design": "screen", "compare": TWO} | changes)


@pytest.mark.parametrize(
    ("factors", "runs"), [(2, 4), (3, 4), (4, 8), (7, 8), (8, 12), (11, 12), (15, 16), (19, 20), (25, 32)]
)
def test_the_design_has_the_fewest_runs_and_keeps_main_effects_apart(factors: int, runs: int) -> None:
    design = np.array(screen_runs(factors))
    assert design.shape == (runs, factors)
    assert set(design[0]) == {-1}
    assert set(np.unique(design)) == {-1, 1}
    assert (design.sum(axis=0) == 0).all()
    assert (design.T @ design == runs * np.eye(factors)).all()


def test_four_factors_are_kept_apart_from_interactions_too() -> None:
    design = np.array(screen_runs(4))
    pairs = [design[:, one] * design[:, other] for one in range(4) for other in range(one)]
    assert all((design.T @ pair == 0).all() for pair in pairs)


def test_a_screen_runs_each_arm_of_its_design_on_two_seeds_and_measures_no_noise_floor() -> None:
    plan = screen()
    [stage] = plan.stages
    assert (stage.kind, stage.seeds, stage.max_seeds) == (StageKind.SCREEN, 2, 2)
    assert plan.arms[0].name == "learning_rate=1e-5,temperature=1"
    assert screen(seeds={"min": 3, "max": 3}).stages[0].seeds == 3
    assert {tuple(arm.levels.values()) for arm in plan.arms} == {*itertools.product((1e-5, 4e-5), (1.0, 0.7))}
    assert [(each.factor, each.baseline, each.treatment) for each in plan.hypotheses] == [
        ("learning_rate", "learning_rate=1e-5", "learning_rate=4e-5"),
        ("temperature", "temperature=1", "temperature=0.7"),
    ]
    assert plan.budget.trials == 8
    assert price_of(plan, SIMULATION.instrument, servers=1).trials == (8, 8)


def test_a_range_of_seeds_is_refused_and_not_cut_short() -> None:
    with pytest.raises(PlanningRefused, match=r"seeds\.max: a screen .* not on 3 to 10: give 3 or 10"):
        screen(seeds={"min": 3, "max": 10})


def test_seeds_budget_and_models_are_as_the_spec_says() -> None:
    plan = screen(
        seeds={"min": 3, "first": 7}, model=["lab/one", "lab/two"], compare={"temperature": TWO["temperature"]}
    )
    assert [(stage.seeds, stage.max_seeds, stage.first_seed) for stage in plan.stages] == [(3, 3, 7)]
    assert [each.factor for each in plan.hypotheses] == ["model", "temperature"]
    assert {model.name for model in plan.models} == {"lab/one", "lab/two"}
    [more] = with_seeds(plan.stages, 5)
    assert (more.seeds, more.max_seeds) == (5, 5)
    with pytest.raises(PlanningRefused, match="the study needs at least 8 trials, but the budget is 7"):
        screen(budget={"trials": 7})


def test_a_claim_is_not_tested_and_the_plan_says_so() -> None:
    assert "The claim (increase) is not tested." in screen(claim="increase").assumptions[0]


def test_only_a_screen_loads_the_library_of_designs() -> None:
    code = (
        "import sys, researcher.main, researcher.report.page, researcher.conduct\n"
        "from tests.fakes.specs import planned\n"
        "planned()\n"
        "sys.exit('pydoe' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


LEVELS = {"learning_rate": {"baseline": 1e-5, "levels": [2e-5, 4e-5, 8e-5]}}
BUNDLES = {"plain": {}, "hot": {"learning_rate": 4e-5, "temperature": 1.2}, "other": {"model": "lab/other"}}


def test_levels_of_one_factor_are_screened_as_they_are() -> None:
    plan = screen(compare=LEVELS)
    [stage] = plan.stages
    assert (stage.kind, stage.seeds, stage.max_seeds) == (StageKind.SCREEN, 2, 2)
    assert [arm.levels["learning_rate"] for arm in plan.arms] == [1e-5, 2e-5, 4e-5, 8e-5]
    assert [(each.baseline, each.treatment) for each in plan.hypotheses] == [
        ("learning_rate=1e-5", f"learning_rate={level}") for level in ("2e-5", "4e-5", "8e-5")
    ]
    assert all(each.direction_assumed and each.statement.endswith("(explored)") for each in plan.hypotheses)
    assert [branch.then for branch in plan.branches] == ["stop"]
    assert plan.budget.trials == 8
    assert "ranks the arms by how far they are from the first" in plan.assumptions[0]


def test_bundles_are_screened_their_models_too() -> None:
    plan = screen(compare={}, arms=BUNDLES, seeds={"min": 3})
    [stage] = plan.stages
    assert (stage.arms, stage.seeds) == (("plain", "hot", "other"), 3)
    assert [(each.factor, each.baseline, each.treatment) for each in plan.hypotheses] == [
        ("learning_rate + temperature", "plain", "hot"),
        ("model", "plain", "other"),
    ]
    assert plan.model_of("other").name == "lab/other"


RATES = (8e-5, 1e-5, 2e-5, 4e-5)


def trend(folder: InstrumentFolder = SIMULATION, levels: Sequence[float] = RATES, **changes: Any) -> Plan:
    return planned(folder, **{"design": "trend", "compare": {"learning_rate": {"levels": levels}}} | changes)


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
    with pytest.raises(PlanningRefused, match="needs at least 3 numeric levels of a factor, and model has none"):
        trend(compare={}, model=["lab/a", "lab/b", "lab/c"])


def test_zero_is_refused_on_a_log_scale() -> None:
    [rate, *others] = SIMULATION.instrument.factors
    factors = (rate.model_copy(update={"low": 0.0}), *others)
    with_zero = dataclasses.replace(
        SIMULATION, instrument=SIMULATION.instrument.model_copy(update={"factors": factors})
    )
    with pytest.raises(PlanningRefused, match="0 is not on the log scale of learning_rate"):
        trend(with_zero, compare={"learning_rate": {"levels": [0, 1e-5, 2e-5]}})
