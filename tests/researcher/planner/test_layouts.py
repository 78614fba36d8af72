"""Designs beyond two arms, from the topic to what they cost."""

from __future__ import annotations

import itertools
from math import prod

import pytest
from pydantic import ValidationError

from researcher.analysis.decide import decide
from researcher.design.arms import arms_of, hypotheses_of, runs
from researcher.design.reading import Crossed, Reading
from researcher.design.stages import LAST_SEED
from researcher.instruments.instrument import Factor, Metric
from researcher.planner.graph import BuiltinPlanner
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan
from swarm.protocol.runspec import RunSpec
from tests.contracts.planner_contract import TOPIC, request
from tests.fakes.study import trials_with

pytestmark = pytest.mark.anyio

MANY = "Does a learning rate of 2e-5, 4e-5, 8e-5, 1e-4, 2e-4 or 4e-4 learn faster than 1e-5?"
TOGETHER = "Do a learning rate of 1e-5 or 4e-5 and a group size of 4 or 8 interact?"


async def planned(topic: str = TOPIC, **options: object) -> Plan:
    return await BuiltinPlanner().plan(request(topic, **options))


async def test_many_arms_race_and_few_are_all_compared() -> None:
    assert [stage.kind for stage in (await planned(MANY)).stages] == [
        "noise_floor",
        "coarse",
        "coarse",
        "coarse",
        "confirm",
    ]
    few = await planned("Does a learning rate of 2e-5, 4e-5 or 8e-5 learn faster than 1e-5?")
    assert [stage.kind for stage in few.stages] == ["noise_floor", "compare"]


async def test_noise_is_measured_on_an_arm_that_trains() -> None:
    made = await planned("Does GRPO improve accuracy?")
    assert [made.arm(name).levels for name in made.stages[0].arms] == [{"learning_rate": 4e-5}]
    (hypothesis,) = made.hypotheses
    assert made.arm(hypothesis.baselines[0]).levels == {"learning_rate": 0.0}


async def test_the_price_of_a_race_counts_each_trial_once() -> None:
    plan = await planned(MANY, seeds=3)
    # floor 3; six arms on 2 seeds; three on 2 more; two on 4 more; baseline and winner on 3 fresh ones.
    least = 3 + 6 * 2 + 3 * 2 + 2 * 4 + 2 * 3
    with pytest.raises(PlanningRefused, match=f"^{least} trials take"):
        await planned(MANY, seeds=3, budget_s=60.0)
    assert plan.budget.trials > least


async def test_looks_and_a_fine_stage_are_laid_out_where_they_are_asked_for() -> None:
    looked = await planned(looks=2)
    assert [(stage.id, stage.share) for stage in looked.stages] == [
        ("noise-floor", None),
        ("look-1", 0.5),
        ("look-2", 1.0),
    ]
    assert sum(stage.spends or 0.0 for stage in looked.stages) == pytest.approx(0.05)
    fine = await planned(fine=2)
    assert [stage.kind for stage in fine.stages] == ["noise_floor", "compare", "fine", "confirm"]
    assert fine.stages[1].arms == ("learning_rate=1e-5", "learning_rate=1e-4")
    assert not set(fine.stages[1].arms[1:]) & set(fine.stages[-1].arms)
    levels = [arm.levels["learning_rate"] for arm in fine.arms]
    assert min(levels) == 1e-5
    assert max(levels) == 1e-4
    assert len(levels) == len(set(levels)) == 5
    for wrong in ({"looks": 0}, {"looks": 9}, {"fine": -1}):
        with pytest.raises(ValueError, match="must be"):
            await planned(**wrong)


async def test_hypotheses_of_a_fine_stage_name_their_own_arm_and_the_baseline() -> None:
    """Also where the baseline's name begins with that of the first treatment."""
    plan = await planned("Does a group size of 4 give better accuracy than a group size of 48?", fine=3)
    assert len(plan.hypotheses) > 1
    assert {each.baseline for each in plan.hypotheses} == {"group_size=48"}
    assert len({each.treatment for each in plan.hypotheses}) == len(plan.hypotheses)
    assert [each.id for each in plan.hypotheses] == [f"H{number}" for number, _ in enumerate(plan.hypotheses, start=1)]
    for each in plan.hypotheses:
        assert each.statement == f"{each.treatment} has a higher heldout_accuracy than group_size=48"


