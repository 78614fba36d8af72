"""Turns of phrase that change which side is the baseline, which way a claim goes, or what is asked at all."""

from __future__ import annotations

from typing import Any

import pytest

from researcher.instruments.catalogue import read_instrument
from researcher.planner.matching import read
from researcher.refusals import PlanningRefused
from tests.contracts.planner_contract import ARITHMETIC, ROOT
from tests.researcher.planner.test_topics import ACC, AUC, DOWN, REWARD, STEPS, UP, sides

TEAM = read_instrument(ROOT / "studies" / "team")


@pytest.mark.parametrize(
    ("topic", "treatments", "baselines"),
    [
        ("Our baseline uses a group size of 8. Would 32 be better?", [32], [8]),
        ("Our baseline is a temperature of 1.0. Does 0.7 beat it?", [0.7], [1.0]),
        ("Our default learning rate is 4e-5. Does 1e-4 learn faster?", [1e-4], [4e-5]),
        ("With GRPO as the baseline, does RLOO learn faster?", ["rloo"], ["grpo"]),
        ("GRPO is our baseline; does RLOO beat it?", ["rloo"], ["grpo"]),
        ("Taking temperature 1.0 as reference, does 0.7 hurt accuracy?", [0.7], [1.0]),
        ("Arms: lr 1e-5 (control), 4e-5, 1e-4", [4e-5, 1e-4], [1e-5]),
        ("Arms: group size 4, 8 (baseline) and 16", [4, 16], [8]),
        ("We use RLOO. Would GRPO learn faster?", ["grpo"], ["rloo"]),
        ("Right now lr is 1e-5. Should I raise it to 1e-4?", [1e-4], [1e-5]),
        ("Unlike with lr 1e-5, does GRPO collapse with lr 1e-3?", [1e-3], [1e-5]),
        ("Versus GRPO, how does RLOO do?", ["rloo"], ["grpo"]),
        ("Swap AdamW for Adafactor: is it worse?", ["adafactor"], ["adamw"]),
        ("Is more better? group size 4 vs 16", [16], [4]),
        ("Larger groups learn faster: 2, 4, 8, 16", [4, 8, 16], [2]),
        ("Does a lower temperature improve accuracy: 0.5, 0.7, 1.0?", [0.5, 0.7], [1.0]),
        ("Does accuracy increase monotonically with the group size from 2 to 4 to 8 to 16?", [4, 8, 16], [2]),
        ("Does the model learn faster with group sizes 4, 8 or 16?", [8, 16], [4]),
        ("Does accuracy improve with a temperature of 0.7 versus 1.0?", [0.7], [1.0]),
        ("Does accuracy improve with a temperature of 0.7 rather than 1.0?", [0.7], [1.0]),
        ("Does accuracy improve with lr 1e-5 compared to lr 1e-4?", [1e-5], [1e-4]),
        ("Does accuracy increase with group size 4 instead of 16?", [4], [16]),
        ("Does the reward increase with LoRA rank 4 compared with rank 64?", [4], [64]),
        ("Does accuracy drop with a KL penalty of 0.01 vs 0.1?", [0.01], [0.1]),
        ("Does accuracy increase with group size 4 or 16?", [4], [16]),
        ("Does a moderate learning rate of 4e-5 beat 1e-4?", [4e-5], [1e-4]),
        ("Compare learning rates 0,1e-5 on accuracy", [0.0], [1e-5]),
        ("Is high staleness worse than low staleness?", [2], [0]),
    ],
)
def test_what_is_in_use_or_called_so_is_the_baseline(topic: str, treatments: list[Any], baselines: list[Any]) -> None:
    assert sides(read(topic, ARITHMETIC.instrument)) == (treatments, baselines)


