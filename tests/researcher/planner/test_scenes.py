"""What a topic tells before its question and says beside it: neither is compared, measured or claimed."""

from __future__ import annotations

from typing import Any

import pytest

from researcher.instruments.catalogue import read_instrument
from researcher.instruments.instrument import Factor
from researcher.planner.matching import read
from researcher.refusals import PlanningRefused
from tests.contracts.planner_contract import ARITHMETIC, ROOT
from tests.researcher.planner.test_topics import ACC, AUC, DOWN, REWARD, UP, sides


@pytest.mark.parametrize(
    ("topic", "factor", "treatments", "baselines", "metric", "direction"),
    [
        ("The reward was noisy with a group size of 4. Does 16 learn faster than 4?", "group_size", [16], [4], AUC, UP),
        ("The reward was noisy with a group size of 4. Does a group size of 16 learn faster?", "group_size", [16], [4], AUC, UP),
        ("Accuracy dropped with a temperature of 1.3. Does 0.7 learn faster than 1.3?", "temperature", [0.7], [1.3], AUC, UP),
        ("Accuracy dropped by 0.1 with a temperature of 1.3; does 0.7 learn faster?", "temperature", [0.7], [1.3], AUC, UP),
        ("The accuracy was low with lr 1e-5. Is the final reward higher with 1e-4?", "learning_rate", [1e-4], [1e-5], REWARD, UP),
        ("The reward collapsed with lr 1e-3. Is 1e-4 better than 1e-3?", "learning_rate", [1e-4], [1e-3], REWARD, UP),
        ("Training is unstable at lr 1e-3. Is lr 1e-4 more accurate than 1e-5?", "learning_rate", [1e-4], [1e-5], ACC, UP),
        ("Entropy collapses early. Does a higher entropy bonus improve accuracy?", "entropy", [0.1], [0.0], ACC, UP),
        ("The entropy collapses. Does an entropy bonus of 0.01 learn faster?", "entropy", [0.01], [0.0], AUC, UP),
        ("Entropy collapses early with lr 1e-4. Does 1e-5 reach higher accuracy?", "learning_rate", [1e-5], [1e-4], ACC, UP),
        ("Our entropy collapsed after 10 steps. Does lr 1e-5 learn faster than 1e-4?", "learning_rate", [1e-5], [1e-4], AUC, UP),
        ("Group size 16 is slow, but does 4 lose accuracy?", "group_size", [4], [16], ACC, DOWN),
        ("A learning rate of 1e-5 is stable, but does 4e-5 learn faster?", "learning_rate", [4e-5], [1e-5], AUC, UP),
        ("GRPO is popular, yet does RLOO beat it?", "algorithm", ["rloo"], ["grpo"], AUC, UP),
        ("Although a group size of 4 is cheap, 16 reaches a higher accuracy.", "group_size", [16], [4], ACC, UP),
        ("Although LoRA is cheaper, full fine-tuning is more accurate.", "parameters", ["full"], ["lora"], ACC, UP),
        ("Although GRPO is the standard, RLOO learns faster.", "algorithm", ["rloo"], ["grpo"], AUC, UP),
        ("Even though a group size of 16 is slower, it is more accurate than 4.", "group_size", [16], [4], ACC, UP),
        ("Even though a group size of 16 is slower than 4, it is more accurate.", "group_size", [16], [4], ACC, UP),
        ("Although lr 4e-5 learns faster than 1e-5, it is less accurate.", "learning_rate", [4e-5], [1e-5], ACC, DOWN),
        ("Although RLOO beats GRPO on reward, it is less accurate.", "algorithm", ["rloo"], ["grpo"], ACC, DOWN),
    ],
)  # fmt: skip
def test_what_was_seen_before_is_no_part_of_the_question(
    topic: str, factor: str, treatments: list[Any], baselines: list[Any], metric: str, direction: str
) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.factor.name, *sides(reading)) == (factor, treatments, baselines)
    assert (reading.metric.name, reading.direction) == (metric, direction)
    assert not reading.settings
    assert any("tells why it is asked" in line for line in reading.assumptions)