async def test_an_interaction_is_asked_over_all_combinations() -> None:
    plan = await planned(TOGETHER)
    assert len(plan.arms) == 4
    assert set(plan.stages[-1].arms) == {arm.name for arm in plan.arms}
    interaction = plan.hypotheses[-1]
    assert interaction.factor == "learning_rate x group_size"
    same = {arm.name for arm in plan.arms if (arm.levels["learning_rate"] == 4e-5) == (arm.levels["group_size"] == 8)}
    assert set(interaction.treatments) == same


async def test_what_has_one_level_is_the_scene_of_an_interaction() -> None:
    plan = await planned("Do learning rate (1e-5 or 4e-5) and group size (4 or 8) interact on two-digit sums?")
    assert [factor.name for factor in plan.factors] == ["learning_rate", "group_size"]
    assert plan.task["digits"] == 2


async def test_an_interaction_without_two_levels_each_is_refused_with_an_example() -> None:
    with pytest.raises(PlanningRefused, match="two levels"):
        await planned("Do learning rate and group size interact?")


@pytest.mark.parametrize("factors", [2, 3, 4, 5])
def test_designs_are_balanced_and_their_contrasts_independent(factors: int) -> None:
    design = runs(factors)
    assert len(design) == (2**factors if factors <= 3 else 2 ** (factors - 1))
    effects = [[run[place] for run in design] for place in range(factors)]
    assert all(sum(signs) == 0 for signs in effects)
    for one, other in itertools.combinations(effects, 2):
        assert sum(a * b for a, b in zip(one, other, strict=True)) == 0
    if factors > 3:
        assert all(prod(run) == 1 for run in design)


def test_hypotheses_of_a_half_fraction_of_four_are_main_effects_alone() -> None:
    crossed = tuple(
        Crossed(factor=Factor(name=name, target=f"task.{name}", type="int", default=1), levels=(1, 2))
        for name in "abcd"
    )
    metric = Metric(name="m", kind="final_reward", margin=0.1)
    reading = Reading(
        factor=crossed[0].factor, levels=(), pairs=(), crossed=crossed, metric=metric, direction="increase"
    )
    arms = arms_of(reading)
    found = hypotheses_of(reading, arms)
    assert [hypothesis.factor for hypothesis in found] == list("abcd")
    assert all(len(h.baselines) == len(h.treatments) == 4 and not set(h.baselines) & set(h.treatments) for h in found)


BALANCE = "Which group size, 16, 4 or 8, gives the best balance of accuracy and time?"


async def test_the_best_balance_is_the_smallest_level_that_no_larger_one_exceeds() -> None:
    plan = await planned(BALANCE)
    assert [arm.levels["group_size"] for arm in plan.arms] == [4, 8, 16]
    assert [(each.treatment, each.baseline) for each in plan.hypotheses] == [
        ("group_size=8", "group_size=4"),
        ("group_size=16", "group_size=8"),
    ]
    assert {each.metric for each in plan.hypotheses} == {"heldout_accuracy"}
    best = {
        " ".join(branch.when.relations): branch.reason.split(" is the best balance")[0]
        for branch in plan.branches
        if branch.when.kind == "order"
    }
    small, middle, large = (f"group_size={size}" for size in (4, 8, 16))
    assert best == {
        "≪ ≪": large,
        "≪ ≈": middle,
        "≪ ≫": middle,
        "≈ ≪": large,
        "≈ ≈": small,
        "≈ ≫": small,
        "≫ ≈": small,
        "≫ ≫": small,
    }
    assert plan.branches[-1].when.kind == "always"
    assert any("wall_s is reported beside it" in line for line in plan.assumptions)


async def test_each_arm_may_have_steps_of_its_own() -> None:
    plan = await planned("Which number of training steps, 5, 15 or 25, gives the best balance of accuracy and time?")
    assert [plan.steps_of(arm.name) for arm in plan.arms] == [5, 15, 25]
    alike = await planned()
    assert {alike.steps_of(arm.name) for arm in alike.arms} == {alike.steps}


