"""Topics that set what was seen against a question, one claim against another, and what is there against what is not."""

from __future__ import annotations

from typing import Any

import pytest

from researcher.planner.matching import read
from researcher.refusals import PlanningRefused
from tests.contracts.planner_contract import ARITHMETIC, KITCHEN
from tests.researcher.planner.test_topics import ACC, AUC, DOWN, REWARD, UP, refusal, sides


@pytest.mark.parametrize(
    ("topic", "treatments", "baselines", "metric"),
    [
        ("If accuracy was flat with lr 1e-5, would it rise with 1e-4?", [1e-4], [1e-5], ACC),
        ("If the reward collapsed with lr 1e-3, would 1e-4 learn faster?", [1e-4], [1e-3], AUC),
        ("With temperature 0.7 we get good results now, does 1.0 give higher accuracy?", [1.0], [0.7], ACC),
        ("With lr 1e-5 accuracy plateaued, does 1e-4 do better?", [1e-4], [1e-5], ACC),
        ("At a group size of 4 we see noisy rewards, would 16 reach a higher reward?", [16], [4], REWARD),
    ],
)
def test_what_was_seen_is_the_baseline(topic: str, treatments: list[Any], baselines: list[Any], metric: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (*sides(reading), reading.metric.name, reading.direction) == (treatments, baselines, metric, UP)
    assert not reading.direction_assumed


@pytest.mark.parametrize(
    ("topic", "treatments", "baselines"),
    [
        ("If lr was 1e-4 rather than 1e-5, would accuracy rise?", [1e-4], [1e-5]),
        ("If the group size were 16, would accuracy be higher than with 4?", [16], [4]),
        ("If the group size was raised to 16, would accuracy be higher?", [16], [4]),
    ],
)
def test_what_is_only_supposed_is_the_treatment(topic: str, treatments: list[Any], baselines: list[Any]) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (*sides(reading), reading.metric.name, reading.direction) == (treatments, baselines, ACC, UP)


@pytest.mark.parametrize(
    "topic",
    [
        "Is a group size of 16 faster, but not more accurate than 4?",
        "RLOO is faster but not more accurate than GRPO",
        "Does RLOO learn faster but reach no higher accuracy than GRPO?",
        "Does RLOO learn faster without being more accurate than GRPO?",
        "Is RLOO more accurate but not slower than GRPO?",
        "Is RLOO faster and not more accurate than GRPO?",
        "Is RLOO not faster but more accurate than GRPO?",
    ],
)
def test_a_claim_and_a_denied_one_are_two(topic: str) -> None:
    with pytest.raises(PlanningRefused, match="two claims, one of them with a 'no' or 'not'"):
        read(topic, ARITHMETIC.instrument)


@pytest.mark.parametrize(
    "topic",
    [
        "Is a group size of 16 more accurate but slower than 4?",
        "Is a group size of 16 faster but less accurate than 4?",
        "Is RLOO more accurate, although slower, than GRPO?",
        "Is RLOO slower yet more accurate than GRPO?",
    ],
)
def test_claims_that_are_set_against_each_other_are_two(topic: str) -> None:
    with pytest.raises(PlanningRefused, match="two claims"):
        read(topic, ARITHMETIC.instrument)


@pytest.mark.parametrize(
    "topic",
    [
        "Is a group size of 16 not only faster but also more accurate than 4?",
        "Is a group size of 16 not just faster, but more accurate than 4?",
    ],
)
def test_not_only_denies_nothing(topic: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (*sides(reading), reading.metric.name, reading.direction) == ([16], [4], ACC, UP)
    assert not any("'not'" in line for line in reading.assumptions)


@pytest.mark.parametrize(
    "said", ["adding or removing", "removing or adding", "adding or dropping", "including or omitting"]
)
def test_adding_or_removing_is_with_against_without(said: str) -> None:
    for topic in (f"Does {said} a KL penalty change accuracy?", f"Does {said} a KL penalty improve accuracy?"):
        reading = read(topic, ARITHMETIC.instrument)
        assert (reading.factor.name, *sides(reading)) == ("kl", [0.1], [0.0])
        assert (reading.metric.name, reading.direction_assumed) == (ACC, True)


@pytest.mark.parametrize(
    ("topic", "treatments", "baselines"),
    [
        ("Is accuracy higher than with GRPO, and higher than with PPO, when using RLOO?", ["rloo"], ["grpo", "ppo"]),
        ("Is accuracy higher than with GRPO when using RLOO?", ["rloo"], ["grpo"]),
        ("Is accuracy higher than at lr 1e-5 if we use 1e-4?", [1e-4], [1e-5]),
        ("Is accuracy higher than with GRPO or PPO when using RLOO?", ["rloo"], ["grpo", "ppo"]),
        ("Does accuracy improve when going beyond 4 rollouts per prompt, e.g. 16?", [16], [4]),
        ("Does accuracy improve when going above a temperature of 1.0, e.g. 1.3?", [1.3], [1.0]),
    ],
)
def test_the_baseline_may_come_first(topic: str, treatments: list[Any], baselines: list[Any]) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (*sides(reading), reading.metric.name, reading.direction) == (treatments, baselines, ACC, UP)


def test_a_share_of_the_time_is_less_of_it() -> None:
    for said in ("in half the time", "in a third of the time", "in half the wall time", "in 50% of the time"):
        reading = read(f"Does a group size of 16 reach higher accuracy than 4 {said}?", ARITHMETIC.instrument)
        assert (*sides(reading), reading.metric.name, reading.direction) == ([16], [4], ACC, UP)
        assert "heldout_accuracy decides; wall_s is reported beside it." in reading.assumptions
        assert f"{said!r} is read as in less time, whatever its size." in reading.assumptions
        with pytest.raises(PlanningRefused, match="a study tests one of them"):
            read(f"Does a group size of 16 reach the same accuracy as 4 {said}?", ARITHMETIC.instrument)


def test_a_share_of_the_time_of_another_level_is_less_than_it_takes() -> None:
    reading = read("Does a group size of 4 train in half the time of 16?", ARITHMETIC.instrument)
    assert (*sides(reading), reading.metric.name, reading.direction) == ([4], [16], "wall_s", "decrease")


@pytest.mark.parametrize("given", ["lr 1e-4 and a KL penalty", "a KL penalty and lr 1e-4", "a KL penalty, and lr 1e-4"])
def test_what_is_given_without_a_level_is_there(given: str) -> None:
    reading = read(f"Given {given}, does a group size of 16 beat 4?", ARITHMETIC.instrument)
    assert {factor.name: level for factor, level in reading.settings} == {"learning_rate": 1e-4, "kl": 0.1}


@pytest.mark.parametrize(
    ("topic", "treatments", "baselines", "metric"),
    [
        ("After 50 steps with lr 1e-5 accuracy was still low, would 1e-4 be better?", [1e-4], [1e-5], ACC),
        ("Having used lr 1e-5 so far, do we get higher accuracy with 1e-4?", [1e-4], [1e-5], ACC),
        ("Having trained with GRPO so far, would accuracy be higher with RLOO?", ["rloo"], ["grpo"], ACC),
        ("If GRPO plateaus, does RLOO help?", ["rloo"], ["grpo"], AUC),
        ("In the paper, PPO beat GRPO. Does RLOO beat PPO here?", ["rloo"], ["ppo"], AUC),
        ("A group size of 16 is slow, but is it more accurate than 4?", [16], [4], ACC),
        ("What happens to accuracy if GRPO is swapped for RLOO?", ["rloo"], ["grpo"], ACC),
        ("So far we used no KL. Does accuracy rise with a KL penalty?", [0.1], [0.0], ACC),
        ("What happens to accuracy if GRPO is replaced by RLOO?", ["rloo"], ["grpo"], ACC),
        ("We trained with KL. Does removing KL raise accuracy?", [0.0], [0.1], ACC),
        ("Knowing that KL slows learning, does removing it raise accuracy?", [0.0], [0.1], ACC),
        ("Without a KL penalty accuracy collapsed, does a KL penalty of 0.05 raise it?", [0.05], [0.0], ACC),
        ("Does removing, not adding, a KL penalty raise accuracy?", [0.0], [0.1], ACC),
        ("Does not using a KL penalty raise accuracy?", [0.0], [0.1], ACC),
    ],
)
def test_sides_of_further_scenes(topic: str, treatments: list[Any], baselines: list[Any], metric: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (*sides(reading), reading.metric.name, reading.direction) == (treatments, baselines, metric, UP)
    assert not reading.settings


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("Does accuracy increase with lr 1e-4 but not with 1e-5?", "denies it of another"),
        ("Does a KL penalty help with lr 1e-4 but not with 1e-5?", "denies it of another"),
        ("Does RLOO learn faster while being no less accurate than GRPO?", "two claims"),
        ("Is lr 1e-4 at least as accurate, but faster, than 1e-5?", "two claims"),
        ("Is RLOO twice as accurate as GRPO but half as fast?", "two claims"),
        ("Is RLOO cheaper but equally accurate as GRPO?", "two claims"),
        ("Does lr 1e-4 improve accuracy but hurt the final reward?", "two claims of two metrics"),
        ("Does a group size of 16 raise the reward but not accuracy?", "two claims of two metrics"),
        ("Does PPO improve reward but leave accuracy unchanged?", "two claims of two metrics"),
    ],
)
def test_what_is_said_behind_a_but_is_not_dropped(topic: str, says: str) -> None:
    with pytest.raises(PlanningRefused, match=says):
        read(topic, ARITHMETIC.instrument)


def test_or_not_denies_nothing() -> None:
    reading = read("Does using LoRA or not change accuracy?", ARITHMETIC.instrument)
    assert (*sides(reading), reading.direction_assumed) == (["lora"], ["full"], True)
    assert not any("nothing differs" in line for line in reading.assumptions)


@pytest.mark.parametrize("said", ["provided that a KL penalty is used", "assuming a KL penalty and a group size of 16"])
def test_what_is_provided_is_there(said: str) -> None:
    reading = read(f"Does lr 1e-4 beat 1e-5 {said}?", ARITHMETIC.instrument)
    assert {factor.name: level for factor, level in reading.settings}["kl"] == 0.1


def test_a_share_of_the_time_that_is_needed() -> None:
    reading = read("Does RLOO need only a third of the time of GRPO?", ARITHMETIC.instrument)
    assert (*sides(reading), reading.metric.name, reading.direction) == (["rloo"], ["grpo"], "wall_s", "decrease")


@pytest.mark.parametrize(
    ("topic", "factor", "treatments", "baselines"),
    [
        ("KL penalty beats no KL penalty on sums", "kl", [0.1], [0.0]),
        ("Gradient clipping outperforms no gradient clipping on sums", "max_grad_norm", [1.0], [1000.0]),
        ("KL on learns faster than KL off", "kl", [0.1], [0.0]),
        ("KL off learns faster than KL on", "kl", [0.0], [0.1]),
        ("Does lr 4e-5 learn faster than 1e-5 without KL on sums?", "learning_rate", [4e-5], [1e-5]),
    ],
)
def test_on_is_a_switch_only_where_nothing_stands_on_it(
    topic: str, factor: str, treatments: list[Any], baselines: list[Any]
) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.factor.name, *sides(reading), reading.direction) == (factor, treatments, baselines, UP)