def test_what_was_set_when_it_was_seen_stays_set() -> None:
    reading = read(
        "The reward was flat with lr 1e-5. Does a group size of 16 learn faster than 4?", ARITHMETIC.instrument
    )
    assert {factor.name: level for factor, level in reading.settings} == {"learning_rate": 1e-5}
    again = read(
        "The reward was flat with lr 1e-4. With lr 1e-5, does a group size of 16 beat 4?", ARITHMETIC.instrument
    )
    assert {factor.name: level for factor, level in again.settings} == {"learning_rate": 1e-5}


@pytest.mark.parametrize(
    ("topic", "metric"),
    [
        ("Accuracy is what matters. Does lr 1e-4 learn faster than 1e-5?", ACC),
        ("We care about the final reward. Does lr 1e-4 beat 1e-5?", REWARD),
    ],
)
def test_what_is_said_to_matter_is_measured(topic: str, metric: str) -> None:
    assert read(topic, ARITHMETIC.instrument).metric.name == metric


@pytest.mark.parametrize("said", ["top-p 1.0", "top_p=1", "top-k -1", "a temperature of 0.7 and top-p 1.0"])
def test_sampling_that_cuts_nothing_changes_nothing(said: str) -> None:
    for topic in (f"With {said}, does lr 1e-4 beat 1e-5?", f"Does lr 1e-4 beat 1e-5 with {said}?"):
        reading = read(topic, ARITHMETIC.instrument)
        assert (reading.factor.name, *sides(reading)) == ("learning_rate", [1e-4], [1e-5])
        assert any("cuts nothing" in line for line in reading.assumptions)


@pytest.mark.parametrize("said", ["With top-p 0.9, does lr 1e-4 beat 1e-5?", "Is top-p 1.0 better than 0.9?"])
def test_sampling_that_cuts_is_refused(said: str) -> None:
    with pytest.raises(PlanningRefused, match="recorded but never trained on"):
        read(said, ARITHMETIC.instrument)


def test_a_factor_that_cuts_sampling_is_held_where_an_instrument_has_one() -> None:
    factor = Factor(name="top_p", target="task.top_p", type="float", default=0.95, low=0.1, high=1.0)
    instrument = ARITHMETIC.instrument.model_copy(update={"factors": (*ARITHMETIC.instrument.factors, factor)})
    reading = read("With top-p 1.0, does lr 1e-4 beat 1e-5?", instrument)
    assert (reading.factor.name, *sides(reading)) == ("learning_rate", [1e-4], [1e-5])
    assert {factor.name: level for factor, level in reading.settings} == {"top_p": 1.0}


