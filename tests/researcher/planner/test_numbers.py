"""Where a topic's numbers go: to a factor, to the number of seeds, to the length of a trial; or nowhere, and the topic is refused."""

from __future__ import annotations

from typing import Any

import pytest

from researcher.planner.matching import read
from researcher.refusals import PlanningRefused
from tests.contracts.planner_contract import ARITHMETIC
from tests.researcher.planner.test_topics import sides

PLACED = [
    ("group size on sums (4 vs 8)", "group_size", {4, 8}),
    ("Does learning rate matter for sums (1e-5 vs 4e-5)?", "learning_rate", {1e-5, 4e-5}),
    ("Does the temperature affect accuracy on sums (0.7, 1.0, 1.3)?", "temperature", {0.7, 1.0, 1.3}),
    ("Does a bigger group help GRPO on sums (4 vs 16)?", "group_size", {4, 16}),
    ("Does weight decay help (0.1)?", "weight_decay", {0.0, 0.1}),
    ("lr 4e-5 vs 1e-5 sums", "learning_rate", {1e-5, 4e-5}),
    ("lr=1e-5,2e-5,4e-5 sums auc", "learning_rate", {1e-5, 2e-5, 4e-5}),
    ("group size 4 vs 8 on sums. I expect 8 to be better.", "group_size", {4, 8}),
    ("group size 4 vs 8 on sums (8 should be better)", "group_size", {4, 8}),
    ("lr 1e-5 or 4e-5 on sums: I think 4e-5 learns faster", "learning_rate", {1e-5, 4e-5}),
    ("lr 1e-5 or 4e-5 on sums, expecting 4e-5 to win", "learning_rate", {1e-5, 4e-5}),
    ("digits 1 vs 2: how much harder is 2?", "digits", {1, 2}),
    ("group size 4 or 8 on sums? My guess is 8.", "group_size", {4, 8}),
    ("two vs. four epochs on sums", "epochs", {2, 4}),
    ("group sizes of two vs. eight", "group_size", {2, 8}),
    ("Does GRPO learn faster with eight vs. two rollouts?", "group_size", {2, 8}),
    ("two- vs. three-digit sums", "digits", {2, 3}),
    ("with two rather than eight rollouts, is accuracy lower?", "group_size", {2, 8}),
    ("two instead of eight rollouts", "group_size", {2, 8}),
    ("two group sizes, 4 and 8", "group_size", {4, 8}),
    ("Two algorithms, GRPO and RLOO: which learns faster?", "algorithm", {"grpo", "rloo"}),
    ("warmup 2 vs 5 steps on sums", "warmup", {2, 5}),
    ("Should warmup last 2 or 5 steps?", "warmup", {2, 5}),
    ("Does warmup help? (2 steps)", "warmup", {0, 2}),
    ("warmup of 0 or 3 steps", "warmup", {0, 3}),
    ("staleness of 1 vs 4 steps", "max_staleness", {1, 4}),
    ("staleness of 4 steps vs 0", "max_staleness", {0, 4}),
    ("Does training on data that is 2 steps old hurt?", "max_staleness", {0, 2}),
    ("a delay of 2 steps between sampling and training", "max_staleness", {0, 2}),
    ("off-policy data up to 4 steps old", "max_staleness", {0, 4}),
    ("Does reusing each batch for 4 epochs make GRPO learn sums faster?", "epochs", {1, 4}),
    ("4 epochs on each batch vs 1", "epochs", {1, 4}),
    ("a KL term of 0.05", "kl", {0.0, 0.05}),
    ("KL constraint (0.05) on sums", "kl", {0.0, 0.05}),
    ("fewest steps: group size 4, 8 or 16", "group_size", {4, 8, 16}),
    ("which of GRPO and RLOO takes the fewest steps", "algorithm", {"grpo", "rloo"}),
    ("Does a group size of 8 surpass 4?", "group_size", {4, 8}),
    ("compare 1e-5 with 4e-5 as learning rate", "learning_rate", {1e-5, 4e-5}),
    ("Does dropping std normalisation, as in Dr. GRPO, help?", "advantage_norm", {"none", "std"}),
    ("low-rank adapters vs full fine-tuning", "parameters", {"lora", "full"}),
]