async def test_arms_of_different_lengths_are_not_compared_by_steps_to_a_threshold() -> None:
    with pytest.raises(PlanningRefused, match="cannot compare arms that differ in steps") as refused:
        await planned("Does training with 20 steps need fewer steps to threshold than with 5 steps?")
    assert "steps_to_threshold" not in refused.value.nearest
    assert refused.value.nearest
    same = await planned("Does a learning rate of 4e-5 need fewer steps to threshold than 1e-5, with 20 steps?")
    assert (same.steps, same.hypotheses[0].metric) == (20, "steps_to_threshold")


async def test_where_less_is_better_the_orders_are_turned() -> None:
    plan = await planned("Which group size, 4 or 8, is the best compromise between steps to threshold and wall time?")
    [hypothesis] = plan.hypotheses
    assert (hypothesis.metric, hypothesis.direction) == ("steps_to_threshold", "decrease")
    best = {branch.when.relations: branch.reason for branch in plan.branches if branch.when.kind == "order"}
    assert best["≫",].startswith("group_size=8 is the best balance: group_size=4 ≫ group_size=8")
    assert best["≈",].startswith("group_size=4")


@pytest.mark.parametrize(
    ("topic", "why"),
    [
        ("Which algorithm, grpo or rloo, is the best trade-off between accuracy and time?", "levels of one number"),
        (
            "Is a group size of 2, 4, 8, 16 or 32 the best balance of accuracy and time?",
            "4 levels of group_size at the most",
        ),
    ],
)
async def test_a_balance_that_cannot_be_told_is_refused(topic: str, why: str) -> None:
    with pytest.raises(PlanningRefused, match=why):
        await planned(topic)


async def test_a_balance_is_decided_by_the_orders_that_hold() -> None:
    plan = await planned(BALANCE.replace("accuracy", "final reward"))
    lines = {"group_size=4": 0.2, "group_size=8": 0.6, "group_size=16": 0.61}
    noise = (-0.005, 0.0, 0.005)
    decision = decide(
        plan, "compare", trials_with(plan, {arm: [mean + e for e in noise] for arm, mean in lines.items()})
    )
    assert (decision.action, decision.by_plan) == ("stop", True)
    assert decision.reason == (
        "group_size=8 is the best balance: group_size=4 ≪ group_size=8 ≈ group_size=16 on final_reward"
    )
    lines["group_size=16"] = 0.66
    noise = (-0.1, 0.0, 0.1)
    decision = decide(
        plan, "compare", trials_with(plan, {arm: [mean + e for e in noise] for arm, mean in lines.items()})
    )
    assert decision.reason == "every planned trial has ended"


def test_the_last_seed_is_the_greatest_that_a_run_takes() -> None:
    assert RunSpec(seed=LAST_SEED).seed == LAST_SEED
    with pytest.raises(ValidationError):
        RunSpec(seed=LAST_SEED + 1)


@pytest.mark.parametrize(
    ("topic", "options", "why"),
    [
        (MANY, {"looks": 3}, "a race has no looks: leave out --looks"),
        (TOPIC, {"looks": 5, "fine": 3}, "no looks: leave out --looks or --fine"),
        ("Does RLOO learn faster than GRPO?", {"fine": 3}, "algorithm has no levels between .* leave out --fine"),
        (TOGETHER, {"fine": 3}, "an interaction has no fine stage: leave out --fine"),
        (BALANCE, {"fine": 3}, "best balance .* without a fine stage: leave out --fine"),
        (
            "Does a group size of 8 learn faster than 7?",
            {"fine": 3},
            "group_size has no levels between .* leave out --fine",
        ),
    ],
)
async def test_what_a_layout_cannot_have_is_refused_with_what_to_leave_out(
    topic: str, options: dict[str, int], why: str
) -> None:
    with pytest.raises(PlanningRefused, match=why):
        await planned(topic, **options)
    assert (await planned(topic)).stages


async def test_what_is_compared_may_be_looked_at_several_times() -> None:
    for topic in (TOGETHER, "Does RLOO learn faster than GRPO?"):
        assert [stage.id for stage in (await planned(topic, looks=2)).stages] == ["noise-floor", "look-1", "look-2"]