@pytest.mark.parametrize(
    "topic",
    [
        "In less time, does a group size of 16 reach higher accuracy than 4?",
        "With less wall time, does a group size of 16 reach a higher accuracy than 4?",
        "Does a group size of 16 reach higher accuracy than 4 in less time?",
    ],
)
def test_what_it_takes_is_reported_beside_what_is_reached(topic: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (*sides(reading), reading.metric.name, reading.direction) == ([16], [4], ACC, UP)
    assert "heldout_accuracy decides; wall_s is reported beside it." in reading.assumptions


@pytest.mark.parametrize(
    "topic",
    [
        "Does lr 1e-4 reach the same accuracy in less time than 1e-5?",
        "In less time, does lr 1e-4 reach the same accuracy as 1e-5?",
        "Does lr 1e-4 reach the same reward in fewer steps than 1e-5?",
    ],
)
def test_the_same_for_less_is_two_questions(topic: str) -> None:
    with pytest.raises(PlanningRefused, match="a study tests one of them") as refused:
        read(topic, ARITHMETIC.instrument)
    assert len(refused.value.nearest) == 2


@pytest.mark.parametrize(
    "topic",
    [
        "Does a costly group size of 16 beat 8?",
        "Does an expensive group size of 16 beat 8?",
        "Is a costly group size of 16 better than 8?",
    ],
)
def test_what_a_level_is_called_is_no_misspelt_metric(topic: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.factor.name, *sides(reading)) == ("group_size", [16], [8])
    assert reading.metric.name != "wall_s"


@pytest.mark.parametrize("claim", ["no worse than", "not worse than"])
def test_two_claims_are_refused_as_such(claim: str) -> None:
    with pytest.raises(PlanningRefused, match="two claims, one of them with a 'no' or 'not'"):
        read(f"Is RLOO better than GRPO and {claim} PPO?", ARITHMETIC.instrument)


@pytest.mark.parametrize(
    ("topic", "treatments", "baselines"),
    [
        ("Is RLOO better than GRPO and better than PPO?", ["rloo"], ["grpo", "ppo"]),
        ("Is a group size of 16 faster than 8 and faster than 4?", [16], [8, 4]),
    ],
)
def test_the_same_claim_of_two_baselines(topic: str, treatments: list[Any], baselines: list[Any]) -> None:
    assert sides(read(topic, ARITHMETIC.instrument)) == (treatments, baselines)


@pytest.mark.parametrize(
    "topic",
    [
        "Is the accuracy of lr 4e-5 within one standard error of that of 1e-5?",
        "Accuracy of lr 4e-5 is within two standard deviations of lr 1e-5.",
    ],
)
def test_within_an_error_claims_that_nothing_differs(topic: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (*sides(reading), reading.metric.name, reading.direction_assumed) == ([4e-5], [1e-5], ACC, True)
    assert any("claims that nothing differs" in line for line in reading.assumptions)
    assert any("the margin of the metric" in line for line in reading.assumptions)


def test_errors_that_are_reported_measure_nothing() -> None:
    reading = read("Compare the accuracy of lr 4e-5 and 1e-5, with standard errors", ARITHMETIC.instrument)
    assert (*sides(reading), reading.metric.name) == ([4e-5], [1e-5], ACC)
    with pytest.raises(PlanningRefused, match="the size of an effect"):
        read("Does lr 1e-4 beat 1e-5 by more than one standard error?", ARITHMETIC.instrument)
    with pytest.raises(PlanningRefused, match="'error' is no metric"):
        read("Does a group size of 16 reduce the standard error of accuracy?", ARITHMETIC.instrument)


@pytest.mark.parametrize("adverse", ["adverse", "negative", "detrimental", "harmful"])
def test_an_adverse_effect_is_worse_and_none_is_no_worse(adverse: str) -> None:
    worse = read(f"Does LoRA have a {adverse} effect on accuracy?", ARITHMETIC.instrument)
    assert (worse.metric.name, worse.direction, worse.direction_assumed) == (ACC, DOWN, False)
    for topic in (
        f"LoRA has no {adverse} effect on accuracy",
        f"Can LoRA be used without any {adverse} effect on accuracy?",
    ):
        none = read(topic, ARITHMETIC.instrument)
        assert (none.metric.name, none.direction, none.direction_assumed) == (ACC, UP, False)
        assert any("'No worse' is tested as better" in line for line in none.assumptions)


@pytest.mark.parametrize(
    ("topic", "treatments", "baselines", "metric", "direction"),
    [
        ("Although LoRA is cheaper, is it less accurate than full fine-tuning?", ["lora"], ["full"], ACC, DOWN),
        ("Even though PPO is slower, does it reach higher accuracy than GRPO?", ["ppo"], ["grpo"], ACC, UP),
        ("Since larger groups are costly, is accuracy higher with 4 rollouts than with 16?", [4], [16], ACC, UP),
        ("Because lr 1e-4 diverged, is 1e-5 better than 4e-5?", [1e-5], [4e-5], ACC, UP),
        ("We saw reward hacking with no KL. Does a KL of 0.05 raise held-out accuracy?", [0.05], [0.0], ACC, UP),
        ("We train without KL. Does a KL of 0.05 help?", [0.05], [0.0], AUC, UP),
        ("GRPO gave us 60% accuracy. Does RLOO give more?", ["rloo"], ["grpo"], ACC, UP),
        ("Our lr is 1e-5 at the moment, would 5e-5 learn faster?", [5e-5], [1e-5], AUC, UP),
        ("According to the DAPO paper, clip-higher helps. Does 0.28 beat 0.2?", [0.28], [0.2], AUC, UP),
    ],
)
def test_a_clause_or_a_habit_before_the_question_claims_nothing(
    topic: str, treatments: list[Any], baselines: list[Any], metric: str, direction: str
) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (*sides(reading), reading.metric.name, reading.direction) == (treatments, baselines, metric, direction)
    assert not reading.direction_assumed
    assert not reading.settings


def test_what_is_given_is_set() -> None:
    reading = read("Given a temperature of 0.7, does lr 1e-4 reach higher accuracy than 1e-5?", ARITHMETIC.instrument)
    assert {factor.name: level for factor, level in reading.settings} == {"temperature": 0.7}
    assert not any("tells why" in line for line in reading.assumptions)


def test_a_level_that_is_only_told_is_named_among_the_assumptions() -> None:
    reading = read("Because lr 1e-4 diverged, is 1e-5 better than 4e-5?", ARITHMETIC.instrument)
    assert "learning_rate=1e-4 is named before the question, and not compared." in reading.assumptions


@pytest.mark.parametrize(
    ("topic", "treatments"),
    [
        ("Does accuracy go up or down with a temperature of 0.7?", [0.7]),
        ("Does a temperature of 0.7 help or hurt accuracy?", [0.7]),
        ("Is a higher or lower temperature better for accuracy?", [0.55, 1.5]),
    ],
)
def test_either_way_claims_neither(topic: str, treatments: list[Any]) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (*sides(reading), reading.metric.name) == (treatments, [1.0], ACC)
    assert reading.direction_assumed


def test_a_not_of_another_sentence_denies_nothing() -> None:
    reading = read("A paper says group size doesn't matter. Does 16 beat 4?", ARITHMETIC.instrument)
    assert (*sides(reading), reading.direction) == ([16], [4], UP)
    assert not any("'not'" in line for line in reading.assumptions)


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("Does a group size of 16 learn faster per step but slower in wall time than 4?", "two claims that go opposite ways"),
        ("Is KL 0.001 better than KL 0.1, and both better than none?", "makes two claims, and a study tests one"),
    ],
)  # fmt: skip
def test_a_second_claim_is_not_dropped(topic: str, says: str) -> None:
    with pytest.raises(PlanningRefused, match=says):
        read(topic, ARITHMETIC.instrument)


