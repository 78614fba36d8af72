"""Arms that run the same share no seed; arms that differ share all of them, and their plans are what they were."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from pydantic import ValidationError

from researcher.analysis.race import due
from researcher.design.arms import with_own_seeds
from researcher.design.stages import LAST_SEED, with_seeds
from researcher.instruments.catalogue import open_instrument
from researcher.refusals import PlanningRefused
from researcher.study.plan import Arm, Plan
from swarm.protocol.runspec import RunSpec
from tests.fakes.specs import planned
from tests.fakes.study import study_plan

EQUAL: dict[str, Any] = {"compare": {"learning_rate": {"baseline": 4e-5, "levels": [4e-5]}}}
FACTORS = {factor.name: factor for factor in open_instrument("arithmetic", {}).instrument.factors}


def seeds(plan: Plan) -> dict[str, set[int]]:
    """All seeds that a plan may need, by arm."""
    found: dict[str, set[int]] = {arm.name: set() for arm in plan.arms}
    for stage in plan.stages:
        for arm in stage.arms:
            found[arm] |= {plan.seed_of(arm, stage, place) for place in range(stage.max_seeds)}
    return found


def disjoint(plan: Plan) -> bool:
    return all(not one & other for one, other in itertools.combinations(seeds(plan).values(), 2))


@pytest.mark.parametrize(
    "fields",
    [
        EQUAL,
        {"compare": {"learning_rate": {"levels": ["0.00004", 4e-5]}}},
        {"arms": {"usual": {}, "said": {"learning_rate": 4e-5}}},
    ],
)
@pytest.mark.parametrize("more", [{}, {"looks": 3}, {"seeds": {"min": 4, "max": 4}}, {"seeds": {"first": 1000}}])
def test_equal_arms_run_on_disjoint_seeds_that_the_plan_says(fields: dict[str, Any], more: dict[str, Any]) -> None:
    plan = planned(**fields, **more)
    assert disjoint(plan)
    assert plan == Plan.model_validate_json(plan.canonical())
    assert any("runs the same as" in line for line in plan.assumptions)
    stage = plan.stages[-1]
    pairs = due(plan, stage, stage.seeds, [])
    assert len({seed for _, seed in pairs}) == len(pairs) == 2 * stage.seeds


def test_arms_that_differ_share_their_seeds_and_their_plan_says_nothing_new() -> None:
    plan = planned()
    assert "seed_offset" not in plan.canonical()
    first, second = seeds(plan).values()
    assert first == second
    assert with_own_seeds(plan) == plan


@pytest.mark.parametrize(
    ("factor", "levels", "equal"),
    [
        ("schedule", ({}, {"schedule": "constant"}), True),  # the RunSpec's own default
        ("schedule", ({}, {"schedule": "cosine"}), False),
        ("digits", ({}, {"digits": 1}), True),  # the factor's default
        ("digits", ({}, {"digits": 2}), False),
    ],
)
def test_what_is_the_same_is_judged_on_what_runs(
    factor: str, levels: tuple[dict[str, int | str], dict[str, int | str]], equal: bool
) -> None:
    plan = study_plan(factors=(FACTORS[factor],))
    arms = tuple(Arm(name=arm.name, levels=own) for arm, own in zip(plan.arms, levels, strict=True))
    found = with_own_seeds(plan.model_copy(update={"arms": arms}))
    assert disjoint(found) is equal


def test_a_plan_that_is_amended_to_more_seeds_keeps_its_arms_apart() -> None:
    plan = planned(**EQUAL, seeds={"min": 3, "max": 3})
    more = with_own_seeds(plan.model_copy(update={"stages": with_seeds(plan.stages, 30)}))
    assert disjoint(more)
    assert more.assumptions == plan.assumptions


def test_seeds_that_no_run_takes_are_refused_for_the_last_arm_too() -> None:
    with pytest.raises(PlanningRefused, match="give --first-seed"):
        planned(**EQUAL, seeds={"min": 5, "max": 5, "first": LAST_SEED - 5})
    with pytest.raises(ValidationError):
        RunSpec(seed=RunSpec(seed=LAST_SEED).seed + 1)