@pytest.mark.parametrize(
    "topic",
    [
        "Learning with hints off is faster than with hints on",
        "With hints turned off, is it learned faster than with hints turned on?",
        "hints=false beats hints=true",
        "hints: false beats hints: true",
    ],
)
def test_what_stands_behind_a_name_switches_it(topic: str) -> None:
    reading = read(topic, KITCHEN.instrument)
    assert (reading.factor.name, *sides(reading), reading.direction) == ("hints", [False], [True], UP)


@pytest.mark.parametrize(
    ("topic", "treatments", "baselines", "metric", "direction"),
    [
        ("Reward goes up with group size (4, 8)", [8], [4], REWARD, UP),
        ("Does held-out accuracy increase with group size (4 vs 16)?", [16], [4], ACC, UP),
        ("Accuracy grows with group size: 2 vs 8", [8], [2], ACC, UP),
        ("Does training reward go down with temperature (0.7, 1.3)?", [1.3], [0.7], REWARD, DOWN),
        ("Accuracy increases with rank: LoRA rank 4, 16", [16], [4], ACC, UP),
        ("Accuracy decreases as group size decreases: 8, 2", [2], [8], ACC, DOWN),
        ("As the group size increases accuracy drops: 2, 8", [8], [2], ACC, DOWN),
        ("Does accuracy rise with a group size of 4 versus 16?", [4], [16], ACC, UP),
    ],
)
def test_a_trend_says_which_of_the_levels_behind_it_is_the_treatment(
    topic: str, treatments: list[Any], baselines: list[Any], metric: str, direction: str
) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (*sides(reading), reading.metric.name, reading.direction) == (treatments, baselines, metric, direction)