@pytest.mark.parametrize(
    ("topic", "treatments", "baselines"),
    [
        ("Does accuracy rise once the KL penalty is removed?", [0.0], [0.1]),
        ("Does accuracy rise when the KL penalty is turned off?", [0.0], [0.1]),
        ("Is it faster if KL is dropped?", [0.0], [0.1]),
        ("Does a lack of gradient clipping hurt accuracy?", [1000.0], [1.0]),
        ("Does the absence of a KL penalty help?", [0.0], [0.1]),
        ("Does GRPO minus the KL penalty learn faster?", [0.0], [0.1]),
        ("GRPO w/o KL vs GRPO w/ KL", [0.0], [0.1]),
        ("Ablate the entropy bonus: does accuracy drop?", [0.0], [0.1]),
    ],
)
def test_what_is_taken_away_is_the_treatment(topic: str, treatments: list[Any], baselines: list[Any]) -> None:
    assert sides(read(topic, ARITHMETIC.instrument)) == (treatments, baselines)


@pytest.mark.parametrize(
    ("topic", "metric", "direction"),
    [
        ("Does lr 1e-5 learn more slowly than 1e-4?", AUC, DOWN),
        ("Does going down to a temperature of 0.7 from 1.0 help?", AUC, UP),
        ("Does going up to a learning rate of 1e-4 from 1e-5 hurt accuracy?", ACC, DOWN),
        ("Does accuracy go down when the temperature goes up to 1.3?", ACC, DOWN),
        ("Does accuracy fall as temperature rises from 0.7 to 1.0 to 1.3?", ACC, DOWN),
        ("LoRA doesn't hurt accuracy.", ACC, UP),
        ("LoRA isn't worse than full fine-tuning.", ACC, UP),
        ("A KL penalty of 0.05 doesn't lower the final reward.", REWARD, UP),
        ("Is LoRA non-inferior to full fine-tuning?", ACC, UP),
        ("Does warmup reduce collapse?", AUC, UP),
        ("GRPO is slow on sums. Would lr 1e-4 learn faster than 4e-5?", AUC, UP),
    ],
)
def test_a_claim_goes_the_way_that_is_meant(topic: str, metric: str, direction: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.metric.name, reading.direction) == (metric, direction)
    assert not reading.direction_assumed


@pytest.mark.parametrize(
    ("topic", "factor", "treatments", "baselines"),
    [
        ("Does lr decay help?", "schedule", ["linear", "cosine"], ["constant"]),
        ("Does leaving the learning rate constant beat decaying it?", "schedule", ["constant"], ["linear", "cosine"]),
        ("Is averaging the loss over tokens better than over episodes?", "loss_agg", ["token"], ["episode"]),
        ("token-mean loss vs sequence-mean", "loss_agg", ["token"], ["episode"]),
        ("Is a sequence-level loss better than token-level?", "loss_agg", ["episode"], ["token"]),
        ("Does per-token averaging beat per-episode?", "loss_agg", ["token"], ["episode"]),
        ("Does reusing each batch 4 times help?", "epochs", [4], [1]),
        ("Do stale samples hurt?", "max_staleness", [2], [0]),
    ],
)
def test_a_factor_by_other_words(topic: str, factor: str, treatments: list[Any], baselines: list[Any]) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.factor.name, *sides(reading)) == (factor, treatments, baselines)


def test_how_long_is_trained_is_no_question_of_its_own() -> None:
    reading = read("Does GRPO improve the success rate by the end of 20 steps?", ARITHMETIC.instrument)
    assert (reading.factor.name, *sides(reading)) == ("learning_rate", [4e-5], [0.0])
    assert [(factor.name, level) for factor, level in reading.settings] == [("steps", 20)]


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("Does nucleus sampling with top-p 0.9 hurt?", "recorded but never trained on"),
        ("Is top_k 50 better than top_k 5?", "recorded but never trained on"),
        ("With min-p 0.1, does lr 1e-4 beat 1e-5?", "recorded but never trained on"),
        ("Does RLOO make fewer errors than GRPO?", "'errors' is no metric"),
        ("Does RLOO need less data than GRPO?", "'data' is no metric"),
        ("Does annealing temperature help?", "only the learning rate has a schedule"),
        ("Does reward shaping help with lr 1e-4?", "'reward shaping' is nothing"),
        ("Does KL moderate the effect of the learning rate?", "two levels each"),
        ("Does accuracy depend on the learning rate more than on the group size?", "together"),
        ("Does training on one-digit sums generalise to two-digit sums?", "'generalise to' is no metric"),
    ],
)
def test_what_is_no_question_here_is_refused(topic: str, says: str) -> None:
    with pytest.raises(PlanningRefused, match=says):
        read(topic, ARITHMETIC.instrument)


