"""One factor and then another: which topics ask for that, which are refused, and what is planned for them."""

from __future__ import annotations

from typing import Any

import pytest

from researcher.planner.graph import BuiltinPlanner
from researcher.planner.matching import read
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan
from swarm.protocol.runspec import LoraSpec, RunSpec
from tests.contracts.planner_contract import ARITHMETIC, request

RATIO, RANK, ALPHA, LR, GROUP, TEMP = (
    "lora_alpha_ratio",
    "lora_rank",
    "lora_alpha",
    "learning_rate",
    "group_size",
    "temperature",
)
RATES = "Which learning rate is best, 1e-5 or 4e-5"

# topic, first factor, its levels, second factor, its levels, at which it stands meanwhile; baselines first
ASKED: list[tuple[str, str, list[Any], str, list[Any], Any]] = [
    ("Which LoRA alpha is best, 16, 32 or 64, and then which LoRA rank, 8, 16 or 32?", ALPHA, [32, 16, 64], RANK, [16, 8, 32], 16),
    ("Find the best LoRA alpha/rank ratio (1, 2, 4) first, then the best rank (8, 16, 32), on one-digit sums", RATIO, [2, 1, 4], RANK, [16, 8, 32], 16),
    ("What is the best LoRA alpha/rank ratio, 1, 2 or 4, and after that, at the best ratio, which rank: 8, 16 or 32?", RATIO, [2, 1, 4], RANK, [16, 8, 32], 16),
    ("Find the best alpha to rank ratio among 1, 2 and 4, followed by the best rank among 8 and 32 with the best ratio", RATIO, [2, 1, 4], RANK, [8, 32], 16),
    ("Which ratio of alpha to rank is best, 1, 2 or 4, at rank 8, and then which rank, 8, 16 or 32?", RATIO, [2, 1, 4], RANK, [16, 8, 32], 8),
    (f"{RATES}, and then which group size, 4, 8 or 16?", LR, [4e-5, 1e-5], GROUP, [4, 8, 16], 4),
    ("First find the best learning rate (1e-5, 1e-4), then the best group size (4, 16) at that learning rate", LR, [1e-5, 1e-4], GROUP, [4, 16], 4),
    (f"{RATES}? Then which temperature: 0.7, 1.0?", LR, [4e-5, 1e-5], TEMP, [1.0, 0.7], 1.0),
    (f"{RATES}, next which group size, 4 or 8?", LR, [4e-5, 1e-5], GROUP, [4, 8], 4),
    ("First the best group size (4, 8), second the best temperature (0.7, 1.0)", GROUP, [4, 8], TEMP, [1.0, 0.7], 1.0),
    ("Compare 1e-5 and 4e-5 as learning rates first and then 4, 8 and 16 rollouts per prompt", LR, [4e-5, 1e-5], GROUP, [4, 8, 16], 4),
    ("First find which LoRA rank of 8, 16 and 32 learns fastest; then, with that rank, find the best alpha of 16 and 64.", RANK, [16, 8, 32], ALPHA, [16, 64], 32),
    ("Which algorithm is best, grpo or rloo, and then which learning rate, 1e-5 or 4e-5?", "algorithm", ["grpo", "rloo"], LR, [4e-5, 1e-5], 4e-5),
    ("First, with and without KL: which is better? Then which learning rate, 1e-5 or 4e-5?", "kl", [0.0, 0.1], LR, [4e-5, 1e-5], 4e-5),
    ("Which number of steps, 5 or 6, and thereafter which learning rate, 1e-5 or 4e-5?", "steps", [6, 5], LR, [4e-5, 1e-5], 4e-5),
]  # fmt: skip


@pytest.mark.parametrize(("topic", "first", "levels", "second", "following", "meanwhile"), ASKED)
def test_two_factors_in_sequence_keep_their_own_levels(
    topic: str, first: str, levels: list[Any], second: str, following: list[Any], meanwhile: object
) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.factor.name, list(reading.levels)) == (first, levels)
    assert reading.following is not None
    assert (reading.following.factor.name, list(reading.following.levels)) == (second, following)
    assert reading.following.meanwhile == meanwhile
    assert not any("no part in the plan" in line for line in reading.assumptions)