@pytest.mark.parametrize(
    ("topic", "treatments", "baselines"),
    [
        ("Small groups give noisy baselines. Hence I expect 16 rollouts to outperform 4.", [16], [4]),
        ("Small learning rates are slow. Is 4e-5 faster than 1e-5?", [4e-5], [1e-5]),
        ("Higher KL is safer. Does KL 0 learn faster than 0.1?", [0.0], [0.1]),
        ("A larger group may learn faster; test 4 against 16.", [16], [4]),
        ("Does removing the KL term speed learning up? KL 0.05 vs 0", [0.0], [0.05]),
    ],
)
def test_what_is_said_of_the_factor_beside_its_levels_turns_no_claim_round(
    topic: str, treatments: list[Any], baselines: list[Any]
) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (*sides(reading), reading.metric.name, reading.direction) == (treatments, baselines, AUC, UP)


def test_a_claim_that_names_its_baseline_is_not_turned_round() -> None:
    assert "goes the other way" in str(
        refusal("Do smaller groups help? Group size 16 outperforms 4 with smaller groups")
    )


@pytest.mark.parametrize(
    "topic",
    [
        "lr 4e-5 is faster than lr 1e-5 but ends at the same accuracy",
        "lr 4e-5 learns faster than 1e-5 but reaches the same final accuracy",
        "Is RLOO faster than GRPO on sums at equal accuracy?",
    ],
)
def test_faster_and_as_good_are_two_claims(topic: str) -> None:
    with pytest.raises(PlanningRefused, match="a study tests one of them: ask whether auc_reward differs"):
        read(topic, ARITHMETIC.instrument)


@pytest.mark.parametrize(
    ("said", "metric"),
    [
        ("gain in held-out accuracy of", "heldout_accuracy_gain"),
        ("held-out accuracy gain with", "heldout_accuracy_gain"),
        ("improvement in held-out accuracy for", "heldout_accuracy_gain"),
        ("Improvement of accuracy with", "heldout_accuracy_gain"),
        ("gain in reward of", "final_reward"),
    ],
)
def test_a_gain_that_is_measured_claims_nothing(said: str, metric: str) -> None:
    reading = read(f"{said} lr 1e-5 vs 4e-5 on sums", ARITHMETIC.instrument)
    assert (reading.metric.name, reading.direction_assumed) == (metric, True)