@pytest.mark.parametrize(
    ("topic", "factor", "treatments", "baselines", "settings"),
    [
        ("Is planner lr 0 worse than planner lr 4e-5?", "planner_learning_rate", [0.0], [4e-5], {}),
        ("Does a planner's lr of 1e-4 learn faster?", "planner_learning_rate", [1e-4], [4e-5], {}),
        ("Does training both planner and solver beat training the solver only?", "planner_learning_rate", [4e-5], [0.0], {}),
        ("With the planner frozen, is lr 1e-4 better than 1e-5?", "learning_rate", [1e-4], [1e-5], {"planner_learning_rate": 0}),
    ],
)  # fmt: skip
def test_one_of_two_models_by_itself(
    topic: str, factor: str, treatments: list[Any], baselines: list[Any], settings: dict[str, Any]
) -> None:
    reading = read(topic, TEAM.instrument)
    assert (reading.factor.name, *sides(reading)) == (factor, treatments, baselines)
    assert {factor.name: level for factor, level in reading.settings} == settings


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("Does a solver lr of 1e-4 learn faster than 1e-5?", "'solver lr' is nothing that team can vary"),
        ("Does a learning rate of the solver of 1e-4 beat 1e-5?", "is all models'"),
        ("Does training only the planner help?", "planner_learning_rate 0 freezes the planner alone"),
        ("With the solver frozen, is planner lr 1e-4 better than 1e-5?", "'solver' cannot be frozen by itself"),
    ],
)
def test_a_model_without_settings_of_its_own_is_refused(topic: str, says: str) -> None:
    with pytest.raises(PlanningRefused, match=says):
        read(topic, TEAM.instrument)


@pytest.mark.parametrize(
    ("topic", "metric", "direction"),
    [
        ("Does LoRA take less time than full fine-tuning?", "wall_s", DOWN),
        ("Which optimizer takes less time?", "wall_s", DOWN),
        ("Does a group size of 16 take twice as long as 8?", "wall_s", UP),
        ("Is a group size of 4 half as expensive as 8?", "wall_s", DOWN),
        ("Does a group size of 16 cost more than 4?", "wall_s", UP),
        ("Does LoRA double the wall time?", "wall_s", UP),
        ("How long does training take with 4 rollouts vs 16?", "wall_s", DOWN),
        ("Does lr 1e-5 take longer to learn than 1e-4?", AUC, DOWN),
        ("How many steps are needed with lr 1e-4 vs 1e-5?", STEPS, DOWN),
        ("Which group size needs the fewest steps, 4 or 16?", STEPS, DOWN),
        ("Does lr 1e-4 cross the reward threshold sooner than 1e-5?", STEPS, DOWN),
        ("test acc of lr 1e-4 vs 1e-5", ACC, UP),
        ("pass@1 of RLOO vs GRPO", ACC, UP),
    ],
)
def test_a_metric_by_other_words(topic: str, metric: str, direction: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.metric.name, reading.direction) == (metric, direction)


@pytest.mark.parametrize(
    ("says", "direction"),
    [
        *((verb, DOWN) for verb in ("worsen", "diminish", "undermine", "weaken", "limit", "lose")),
        *((verb, UP) for verb in ("enhance", "lift", "elevate", "strengthen")),
    ],
)
def test_verbs_of_better_and_worse(says: str, direction: str) -> None:
    reading = read(f"Does a KL penalty of 0.05 {says} accuracy?", ARITHMETIC.instrument)
    assert (reading.metric.name, reading.direction, reading.direction_assumed) == (ACC, direction, False)