@pytest.mark.parametrize(("topic", "factor", "levels"), PLACED)
def test_a_number_is_a_level_of_the_factor_that_is_meant(topic: str, factor: str, levels: set[Any]) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    treatments, baselines = sides(reading)
    assert (reading.factor.name, {*treatments, *baselines}) == (factor, levels)
    assert not reading.settings


@pytest.mark.parametrize(
    ("topic", "number"),
    [
        ("Does the group size matter with dropout (0.1 vs 0.3)?", "0.1"),
        ("lr 4e-5 vs 1e-5, 32 heads", "32"),
        ("group size 4 vs 8 on sums with dropout 8", "8"),
        ("group size 4 vs 8, 3 numbers", "3"),
    ],
)
def test_a_number_of_something_unknown_is_refused(topic: str, number: str) -> None:
    with pytest.raises(PlanningRefused, match=f"could be tied to '{number}'"):
        read(topic, ARITHMETIC.instrument)


@pytest.mark.parametrize(
    "said",
    [
        "(n=5)",
        "with n=5 per arm",
        ", n = 5 runs",
        ", 5 runs each",
        ", five runs per arm",
        ", 5 repeats",
        ", 5 replicates each",
        "averaged over 5 runs",
        ", run each 5 times",
        ", each arm is run five times",
    ],
)
def test_how_often_each_arm_is_run_is_the_number_of_seeds(said: str) -> None:
    reading = read(f"lr 4e-5 vs 1e-5 on sums {said}", ARITHMETIC.instrument)
    assert (reading.seeds, reading.settings) == (5, ())
    assert not any("play no part" in line for line in reading.assumptions)


@pytest.mark.parametrize("topic", ["lr 4e-5 vs 1e-5 on sums, N=8", "Compare 4 and 8 rollouts on sums with n=8"])
def test_an_n_that_may_count_seeds_or_a_group_is_refused(topic: str) -> None:
    with pytest.raises(PlanningRefused, match="write '8 seeds' or 'group size 8'"):
        read(topic, ARITHMETIC.instrument)


@pytest.mark.parametrize("topic", ["n=4 vs n=8 on sums", "Does n=8 beat n=4?", "RLOO with n=4, 8 on sums"])
def test_an_n_that_is_compared_is_the_group(topic: str) -> None:
    treatments, baselines = sides(read(topic, ARITHMETIC.instrument))
    assert {*treatments, *baselines} == {4, 8}


def test_the_steps_of_a_warmup_are_no_length_of_a_trial() -> None:
    reading = read("warmup 1 vs 3 steps, 10 steps in total", ARITHMETIC.instrument)
    assert (reading.factor.name, {factor.name: level for factor, level in reading.settings}) == (
        "warmup",
        {"steps": 10},
    )
    assert set(reading.levels) == {1, 3}


@pytest.mark.parametrize(
    "said", ["iterations", "updates", "policy updates", "RL steps", "gradient steps", "training rounds"]
)
def test_how_long_is_trained_has_many_names(said: str) -> None:
    reading = read(f"lr 4e-5 vs 1e-5 on sums, 10 {said}", ARITHMETIC.instrument)
    assert {factor.name: level for factor, level in reading.settings} == {"steps": 10}


@pytest.mark.parametrize(
    "said", ["in no more than 8 steps", ", no more than 8 steps", "with not more than 8 steps", "with at most 8 steps"]
)
def test_a_limit_of_steps_is_no_claim(said: str) -> None:
    reading = read(f"GRPO vs RLOO on sums {said}", ARITHMETIC.instrument)
    assert {factor.name: level for factor, level in reading.settings} == {"steps": 8}
    assert reading.direction_assumed
