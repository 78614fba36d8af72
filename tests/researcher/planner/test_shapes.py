"""Questions of another shape than one level against another, and what is measured, counted or set beside them."""

from __future__ import annotations

from typing import Any

import pytest

from researcher.planner.matching import read
from researcher.refusals import PlanningRefused
from tests.contracts.planner_contract import ARITHMETIC
from tests.researcher.planner.test_topics import refusal, sides


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("Does two-digit addition benefit more from lr 4e-5 than one-digit?", "whether learning_rate does more"),
        ("Does group size 16 help more with temperature 1.0 than with 0.7?", "whether group_size does more"),
        ("Is the effect of KL larger at lr 1e-4 than at 1e-5?", "whether kl does more"),
        ("max tokens: 8 < 16 < 32 in accuracy?", "in a row, each against the next"),
        ("Is the KL to the start larger at lr 1e-4 than at 1e-5?", "kl can be set in arithmetic"),
        ("Does group size 16 reduce the KL to the start?", "kl can be set in arithmetic"),
        ("Does lr 1e-4 increase the response length?", "max_tokens can be set in arithmetic"),
        ("Does the answer length grow with GRPO?", "max_tokens can be set in arithmetic"),
        ("Does group size 16 lower the entropy bonus?", "entropy can be set in arithmetic"),
        ("Is a learning rate higher than 1e-4 better than 4e-5?", "on which side of 1e-4"),
        ("Do 1k tokens beat 100 tokens?", "1000 lies outside"),
        ("Does GRPO beat RLOO with seed 7?", "`--first-seed 7`"),
        ("Does a learning rate two orders of magnitude higher learn faster?", "0.004 lies outside"),
        ("LoRA can help more at lr 1e-4 than at 1e-5.", "whether parameters does more"),
        ("If LoRA helps, does it help more at lr 1e-4 than at 1e-5?", "whether parameters does more"),
        ("Does LoRA, in your view, help more at lr 1e-4 than at 1e-5?", "whether parameters does more"),
        ("4 trials per seed: is lr 4e-5 better than 1e-5?", "could be tied to '4'"),
        ("Per seed 4 trials: is lr 4e-5 better than 1e-5?", "could be tied to '4'"),
        ("Per random seed 4 trials: is lr 4e-5 better than 1e-5?", "could be tied to '4'"),
        ("Does training for more than 6 steps help?", "on which side of 6 a level of steps lies"),
        ("Does warmup of at least 2 steps help?", "on which side of 2 a level of steps lies"),
        (
            "Which lr is best, 1e-5 or 4e-5, and then which group size, 4 or 8, with more than 6 steps?",
            "on which side of 6 a level of steps lies",
        ),
        ("With more than 6 steps, does GRPO beat RLOO?", "on which side of 6 a level of steps lies"),
    ],
)
def test_a_question_of_another_shape_is_refused(topic: str, says: str) -> None:
    refused = refusal(topic)
    assert says in str(refused)
    assert refused.nearest


@pytest.mark.parametrize(
    ("topic", "treatments", "baselines"),
    [
        ("Do 0.2k tokens beat 100 tokens?", [200], [100]),
        ("Do 0.1k tokens beat 16 tokens?", [100], [16]),
        ("Do a dozen rollouts beat half a dozen?", [12], [6]),
        ("Does a learning rate an order of magnitude higher learn faster?", [4e-4], [4e-5]),
        ("Does lowering the learning rate by two orders of magnitude hurt?", [4e-7], [4e-5]),
        ("Does lr 4e-5 help more than 1e-5 on two-digit sums?", [4e-5], [1e-5]),
        ("Does lr 4e-5 help more on two-digit sums than 1e-5?", [4e-5], [1e-5]),
        ("On two-digit sums, does it help more to use 8 rollouts than 4?", [8], [4]),
        ("With PPO, does it help more to use lr 1e-4 than 1e-5?", [1e-4], [1e-5]),
        ("With PPO, training helps more at lr 1e-4 than at 1e-5.", [1e-4], [1e-5]),
        ("On two-digit sums with PPO, does training help more at lr 1e-4 than at 1e-5?", [1e-4], [1e-5]),
        ("Does LoRA hurt less at a rank of 8 than at a rank of 2?", [8], [2]),
        ("Is lr 1e-5 or", [1e-5], [4e-5]),
        ("Do 8 rollouts reduce the training steps needed compared with 4?", [8], [4]),
        ("Does lr 1e-4 need fewer training steps than 1e-5?", [1e-4], [1e-5]),
    ],
)
def test_numbers_in_words_and_comparisons_that_only_sound_so(
    topic: str, treatments: list[Any], baselines: list[Any]
) -> None:
    assert sides(read(topic, ARITHMETIC.instrument)) == (treatments, baselines)


@pytest.mark.parametrize("many", ["several", "a few", "half an", "1.5"])
def test_orders_of_magnitude_without_a_whole_number_are_refused(many: str) -> None:
    with pytest.raises(PlanningRefused, match="does not say by how many"):
        read(f"Does a learning rate {many} orders of magnitude higher learn faster?", ARITHMETIC.instrument)


@pytest.mark.parametrize("more", ["the training steps needed compared with", "the steps needed compared with"])
def test_steps_that_are_needed_are_measured(more: str) -> None:
    reading = read(f"Do 8 rollouts reduce {more} 4?", ARITHMETIC.instrument)
    assert (reading.metric.name, reading.direction, reading.settings) == ("steps_to_threshold", "decrease", ())


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("Does GRPO learn faster and reach a higher accuracy than RLOO?", "auc_reward is reported beside it"),
        ("Does GRPO reach a higher accuracy and learn faster than RLOO?", "auc_reward is reported beside it"),
        (
            "Does GRPO with lr 1e-5 beat GRPO with lr 4e-5 and group size 16?",
            "group_size=16 is named on one side, and set in all arms",
        ),
        (
            "Does GRPO with lr 1e-5 and group size 16 beat GRPO with lr 4e-5?",
            "group_size=16 is named on one side, and set in all arms",
        ),
    ],
)
def test_what_is_claimed_or_set_beside_is_told(topic: str, says: str) -> None:
    assert any(says in line for line in read(topic, ARITHMETIC.instrument).assumptions)
