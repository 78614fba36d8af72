"""A reward that pays for failing takes the verdict; one that goes along with success is left in peace."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from researcher.analysis.sentinel_findings import SentinelFinding
from researcher.analysis.sentinels import inspect
from researcher.analysis.verdicts import conclude
from researcher.instruments.instrument import Metric, heldout_outcome, trained_outcome
from researcher.models import TrialRecord
from researcher.study.plan import PLANNED_SENTINELS, Plan
from tests.fakes.study import METRIC, done_trial, study_plan

NAME = "reward_against_success"
TASKS, EACH = 12, 2
TRUE = Metric(name="errors", kind="outcome", source="mistakes", true=True, direction="decrease", margin=0.1)
Reward = Callable[[random.Random, bool], float]


def a_plan(*metrics: Metric) -> Plan:
    return study_plan(
        metrics=(METRIC, *metrics), sentinels=(NAME,), heldout_tasks=TASKS, heldout_episodes=EACH, margin=0.1
    )


def a_trial(
    plan: Plan, arm: str, seed: int, share: tuple[float, float], reward: Reward, *, value: float = 0.3
) -> TrialRecord:
    """share: of successes before and after."""
    rng = random.Random(f"{arm} {seed}")
    trial = done_trial(plan, arm, seed, value)
    series = dict(trial.series)
    for when, rate in zip(("before", "after"), share, strict=True):
        fared = [rng.random() < rate for _ in range(TASKS * EACH)]
        series[f"eval_success_{when}"] = [(index, float(well)) for index, well in enumerate(fared)]
        series[f"eval_reward_{when}"] = [(index, reward(rng, well)) for index, well in enumerate(fared)]
    return trial.model_copy(update={"series": series})


def study(plan: Plan, share: tuple[float, float], reward: Reward, seeds: int = 4) -> list[TrialRecord]:
    return [a_trial(plan, arm.name, seed, share, reward) for arm in plan.arms for seed in range(seeds)]


def seen(plan: Plan, trials: list[TrialRecord]) -> list[SentinelFinding]:
    return [finding for finding in inspect(plan, trials) if finding.name == NAME]


def contrary(_: random.Random, well: bool) -> float:
    return 0.1 if well else 1.0


def plain(_: random.Random, well: bool) -> float:
    return 1.0 if well else 0.1


def partial(rng: random.Random, well: bool) -> float:
    """Up to 0.6 for coming near."""
    return 1.0 if well else 0.6 * rng.random()


def unrelated(rng: random.Random, _: bool) -> float:
    return rng.random()


def test_new_plans_hold_the_reward_against_success() -> None:
    assert NAME in PLANNED_SENTINELS


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_a_reward_that_pays_for_failing_takes_the_verdict(seeds: int) -> None:
    plan = a_plan()
    trials = study(plan, (0.1, 0.02), contrary, seeds)
    findings = seen(plan, trials)
    assert {finding.severity for finding in findings} == {"invalid"}
    assert {arm for finding in findings for arm in finding.arms} == {arm.name for arm in plan.arms}
    assert all(finding.value is not None and finding.value < 0 for finding in findings)
    record = conclude(plan, trials).verdict("H1")
    assert record.verdict.value == "invalid"
    assert "get less reward" in record.reason


def test_reward_that_rises_while_success_falls_takes_the_verdict_though_each_episode_is_paid_fairly() -> None:
    """A bonus for something else that training finds, on top of a fair reward."""
    plan = a_plan()
    trials = []
    for one in study(plan, (0.6, 0.2), plain, 4):
        series = dict(one.series)
        series["eval_reward_after"] = [(index, 2.0 + value) for index, value in series["eval_reward_after"]]
        trials.append(one.model_copy(update={"series": series}))
    assert {each.severity for each in seen(plan, trials)} == {"invalid"}


def test_reward_that_rises_while_success_stays_is_a_warning() -> None:
    plan = a_plan()
    trials = [risen(one) for one in study(plan, (0.0, 0.0), plain, 4)]
    for one in trials:  # one task is solved, as well before as after
        for name in ("eval_success_before", "eval_success_after"):
            one.series[name] = [(index, float(index < EACH)) for index in range(TASKS * EACH)]
    [finding] = seen(plan, trials)
    assert finding.severity == "warning"
    assert "but held-out success did not" in finding.text


def test_reward_that_rises_where_no_task_was_ever_solved_is_no_alarm_and_not_called_healthy() -> None:
    plan = a_plan()
    [finding] = seen(plan, [risen(one) for one in study(plan, (0.0, 0.0), plain, 4)])
    assert finding.severity == "unchecked"
    assert "never varied" in finding.text


def risen(one: TrialRecord) -> TrialRecord:
    after = [(index, 0.1 + 0.3 * (index % 5)) for index in range(TASKS * EACH)]
    return one.model_copy(update={"series": {**one.series, "eval_reward_after": after}})


@pytest.mark.parametrize("reward", [plain, partial])
@pytest.mark.parametrize("share", [(0.1, 0.6), (0.6, 0.1), (0.3, 0.3), (0.0, 0.5), (1.0, 1.0)])
def test_an_honest_reward_is_left_in_peace(reward: Reward, share: tuple[float, float]) -> None:
    plan = a_plan()
    assert seen(plan, study(plan, share, reward)) == []


def test_an_arm_that_wins_and_one_that_loses_at_both_are_no_contradiction() -> None:
    plan = a_plan()
    first, second = (arm.name for arm in plan.arms)
    trials = [a_trial(plan, first, seed, (0.4, 0.9), plain) for seed in range(4)]
    trials += [a_trial(plan, second, seed, (0.4, 0.0), plain) for seed in range(4)]
    assert seen(plan, trials) == []


def test_a_reward_that_says_nothing_of_success_hardly_ever_takes_a_verdict() -> None:
    plan = a_plan()
    taken = 0
    for number in range(200):
        rng = random.Random(number)

        def noise(_: random.Random, __: bool, rng: random.Random = rng) -> float:
            return rng.random()

        trials = [
            a_trial(plan, arm.name, 1000 * number + seed, (0.3, 0.3), noise) for arm in plan.arms for seed in range(4)
        ]
        taken += any(finding.severity == "invalid" for finding in seen(plan, trials))
    assert taken <= 18  # at 5 % more has a chance below 1 in 100


def test_a_declared_metric_counts_where_nothing_is_said_of_success_and_less_may_be_better() -> None:
    plan = a_plan(TRUE)
    trials = []
    for one in study(plan, (0.2, 0.05), contrary):
        series = dict(one.series)
        for when in ("before", "after"):
            line = series.pop(f"eval_success_{when}")
            series[heldout_outcome("mistakes", when)] = [(index, 1.0 - value) for index, value in line]
        series[trained_outcome("mistakes")] = [(step, 0.5) for step in range(1, 5)]
        trials.append(one.model_copy(update={"series": series}))
    findings = seen(plan, trials)
    assert {finding.severity for finding in findings} == {"invalid"}
    assert "errors" in findings[0].text


def test_trials_that_say_nothing_of_what_is_wanted_are_not_called_healthy() -> None:
    plan = a_plan()
    [finding] = seen(plan, [done_trial(plan, plan.arms[0].name, 0, 0.3)])
    assert finding.severity == "unchecked"


def test_plans_without_the_sentinel_are_judged_as_before() -> None:
    plan = a_plan().model_copy(update={"sentinels": ()})
    assert conclude(plan, study(plan, (0.1, 0.02), contrary)).findings == ()
