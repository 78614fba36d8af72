"""Designs beyond two arms: how they are laid out in stages, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from researcher.refusals import PlanningRefused
from swarm.protocol.runspec import LoraSpec, RunSpec
from tests.fakes.specs import planned

MANY = {"compare": {"learning_rate": {"baseline": 1e-5, "levels": [2e-5, 4e-5, 8e-5, 1e-4, 2e-4, 4e-4]}}}
RATES = {"learning_rate": {"baseline": 1e-5, "levels": [4e-5]}}
SIZES = {"group_size": {"baseline": 4, "levels": [8]}}
TOGETHER: dict[str, Any] = {"compare": {**RATES, **SIZES}, "design": "factorial"}
BALANCE: dict[str, Any] = {
    "compare": {"group_size": {"levels": [16, 4, 8]}},
    "design": "balance",
    "metric": "final_reward",
}
RATIO_THEN_RANK: dict[str, Any] = {
    "compare": {
        "lora_alpha_ratio": {"levels": [1, 2, 4]},
        "lora_rank": {"levels": [8, 16, 32]},
    },
    "design": "sequence",
}


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, ["noise_floor", "compare"]),
        (MANY, ["noise_floor", "compare"]),
        ({**MANY, "design": "race"}, ["noise_floor", "coarse", "coarse", "coarse", "confirm"]),
        ({**MANY, "design": "race", "fine": 2}, ["noise_floor", *["coarse"] * 3, "fine", "confirm"]),
        ({"fine": 2}, ["noise_floor", "compare", "fine", "confirm"]),
        ({"arms": {"a": {}, "b": {"kl": 0.1}, "c": {"kl": 0.2}}, "design": "race"}, ["noise_floor", "coarse", "confirm"]),
    ],
)  # fmt: skip
def test_only_a_race_is_raced_however_many_arms_there_are(fields: dict[str, Any], kinds: list[str]) -> None:
    assert [stage.kind for stage in planned(**fields).stages] == kinds


def test_noise_is_measured_on_an_arm_that_trains() -> None:
    plan = planned(compare={"learning_rate": {"baseline": 0.0, "levels": [4e-5]}}, claim="increase")
    assert [plan.arm(name).levels for name in plan.stages[0].arms] == [{"learning_rate": 4e-5}]
    assert plan.arm(plan.hypotheses[0].baseline).levels == {"learning_rate": 0.0}


@pytest.mark.parametrize("fields", [{}, TOGETHER, {"compare": {"algorithm": {"levels": ["rloo"]}}}])
def test_what_is_compared_may_be_looked_at_several_times(fields: dict[str, Any]) -> None:
    plan = planned(**fields, looks=2)
    assert [(stage.id, stage.share) for stage in plan.stages] == [
        ("noise-floor", None),
        ("look-1", 0.5),
        ("look-2", 1.0),
    ]
    assert sum(stage.spends or 0.0 for stage in plan.stages) == pytest.approx(0.05)
    assert plan.merged_looks


def test_a_fine_stage_tries_levels_between_and_confirms_the_best_against_the_baseline() -> None:
    plan = planned(fine=2)
    compared, fine, confirmed = plan.stages[1:]
    assert compared.arms == ("learning_rate=1e-5", "learning_rate=4e-5")
    assert not set(compared.arms) & set(fine.arms)
    assert set(confirmed.arms) == {"learning_rate=1e-5", *fine.arms}
    assert confirmed.first_seed >= max(stage.first_seed + stage.max_seeds for stage in plan.stages[:-1])
    levels = [arm.levels["learning_rate"] for arm in plan.arms]
    assert (min(levels), max(levels), len(set(levels))) == (1e-5, 4e-5, 5)
    assert {each.baseline for each in plan.hypotheses} == {"learning_rate=1e-5"}
    assert [each.treatment for each in plan.hypotheses] == ["learning_rate=4e-5", *fine.arms]
    assert [each.id for each in plan.hypotheses] == [f"H{number}" for number, _ in enumerate(plan.hypotheses, start=1)]


def test_an_interaction_is_asked_over_all_combinations() -> None:
    plan = planned(**TOGETHER, set={"digits": 2})
    assert len(plan.arms) == 4
    assert set(plan.stages[-1].arms) == {arm.name for arm in plan.arms}
    assert plan.task["digits"] == 2
    interaction = plan.hypotheses[-1]
    assert (interaction.factor, interaction.direction_assumed) == ("learning_rate x group_size", True)
    same = {arm.name for arm in plan.arms if (arm.levels["learning_rate"] == 4e-5) == (arm.levels["group_size"] == 8)}
    assert set(interaction.treatments) == same


def test_the_best_balance_is_the_smallest_level_that_no_larger_one_exceeds() -> None:
    plan = planned(**BALANCE)
    small, middle, large = (f"group_size={size}" for size in (4, 8, 16))
    assert [arm.name for arm in plan.arms] == [small, middle, large]
    assert [(each.treatment, each.baseline) for each in plan.hypotheses] == [(middle, small), (large, middle)]
    best = {
        " ".join(branch.when.relations): branch.reason.split(" is the best balance")[0]
        for branch in plan.branches
        if branch.when.kind == "order"
    }
    assert best == {
        "≪ ≪": large, "≪ ≈": middle, "≪ ≫": middle, "≈ ≪": large, "≈ ≈": small, "≈ ≫": small, "≫ ≈": small, "≫ ≫": small,
    }  # fmt: skip
    assert plan.branches[-1].when.kind == "always"
    assert any("wall_s is reported beside it" in line for line in plan.assumptions)


def test_where_less_is_better_the_orders_are_turned() -> None:
    plan = planned(**{**BALANCE, "compare": SIZES, "metric": "steps_to_threshold"})
    [hypothesis] = plan.hypotheses
    assert (hypothesis.metric, hypothesis.direction) == ("steps_to_threshold", "decrease")
    best = {branch.when.relations: branch.reason for branch in plan.branches if branch.when.kind == "order"}
    assert best["≫",].startswith("group_size=8 is the best balance: group_size=4 ≫ group_size=8")
    assert best["≈",].startswith("group_size=4")


def test_each_arm_may_have_steps_of_its_own_but_not_for_steps_until_a_threshold() -> None:
    steps: dict[str, Any] = {"compare": {"steps": {"levels": [5, 15, 25]}}}
    plan = planned(**steps, design="balance")
    assert [plan.steps_of(arm.name) for arm in plan.arms] == [5, 15, 25]
    with pytest.raises(PlanningRefused, match=r"^metric: .* cannot compare arms that differ in steps") as refused:
        planned(**steps, metric="steps_to_threshold")
    assert refused.value.nearest
    assert "steps_to_threshold" not in refused.value.nearest
    assert planned(metric="steps_to_threshold", steps=20).steps == 20


def test_all_that_a_sequence_may_run_is_frozen_and_its_second_comparison_has_fresh_seeds() -> None:
    plan = planned(**RATIO_THEN_RANK)
    floor, first, *second = plan.stages
    assert [stage.id for stage in second] == [f"compare-lora_rank-at-lora_alpha_ratio={ratio}" for ratio in (1, 2, 4)]
    assert floor.arms == first.arms[:1] == ("lora_alpha_ratio=1,lora_rank=8",)
    assert floor.first_seed == first.first_seed == 0
    assert {stage.first_seed for stage in second} == {first.max_seeds}
    assert set(plan.alternatives(second[0].id)) == {stage.id for stage in second}
    assert plan.alternatives(first.id) == (first.id,)
    for arm in plan.arms:
        parameters = RunSpec.model_validate(plan.run_fields(plan.levels_of(arm))).parameters
        assert isinstance(parameters, LoraSpec)
        assert parameters.alpha / parameters.rank == arm.levels["lora_alpha_ratio"]


@pytest.mark.parametrize(
    ("more", "start"), [({"budget": {"wall": 36_000}}, 0), ({"budget": {"wall": 2_400}}, 0), ({"seeds": {"first": 9}}, 9)]
)  # fmt: skip
def test_a_second_comparison_has_fresh_seeds_under_any_budget(more: dict[str, Any], start: int) -> None:
    _, first, *second = planned(**RATIO_THEN_RANK, **more).stages
    assert first.first_seed == start
    assert {stage.first_seed for stage in second} == {start + first.max_seeds}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"compare": {"algorithm": {"levels": ["rloo"]}}, "fine": 3}, "^fine: algorithm has no values between the compared levels"),
        ({"compare": {"group_size": {"levels": [7, 8]}}, "fine": 3}, "^fine: group_size has no values between the compared levels"),
        ({"compare": {"algorithm": {"levels": ["rloo"]}}, "design": "balance"}, "^design: .* numeric levels of a factor"),
        ({"compare": SIZES, "design": "balance", "metric": "wall_s"}, "^design: a balance weighs a gain against a cost"),
    ],
)  # fmt: skip
def test_what_a_layout_cannot_have_is_refused_by_its_field(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanningRefused, match=why):
        planned(**fields)


def test_more_factors_are_crossed_in_a_half_fraction() -> None:
    levels = {"digits": (1, 2), "group_size": (4, 8), "epochs": (1, 2), "kl": (0.0, 0.1), "temperature": (0.7, 1.0)}
    compare = {name: {"baseline": low, "levels": [high]} for name, (low, high) in levels.items()}
    plan = planned(compare=compare, design="factorial")
    assert len(plan.arms) == 16
    for one, other in itertools.combinations(plan.hypotheses[:5], 2):
        assert len(set(one.treatments) & set(other.treatments)) == 4
    del compare["temperature"]
    found = planned(compare=compare, design="factorial").hypotheses  # main effects alone
    assert [hypothesis.factor for hypothesis in found] == list(compare)
    assert all(len(h.baselines) == len(h.treatments) == 4 and not set(h.baselines) & set(h.treatments) for h in found)