@pytest.mark.parametrize(
    ("says", "direction"),
    [
        *((f"{verb} accuracy less", UP) for verb in ("hurt", "lower", "degrade", "decrease", "reduce")),
        *((f"{verb} accuracy less", DOWN) for verb in ("improve", "raise", "help")),
        *((f"hurt accuracy {less}", UP) for less in ("much less", "less severely", "less often")),
        *((f"hurt accuracy {more}", DOWN) for more in ("more", "no less", "in less time")),
        *((f"{verb} less", UP) for verb in ("hurt", "collapse", "harm sums", "slow learning")),
        *((f"be less {bad} for accuracy", UP) for bad in ("harmful", "bad", "damaging")),
        ("be more harmful for accuracy", DOWN),
        ("lose less accuracy", UP),
        ("do less damage to accuracy", UP),
        ("learn less slowly", UP),
        ("be less accurate", DOWN),
        ("help less", DOWN),
    ],
)
def test_what_is_said_to_happen_less_is_claimed_the_other_way_round(says: str, direction: str) -> None:
    reading = read(f"Would a KL penalty of 0.01 {says} than 0.1?", ARITHMETIC.instrument)
    assert (sides(reading), reading.direction, reading.direction_assumed) == (([0.01], [0.1]), direction, False)


@pytest.mark.parametrize(
    ("topic", "treatments", "baselines", "direction"),
    [
        ("Does temperature 1.3 underperform 1.0?", [1.3], [1.0], DOWN),
        ("Does RLOO lag behind GRPO?", ["rloo"], ["grpo"], DOWN),
        ("Do we lose accuracy by using LoRA instead of full fine-tuning?", ["lora"], ["full"], DOWN),
        ("Do small batches learn faster than large batches?", [4], [16], UP),
        ("Is low temperature better than high?", [0.55], [1.5], UP),
        ("Do long answers beat short answers?", [32], [8], UP),
        ("Do long rollouts help?", [32], [16], UP),
        ("Does a tighter gradient clipping help?", [0.25], [1.0], UP),
        ("Does a quarter of the learning rate hurt?", [1e-5], [4e-5], DOWN),
        ("Is asymmetric clipping (low 0.2, high 0.28) better than symmetric?", [0.28], [0.2], UP),
        ("Group size 16 is the best of 4, 8 and 16", [16], [4, 8], UP),
        ("Is a learning rate of `1e-4` better than **1e-5**?", [1e-4], [1e-5], UP),
        ("Is a learning rate of $10^{-4}$ better than $10^{-5}$?", [1e-4], [1e-5], UP),
        ('Is a group size of "16" better than "4"?', [16], [4], UP),
        ("The runs looked noisy. Does a group size of 16 learn faster than 4?", [16], [4], UP),
        ("People say PPO is more stable. Does PPO beat GRPO in accuracy?", ["ppo"], ["grpo"], UP),
        ("Does a lower temperature improve accuracy (0.5, 0.7, 1.0)?", [0.5, 0.7], [1.0], UP),
        ("Does accuracy fall as temperature rises from 0.7 through 1.0 to 1.3?", [1.0, 1.3], [0.7], DOWN),
        ("lr in the range 1e-5 to 1e-4", [1e-5], [1e-4], UP),
        ("Will a bigger learning rate, say 1e-4, learn faster than 4e-5?", [1e-4], [4e-5], UP),
        ("Is accuracy after 20 steps higher than after 10?", [20], [10], UP),
        ("Does dividing advantages by the std hurt accuracy?", ["std"], ["none"], DOWN),
        ("Is it worse if advantages are not normalised?", ["none"], ["std"], DOWN),
        ("Does cosine annealing help?", ["cosine"], ["constant"], UP),
        ("Does off-policy training hurt?", [1], [0], DOWN),
        ("Does one-step off-policy training hurt?", [1], [0], DOWN),
        ("Is a rank-4 adapter worse than a rank-32 adapter?", [4], [32], DOWN),
        ("Does raising the learning rate by ten percent help?", [4.4e-5], [4e-5], UP),
        ("Does proximal policy optimization beat GRPO?", ["ppo"], ["grpo"], UP),
        ("Does DrGRPO beat GRPO?", ["dr_grpo"], ["grpo"], UP),
    ],
)
def test_levels_by_other_words(topic: str, treatments: list[Any], baselines: list[Any], direction: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (*sides(reading), reading.direction) == (treatments, baselines, direction)


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("Does held-out accuracy exceed 0.5 sooner with lr 1e-4 than with 1e-5?", "a threshold of 0.5 of heldout_accuracy"),
        ("Is RLOO better than GRPO but worse than PPO?", "two claims that go opposite ways"),
        ("Is temperature 0,7 better than 1,0?", "decimals take a point"),
        ("Does weigth decay 0.1 help?", "did you mean weight_decay"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_surely_is_refused(topic: str, says: str) -> None:
    with pytest.raises(PlanningRefused, match=says):
        read(topic, ARITHMETIC.instrument)


@pytest.mark.parametrize("said", ["6h budget", "a 6 hour budget", "within 6 hours", "in 5h60m", "in 5h59min60s"])
def test_a_budget_may_stand_before_its_word(said: str) -> None:
    assert read(f"Compare GRPO and RLOO, {said}", ARITHMETIC.instrument).budget_s == 21600.0


def test_a_reward_that_is_higher_is_measured_and_not_chosen() -> None:
    dataset = read_instrument(ROOT / "studies" / "dataset").instrument
    reading = read("On data/train.jsonl, is the reward higher with lr 1e-4 than with 1e-5?", dataset)
    assert (reading.factor.name, reading.metric.name, reading.direction) == ("learning_rate", REWARD, UP)


@pytest.mark.parametrize(
    "said",
    [
        "Following DAPO, does clip range 0.28 beat 0.2?",
        "Does clip range 0.28 beat 0.2, as DAPO does?",
        "Does clip range 0.28 as in DAPO beat 0.2?",
        "The DAPO paper claims that clipping matters. Does clip range 0.28 beat 0.2?",
    ],
)
def test_an_algorithm_that_is_only_referred_to_is_not_set(said: str) -> None:
    reading = read(said, ARITHMETIC.instrument)
    assert (reading.factor.name, *sides(reading)) == ("clip_range", [0.28], [0.2])
    assert "algorithm" not in {factor.name for factor, _ in reading.settings}


def test_an_algorithm_that_is_compared_with_is_no_reference() -> None:
    for topic in ("Is accuracy with RLOO as high as in GRPO?", "Does RLOO learn as fast as GRPO does?"):
        assert sides(read(topic, ARITHMETIC.instrument)) == (["rloo"], ["grpo"])


@pytest.mark.parametrize(
    "topic",
    [
        "Does a learning rate of 1e-5 differ from 1.0e-5?",
        "Is a learning rate of 1e-5 different from a learning rate of 1e-5?",
        "Compare a learning rate of 1e-5 with a learning rate of 1e-5",
        "Compare a learning rate of 1e-5 against itself",
        "Is a learning rate of 1e-5 faster than itself?",
        "Do two runs with the same learning rate of 1e-5 differ?",
    ],
)
def test_a_level_that_is_compared_with_itself_is_run_twice(topic: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.factor.name, reading.levels, reading.pairs) == ("learning_rate", (1e-5, 1e-5), ((1, 0),))


@pytest.mark.parametrize(
    "topic",
    [
        "Does lr 1e-4 with a group size of 8 differ from lr 1e-4 with a group size of 4?",
        "Does a group size of 8 differ from 4 in runs with the same lr of 1e-4?",
    ],
)
def test_a_setting_that_is_said_of_both_sides_is_no_level_against_itself(topic: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (sides(reading), [level for _, level in reading.settings]) == (([8], [4]), [1e-4])
