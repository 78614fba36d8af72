"""A metric of training episodes gives no verdict where held-out tasks say the opposite."""

from __future__ import annotations

import random

import pytest

from researcher.analysis.opposed import NAME, worse_on_heldout
from researcher.analysis.sentinels import inspect
from researcher.analysis.verdicts import conclude
from researcher.instruments.instrument import Metric, MetricKind
from researcher.models import TrialRecord
from researcher.study.plan import PLANNED_SENTINELS, Plan, Verdict
from tests.fakes.study import METRIC, done_trial, study_plan

TASKS, EACH = 12, 2


def a_plan(kind: MetricKind = "auc_reward") -> Plan:
    measured: Metric = METRIC.model_copy(update={"kind": kind})
    return study_plan(metrics=(measured,), sentinels=(NAME,), heldout_tasks=TASKS, heldout_episodes=EACH, margin=0.1)


def a_trial(plan: Plan, arm: str, seed: int, value: float, held_out: float, noise: float = 0.05) -> TrialRecord:
    """held_out: share of held-out episodes with a reward of 1."""
    rng = random.Random(f"{arm} {seed} {value} {held_out}")
    share = held_out + rng.gauss(0.0, noise)
    trial = done_trial(plan, arm, seed, value + rng.gauss(0.0, 0.01))
    after = [(index, float(rng.random() < share)) for index in range(TASKS * EACH)]
    return trial.model_copy(update={"series": {**trial.series, "eval_reward_after": after}})


def a_study(plan: Plan, gain: float, held_out: tuple[float, float], seeds: int = 4) -> list[TrialRecord]:
    baseline, treatment = (arm.name for arm in plan.arms)
    return [
        *(a_trial(plan, baseline, seed, 0.3, held_out[0]) for seed in range(seeds)),
        *(a_trial(plan, treatment, seed, 0.3 + gain, held_out[1]) for seed in range(seeds)),
    ]


def test_new_plans_ask_it() -> None:
    assert NAME in PLANNED_SENTINELS


def test_a_gain_in_training_that_costs_held_out_tasks_is_no_result() -> None:
    plan = a_plan()
    trials = a_study(plan, 0.2, (0.6, 0.1))
    (found,) = inspect(plan, trials)
    assert (found.severity, found.hypotheses) == ("invalid", (plan.hypotheses[0].id,))
    assert found.value is not None
    assert found.value < -0.2
    (record,) = conclude(plan, trials).verdicts
    assert record.verdict is Verdict.INVALID
    assert record.sentinels == (NAME,)


def test_a_loss_in_training_that_held_out_tasks_contradict_is_no_result_either() -> None:
    plan = a_plan()
    (record,) = conclude(plan, a_study(plan, -0.2, (0.1, 0.6))).verdicts
    assert record.verdict is Verdict.INVALID


@pytest.mark.parametrize(
    ("gain", "held_out"),
    [(0.2, (0.3, 0.6)), (0.2, (0.5, 0.5)), (0.02, (0.6, 0.1)), (-0.2, (0.6, 0.1))],
    ids=["both", "no difference", "nothing gained", "both lost"],
)
def test_what_does_not_contradict_is_left_in_peace(gain: float, held_out: tuple[float, float]) -> None:
    plan = a_plan()
    assert inspect(plan, a_study(plan, gain, held_out)) == []


def test_metrics_of_held_out_tasks_are_not_asked() -> None:
    plan = a_plan("heldout_reward")
    assert inspect(plan, a_study(plan, 0.2, (0.6, 0.1))) == []


def test_without_held_out_episodes_it_says_that_it_cannot_tell() -> None:
    plan = a_plan()
    bare = [trial.model_copy(update={"series": {}}) for trial in a_study(plan, 0.2, (0.6, 0.1))]
    assert [each.severity for each in worse_on_heldout(NAME, plan, bare)] == ["unchecked"]


def test_it_fires_by_chance_in_five_of_a_hundred_studies_at_most() -> None:
    """In a null world whose arms look different in training by luck alone."""
    plan = a_plan()
    fired = 0
    for study in range(200):
        shift = random.Random(study).choice((-0.1, 0.1))
        trials = a_study(plan, shift + study * 1e-9, (0.5, 0.5), seeds=3)
        fired += len(inspect(plan, trials))
    assert fired <= 18  # a binomial of 200 at 5 % exceeds this once in a hundred