def test_metric_seeds_and_settings_are_those_of_both_comparisons() -> None:
    topic = (
        f"With a group size of 4, {RATES.lower()}, and then which temperature, 0.7 or 1.0, for accuracy with 3 seeds?"
    )
    reading = read(topic, ARITHMETIC.instrument)
    assert {factor.name: level for factor, level in reading.settings} == {GROUP: 4}
    assert (reading.metric.name, reading.seeds) == ("heldout_accuracy", 3)


@pytest.mark.parametrize(
    ("topic", "factor", "levels", "settings"),
    [
        ("Train for 10 steps, then evaluate: is a learning rate of 4e-5 better than 1e-5?", LR, {4e-5, 1e-5}, {"steps": 10}),
        ("If the learning rate is 4e-5, then which group size is best, 4 or 8?", GROUP, {4, 8}, {LR: 4e-5}),
        ("Is a learning rate of 4e-5 faster then one of 1e-5?", LR, {4e-5, 1e-5}, {}),
        ("Does a group size of 8 learn faster and then plateau at a lower final reward than one of 4?", GROUP, {4, 8}, {}),
        ("What alpha-to-rank ratio works best for LoRA: 1, 2 or 4?", RATIO, {1, 2, 4}, {}),
        ("Is a LoRA ratio of 0.5 better than 2?", RATIO, {0.5, 2}, {}),
        ("alpha/rank = 1/2/4: which is best?", RATIO, {1, 2, 4}, {}),
        ("LoRA rank 8 or 32 with an alpha / rank ratio of 2: which learns faster?", RANK, {8, 32}, {RATIO: 2}),
        ("Which alpha is best, 16, 32 or 64, at rank 8?", ALPHA, {16, 32, 64}, {RANK: 8}),
        ("Does the group size matter? Compare 4 and 8 with max tokens 16.", GROUP, {4, 8}, {"max_tokens": 16}),
        ("On two-digit sums, which of 2 or 4 is the best group size?", GROUP, {2, 4}, {"digits": 2}),
        ("Which alpha is best, 16, 32 or 64, for each rank?", ALPHA, {16, 32, 64}, {}),
    ],
)  # fmt: skip
def test_what_is_near_to_a_sequence_is_read_as_it_is_meant(
    topic: str, factor: str, levels: set[Any], settings: dict[str, Any]
) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert reading.following is None
    assert (reading.factor.name, set(reading.levels)) == (factor, levels)
    assert {each.name: level for each, level in reading.settings} == settings


@pytest.mark.parametrize(
    ("topic", "why"),
    [
        ("Which LoRA alpha is best, 16, 32 or 64, and which LoRA rank, 8, 16 or 32?", "lora_alpha and lora_rank together"),
        ("Which LoRA ratio is best, 4, 2 or 1. Which of 8 or 4 or 16 is the best batch size?", "lora_alpha_ratio and tasks_per_step together"),
        ("Compare LoRA rank 8, 4 or 16 before which of 32 or 16 or 64 is the best alpha", "lora_rank and lora_alpha together"),
        ("Which max tokens is best: 8, 16, 32 and at the best one is 4 or 8 the best batch size", "max_tokens and tasks_per_step together"),
        ("Find the best rank among 16 or 4 and the best alpha to rank ratio (1 or 0.5)", "lora_rank and lora_alpha_ratio together"),
        ("Find the best alpha (16, 32) before the best rank (8, 16)", "one after the other"),
        ("Which learning rate is best and then which group size?", "names no levels of it there"),
        ("Does lr 4e-5 do better than 1e-5, and then does a group size of 16 help?", "names one level of it there"),
        ("Which lr is best, 1e-5 or 4e-5, and then does LoRA help?", "names one level of it there"),
        (f"{RATES}, and then which group size?", "asks for group_size in a part of its own"),
        ("First 1e-5 or 4e-5 as the learning rate, then group size 4 or 8, then temperature 0.7 or 1.0", "3 comparisons"),
        ("Of learning rates 1e-5 and 4e-5 and group sizes 4 and 8, find first the best learning rate, then the best group size", "one part"),
        ("Compare learning rates 1e-5 and 4e-5, and then compare learning rates 1e-4 and 2e-4", "all of its levels at once"),
        (f"{RATES}, and then at a learning rate of 4e-5 which group size, 4 or 8?", "has to take what goes on"),
        (f"{RATES}, with a group size of 4, and then which temperature, 0.7 or 1.0, with a group size of 8?", "group_size to 4 and 8"),
        (f"{RATES}, for accuracy, and then which group size gives the lowest wall time, 4 or 8?", "one metric decides"),
        (f"{RATES} with 3 seeds, and then which group size, 4 or 8, with 5 seeds?", "different seeds"),
        ("Which learning rate hurts accuracy most, 1e-5 or 4e-5, and then which group size is worse, 4 or 8?", "asks for what is worse"),
        ("Do a learning rate of 1e-5 or 4e-5 and then a group size of 4 or 8 interact?", "an interaction"),
        ("Find the best alpha/rank ratio from 1, 2, 4, 8 and 16, then the best rank from 8, 16 and 32", "4 levels of a factor"),
        ("Is an alpha/rank ratio of 1:1, 2:1 or 4:1 best?", "'1:1' may be one level"),
        ("Is an alpha/rank ratio of 1/2, 1 or 2 best?", "'1/2' may be one level"),
    ],
)  # fmt: skip
def test_what_is_asked_by_half_is_refused(topic: str, why: str) -> None:
    with pytest.raises(PlanningRefused, match=why):
        read(topic, ARITHMETIC.instrument)