@pytest.mark.parametrize(
    "topic",
    [
        "Accuracy doesn't depend on the group size.",
        "Accuracy is insensitive to the group size.",
        "Would group size 4 do as well as 16 on accuracy?",
    ],
)
def test_further_words_for_no_difference(topic: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.factor.name, reading.metric.name) == ("group_size", ACC)
    assert any("claims that nothing differs" in line for line in reading.assumptions)


@pytest.mark.parametrize(
    ("topic", "factor", "treatments", "baselines", "metric", "direction"),
    [
        ("Does a second epoch per batch help?", "epochs", [2], [1], AUC, UP),
        ("Does a learning rate of ten to the minus four beat ten to the minus five?", "learning_rate", [1e-4], [1e-5], AUC, UP),
        ("Is lr 4 times ten to the minus five faster than 1e-5?", "learning_rate", [4e-5], [1e-5], AUC, UP),
        ("Is one step of staleness harmless for accuracy?", "max_staleness", [1], [0], ACC, UP),
        ("Is std-normalising the advantages harmful to accuracy?", "advantage_norm", ["std"], ["none"], ACC, DOWN),
        ("Does a bigger group give diminishing returns: 4, 8, 16?", "group_size", [8, 16], [4], AUC, UP),
        ("Neither 4 nor 16 rollouts is better in accuracy", "group_size", [4], [16], ACC, UP),
    ],
)  # fmt: skip
def test_levels_and_claims_as_they_are_spoken(
    topic: str, factor: str, treatments: list[Any], baselines: list[Any], metric: str, direction: str
) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.factor.name, *sides(reading)) == (factor, treatments, baselines)
    assert (reading.metric.name, reading.direction) == (metric, direction)


def test_a_time_by_itself_is_a_budget() -> None:
    reading = read("RLOO v GRPO, 4 seeds, 1 hour", ARITHMETIC.instrument)
    assert (reading.seeds, reading.budget_s) == (4, 3600.0)


