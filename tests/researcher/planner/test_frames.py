"""What frames a question: times, numbering, others' work, what is left out; each is read as what it is, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from researcher.commands.look import plan_lines
from researcher.planner.graph import plan_study
from researcher.planner.matching import read
from researcher.planner.seam import PlanOptions
from researcher.refusals import PlanningRefused
from researcher.view import duration
from tests.contracts.planner_contract import ARITHMETIC
from tests.researcher.planner.test_topics import sides

HOUR_S = 3600.0
ASKED = "Is group size 16 better than 4 on sums?"


@pytest.mark.parametrize(
    ("said", "budget_s"),
    [
        ("Stop after 2 hours.", 2 * HOUR_S),
        ("Time limit: 3 hours", 3 * HOUR_S),
        ("End the study after 3 hours.", 3 * HOUR_S),
        ("Stop after 3 hours of wall time.", 3 * HOUR_S),
        ("stop after 3h", 3 * HOUR_S),
        ("I have one hour.", HOUR_S),
        ("Max 2 hours, 5 seeds", 2 * HOUR_S),
        ("Finish within half a day.", 12 * HOUR_S),
        ("(5 seeds, 20 steps, 2 h)", 2 * HOUR_S),
    ],
)
def test_a_time_is_the_studys_and_no_level(said: str, budget_s: float) -> None:
    reading = read(f"{ASKED} {said}", ARITHMETIC.instrument)
    assert (reading.factor.name, sides(reading), reading.budget_s) == ("group_size", ([16], [4]), budget_s)
    assert reading.metric.name == "heldout_accuracy"


@pytest.mark.parametrize(
    ("topic", "factor", "levels", "held"),
    [
        ("What LoRA alpha is best for rank 8: 8, 16 or 32?", "lora_alpha", {8, 16, 32}, {"lora_rank": 8}),
        ("Which group size works best with max tokens 8: 4, 8 or 16?", "group_size", {4, 8, 16}, {"max_tokens": 8}),
        ("Which group size is best at 16 tasks per step: 4, 8 or 16?", "group_size", {4, 8, 16}, {"tasks_per_step": 16}),
        ("Which KL weight is best at lr 1e-4: 0, 0.01 or 0.1?", "kl", {0.0, 0.01, 0.1}, {"learning_rate": 1e-4}),
        ("warmup 0, 2, 4 steps on sums", "warmup", {0, 2, 4}, {}),
        ("warmup of 1, 2 or 3 steps on sums", "warmup", {1, 2, 3}, {}),
        ("staleness 0, 1, 2 steps on sums", "max_staleness", {0, 1, 2}, {}),
        ("lr 4e-5 vs 1e-5 on sums, warmup 2, 20 steps", "learning_rate", {4e-5, 1e-5}, {"warmup": 2, "steps": 20}),
    ],
)  # fmt: skip
def test_a_list_belongs_to_what_is_asked_for(topic: str, factor: str, levels: set[Any], held: dict[str, Any]) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.factor.name, set(reading.levels)) == (factor, levels)
    assert {each.name: level for each, level in reading.settings} == held


@pytest.mark.parametrize(
    ("topic", "line"),
    [
        ("In the literature, learning rates of 1e-6 are common. Is lr 4e-5 better than 1e-5?", "speaks of other work"),
        ("Our previous run at lr 1e-5 for 50 steps gave an accuracy of 0.7. Is lr 4e-5 better than 1e-5?", "speaks of other work"),
        ("Other groups use PPO. Is lr 4e-5 better than 1e-5?", "speaks of other work"),
        ("Later we want to look at group size 16. Is lr 4e-5 better than 1e-5?", "speaks of other work"),
        ("Previously we used LoRA. Is lr 4e-5 better than 1e-5?", "speaks of other work"),
        ("A learning rate of 1e-3 is far too high. Is 4e-5 better than 1e-5?", "learning_rate=0.001 stands beside the question"),
        ("Is lr 4e-5 better than 1e-5? A rate of 1e-4 is known to collapse.", "learning_rate=1e-4 stands beside the question"),
    ],
)  # fmt: skip
def test_other_work_and_warnings_set_nothing_and_are_not_compared(topic: str, line: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.factor.name, sides(reading), reading.settings) == ("learning_rate", ([4e-5], [1e-5]), ())
    assert any(line in each for each in reading.assumptions)


def test_a_level_that_is_added_to_the_question_is_compared() -> None:
    reading = read("Is lr 4e-5 better than 1e-5 on sums? Also try 1e-4.", ARITHMETIC.instrument)
    assert set(reading.levels) == {4e-5, 1e-5, 1e-4}


def test_the_steps_at_which_something_was_seen_are_no_steps_of_the_trials() -> None:
    topic = "My runs collapse after about 20 steps. Does an entropy bonus of 0.01 give a higher final reward on sums than none? "
    reading = read(f"{topic} Train for 30 steps.", ARITHMETIC.instrument)
    assert {factor.name: level for factor, level in reading.settings} == {"steps": 30}


@pytest.mark.parametrize(
    "topic",
    [
        f"1. {ASKED} 2. Use 20 steps.",
        f"Step 1: Use 20 steps. Step 2: {ASKED}",
        f"Experiment 3: {ASKED} Use 20 steps (issue #42, section 3.2).",
        "Study 12. Is group size 16 better than 4 on sums (Shao et al. 2024)? Use 20 steps.",
        f"{ASKED} Use 20 steps, with evaluation at temperature 0.",
    ],
)
def test_numbering_and_references_are_no_levels(topic: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.factor.name, sides(reading)) == ("group_size", ([16], [4]))
    assert {factor.name: level for factor, level in reading.settings} == {"steps": 20}


@pytest.mark.parametrize(
    ("topic", "why"),
    [
        (f"{ASKED} Run for 10 minutes per trial.", "'10 minutes' is a time for each trial.*--budget"),
        (f"{ASKED} It should take about 3 hours.", "'3 hours' is a time.*--budget"),
        ("Use 500 steps and 10 minutes. Is lr 4e-5 better than 1e-5?", "'10 minutes' is a time"),
        (f"Use 64 held-out tasks. {ASKED}", "'64 held-out tasks' sets what is evaluated on"),
        (f"With the number of episodes per step fixed at 64, i{ASKED[1:]}", "at 64' fixes a product"),
        ("Keep tasks per step x group size at 64. Compare group sizes 4 and 16.", "at 64' fixes a product"),
        (f"{ASKED} Evaluate every 2 steps.", "every 2 steps' says how often"),
        (f"{ASKED} Checkpoint every 3 steps.", "every 3 steps' says how often"),
        ("Search learning rates from 1e-5 to 1e-4 in 4 steps", "number of levels between two"),
        ("Compare all algorithms but PPO on sums.", "leaves something out"),
        ("Compare all algorithms except DAPO and GSPO on sums.", "leaves something out"),
        ("Is any algorithm other than PPO better than GRPO?", "leaves something out"),
        ("Do not test 1e-4. Is lr 4e-5 better than 1e-5?", "not to be compared"),
        ("If lr 4e-5 beats 1e-5 on sums, then compare 4e-5 and 1e-4.", "on a condition"),
        ("Does lr 4e-5 beat 1e-5? If so, find the best between 1e-5 and 1e-4.", "on a condition"),
        ("Does evaluation temperature 0.7 beat 1.0 on sums?", "temperature of evaluation"),
        ("Does sampling at temperature 0.7 during evaluation improve accuracy?", "temperature of evaluation"),
        ("Is lr 4e-5 better than 1e-5 at alpha 0.05?", "level of significance"),
        ("Is lr 4e-5 better than 1e-5 (p < 0.05)?", "level of significance"),
        ("Is lr 4e-5 better than 1e-5 with 95% confidence?", "level of significance"),
        (f"{ASKED} Run from 22:00 to 07:00.", "--window"),
        ("Is lr 4e-5 as good as 1e-5 with a margin of 0.05?", "smallest effect of interest is fixed"),
        ("Is the accuracy of lr 4e-5 within 0.05 of 1e-5?", "smallest effect of interest is fixed"),
    ],
)
def test_what_no_plan_keeps_is_refused_by_name(topic: str, why: str) -> None:
    with pytest.raises(PlanningRefused, match=why):
        read(topic, ARITHMETIC.instrument)


@pytest.mark.parametrize(
    ("topic", "factor", "levels"),
    [
        ("Study 12 vs 4 rollouts on sums", "group_size", {12, 4}),
        ("Study 4, 8 and 16 rollouts on sums", "group_size", {4, 8, 16}),
        ("Is a max tokens of 16 better than 32 on sums (tasks per step 20)?", "max_tokens", {16, 32}),
        ("If a learning rate of 4e-5 is set, then which group size is best, 4 or 8?", "group_size", {4, 8}),
        ("Does a group size of 16 reach a reward of 0.5 in fewer steps than 4?", "group_size", {4, 16}),
    ],
)  # fmt: skip
def test_what_is_near_to_a_frame_is_none(topic: str, factor: str, levels: set[Any]) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.factor.name, set(reading.levels)) == (factor, levels)


def test_a_bound_of_seeds_may_leave_out_its_second_noun() -> None:
    reading = read(f"{ASKED} At least 4 seeds, at most 8.", ARITHMETIC.instrument)
    assert (reading.min_seeds, reading.max_seeds, sides(reading)) == (4, 8, ([16], [4]))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("said", "options", "line"),
    [
        ("Use 3 seeds.", PlanOptions(seeds=5), "The topic asks for 3 seeds, and --seeds 5 holds."),
        ("At most 10 hours.", PlanOptions(budget_s=HOUR_S), "The topic gives the study 10.0 h, and --budget, 60 min, holds."),
    ],
)  # fmt: skip
async def test_what_an_option_overrules_is_said(said: str, options: PlanOptions, line: str) -> None:
    plan = await plan_study(f"{ASKED} {said}", options, instruments=[ARITHMETIC])
    assert line in plan.assumptions


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("At least 6 seeds.", PlanOptions(seeds=5)),
        ("At most 4 seeds.", PlanOptions(seeds=5)),
        ("At most 1 hour.", PlanOptions(budget_s=10 * HOUR_S)),
    ],
)
async def test_an_option_that_breaks_a_bound_of_the_topic_is_refused(said: str, options: PlanOptions) -> None:
    with pytest.raises(PlanningRefused, match="contradicts the topic"):
        await plan_study(f"{ASKED} {said}", options, instruments=[ARITHMETIC])


@pytest.mark.anyio
async def test_the_price_that_is_shown_is_the_one_the_budget_is_held_against() -> None:
    topic = "Do 24 steps beat 6 steps on sums in accuracy?"
    with pytest.raises(PlanningRefused, match=r"give --budget (\d+)m") as refusal:
        await plan_study(topic, PlanOptions(budget_s=60), instruments=[ARITHMETIC])
    least_m = int(str(refusal.value).split("--budget ")[1].split("m")[0])
    plan = await plan_study(topic, PlanOptions(budget_s=least_m * 60), instruments=[ARITHMETIC])
    price = next(line for line in plan_lines(plan) if line.startswith("price"))
    short, long = ((plan.trial_s or 0) / 4, plan.trial_s or 0)
    assert f"trials of about {duration(short)} to {duration(long)}:" in price