async def planned(topic: str = ASKED[1][0], **options: object) -> Plan:
    return await BuiltinPlanner().plan(request(topic, **options))


@pytest.mark.anyio
async def test_all_that_may_run_is_frozen_and_the_second_comparison_has_fresh_seeds() -> None:
    plan = await planned()
    floor, first, *second = plan.stages
    assert [stage.id for stage in second] == [f"compare-lora_rank-at-lora_alpha_ratio={ratio}" for ratio in (2, 1, 4)]
    assert floor.arms == first.arms[:1] == ("lora_alpha_ratio=2,lora_rank=16",)
    assert floor.first_seed == first.first_seed == 0
    assert {stage.first_seed for stage in second} == {first.max_seeds}
    assert set(plan.alternatives(second[0].id)) == {stage.id for stage in second}
    assert plan.alternatives(first.id) == (first.id,)
    for arm in plan.arms:
        spec = RunSpec.model_validate(
            plan.run_fields({factor.target: arm.levels[factor.name] for factor in plan.factors})
        )
        assert isinstance(spec.parameters, LoraSpec)
        assert spec.parameters.alpha / spec.parameters.rank == arm.levels["lora_alpha_ratio"]


@pytest.mark.anyio
async def test_the_price_counts_one_of_the_second_comparisons_and_that_the_dearest() -> None:
    plan = await planned(seeds=3)
    assert plan.budget.trials == 3 * 3 + 3 * 3
    longer = await planned("Which number of steps, 6 or 30, and then which learning rate, 1e-5 or 4e-5?", seeds=3)
    each = ARITHMETIC.instrument.defaults.trial_s  # of a trial with six steps
    least = 3 * (each + 5 * each) + 3 * 2 * 5 * each
    assert longer.trial_s == 5 * each
    with pytest.raises(PlanningRefused, match=f"^12 trials take about {least / 60:.0f} min"):
        await planned(longer.question, seeds=3, budget_s=600.0)


@pytest.mark.anyio
async def test_more_seeds_for_a_larger_budget_leave_the_second_comparison_fresh_ones() -> None:
    for options in ({"budget_s": 36_000.0}, {"budget_s": 2_400.0}, {"first_seed": 1000}):
        plan = await planned(**options)
        _, first, *second = plan.stages
        assert first.first_seed == options.get("first_seed", 0)
        assert {stage.first_seed for stage in second} == {first.first_seed + first.max_seeds}


@pytest.mark.anyio
@pytest.mark.parametrize(("options", "why"), [({"looks": 2}, "--looks"), ({"fine": 2}, "--fine")])
async def test_a_sequence_has_no_looks_and_no_fine_stage(options: dict[str, int], why: str) -> None:
    with pytest.raises(PlanningRefused, match=why):
        await planned(**options)