def test_a_switch_may_be_an_adjective() -> None:
    lake = read_instrument(ROOT / "studies" / "frozenlake").instrument
    reading = read("Does a non-slippery lake give higher accuracy than a slippery one?", lake)
    assert (reading.factor.name, *sides(reading), reading.direction) == ("slippery", [False], [True], UP)


@pytest.mark.parametrize(
    ("topic", "treatments", "baselines", "direction"),
    [
        ("Accuracy was higher with lr 1e-4 than with 1e-5. Is that real?", [1e-4], [1e-5], UP),
        ("We observed lower accuracy with lr 1e-3 than with 1e-4. Can this be replicated?", [1e-3], [1e-4], DOWN),
    ],
)
def test_what_was_seen_is_the_claim_where_the_question_names_nothing(
    topic: str, treatments: list[Any], baselines: list[Any], direction: str
) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (*sides(reading), reading.direction, reading.direction_assumed) == (treatments, baselines, direction, False)


def test_a_default_that_is_told_is_the_baseline() -> None:
    reading = read("Given that lr 1e-4 is our default, does 1e-5 reach higher accuracy?", ARITHMETIC.instrument)
    assert sides(reading) == ([1e-5], [1e-4])


def test_an_effect_of_either_kind_claims_neither() -> None:
    for said in ("positive or negative", "negative or positive", "beneficial or adverse"):
        reading = read(f"Does a temperature of 0.7 have a {said} effect on accuracy?", ARITHMETIC.instrument)
        assert reading.direction_assumed
    same = read("Is accuracy with 16 rollouts more or less the same as with 4?", ARITHMETIC.instrument)
    assert any("claims that nothing differs" in line for line in same.assumptions)


def test_what_is_not_of_a_kind_is_without_it() -> None:
    assert sides(read("Non-LoRA vs LoRA accuracy", ARITHMETIC.instrument)) == (["full"], ["lora"])


@pytest.mark.parametrize(
    ("topic", "metric"),
    [
        ("Nothing is lost by reducing the temperature from 1.0 to 0.7", AUC),
        ("We lose nothing with a temperature of 0.7 rather than 1.0", AUC),
        ("No accuracy is lost when the temperature drops from 1.0 to 0.7", ACC),
        ("Lowering the temperature from 1.0 to 0.7 hurts nothing", AUC),
        ("A temperature of 0.7 rather than 1.0 costs no accuracy", ACC),
        ("A temperature of 0.7 rather than 1.0 costs nothing", AUC),
    ],
)
def test_where_nothing_is_lost_it_is_no_worse(topic: str, metric: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (*sides(reading), reading.metric.name, reading.direction) == ([0.7], [1.0], metric, UP)
    assert any(line.startswith("'No worse'") for line in reading.assumptions)


@pytest.mark.parametrize(
    "topic",
    [
        "lr 4e-5 vs 1e-5 on sums with the same number of steps",
        "LoRA vs full fine-tuning on sums at the same learning rate",
        "GRPO vs RLOO with equal group size",
        "GRPO vs RLOO on sums, same seeds",
        "GRPO vs RLOO on sums, identical settings otherwise",
        "exact match: GRPO vs RLOO on sums",
        "exact match with temperature 0.7 vs temperature 1.3",
    ],
)
def test_what_is_set_alike_and_an_exact_match_are_no_claim_that_nothing_differs(topic: str) -> None:
    assert not any("nothing differs" in line for line in read(topic, ARITHMETIC.instrument).assumptions)


@pytest.mark.parametrize(
    ("topic", "setting"),
    [
        ("With KL off, does a group size of 16 beat 4?", ("kl", 0.0)),
        ("Does a group size of 16 beat 4 with KL turned off?", ("kl", 0.0)),
        ("With gradient clipping off, does a group size of 16 beat 4?", ("max_grad_norm", 1000.0)),
    ],
)
def test_what_is_off_beside_a_comparison_is_off_in_all_arms(topic: str, setting: tuple[str, float]) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert [(factor.name, level) for factor, level in reading.settings] == [setting]
