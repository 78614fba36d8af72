"""Seeds are counted on σ's upper bound, by statsmodels."""

from __future__ import annotations

import math
import secrets

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import TTestIndPower

from researcher.analysis.comparisons import BOOTSTRAP_FROM
from researcher.analysis.power import (
    IQM_VARIANCE,
    MOST_SEEDS,
    detectable_effect,
    hypothesis_power,
    hypothesis_seeds,
    measured_noise,
    noise_floor,
    planning_alpha,
    power_of,
    seeds_needed,
)
from researcher.analysis.samples import NotEnoughTrials
from researcher.models import TrialRecord, TrialStatus
from researcher.study.plan import Stage, StageKind
from tests.fakes.example_plan import ARMS, example_plan

METRIC = "heldout_accuracy"


def test_sigma_has_an_upper_confidence_bound() -> None:
    floor = noise_floor([[1.0, 2.0, 3.0]], metric="auc", confidence=0.8)
    assert floor.sigma == pytest.approx(1.0)
    assert floor.upper == pytest.approx(math.sqrt(2 / 0.4462871))
    pooled = noise_floor([[1.0, 2.0, 3.0], [11.0, 12.0, 13.0]], metric="auc", confidence=0.8)
    assert pooled.sigma == pytest.approx(1.0)
    assert pooled.upper < floor.upper


def test_seeds_that_agree_by_chance_are_no_proof_that_there_is_no_noise() -> None:
    floor = Stage(id="noise-floor", kind=StageKind.NOISE_FLOOR, arms=ARMS[:1], seeds=3, max_seeds=3)
    plan = example_plan(stages=(floor, *example_plan().stages), heldout_tasks=24, heldout_episodes=2)
    done = {"study_id": "s", "stage": floor.id, "arm": ARMS[0], "status": TrialStatus.DONE, "finals": {METRIC: 0.75}}
    trials = [TrialRecord(key=f"k{seed}", seed=seed, **done) for seed in range(3)]
    assert measured_noise(plan, trials, METRIC).upper == 0.0
    found = measured_noise(plan.model_copy(update={"sampling_floor": True}), trials, METRIC)
    assert found.sigma == 0.0
    assert found.upper == pytest.approx(math.sqrt(0.75 * 0.25 / 48))


def test_one_trial_is_no_noise_floor() -> None:
    with pytest.raises(NotEnoughTrials):
        noise_floor([[1.0], [2.0]], metric="auc", confidence=0.8)


@pytest.mark.parametrize(("effect", "n"), [(2.03, 5), (1.0, 17), (0.94, 19), (0.5, 77)])
def test_seeds_needed_are_the_fewest_that_reach_the_power(effect: float, n: int) -> None:
    found = seeds_needed(sigma=1.0, effect=effect, alpha=0.05, power=0.8)
    assert found == n
    assert power_of(n, sigma=1.0, effect=effect, alpha=0.05) >= 0.8
    assert power_of(n - 1, sigma=1.0, effect=effect, alpha=0.05) < 0.8


def test_between_means_and_interquartile_means_there_is_no_count_that_promises_too_much() -> None:
    few, many = BOOTSTRAP_FROM - 1, BOOTSTRAP_FROM
    at_few, at_many = (power_of(seeds, sigma=1.0, effect=0.93, alpha=0.05) for seeds in (few, many))
    assert at_many < at_few < 0.8
    needed = seeds_needed(sigma=1.0, effect=0.93, alpha=0.05, power=0.8)
    assert needed > many + 1
    assert power_of(needed, sigma=1.0, effect=0.93, alpha=0.05) >= 0.8
    assert detectable_effect(many, sigma=1.0, alpha=0.05, power=0.8) > detectable_effect(
        few, sigma=1.0, alpha=0.05, power=0.8
    )


def test_interquartile_means_vary_by_as_much_more_than_means_as_power_counts_with() -> None:
    seed, n = secrets.randbits(32), BOOTSTRAP_FROM
    print(f"seed of this simulation: {seed}")  # noqa: T201 - shown by pytest when the test fails
    drawn = np.random.default_rng(seed).normal(size=(100_000, n))
    found = n * float(np.var(stats.trim_mean(drawn, 0.25, axis=1)))
    assert found == pytest.approx(IQM_VARIANCE, rel=0.03)
    z = float(stats.norm.ppf(0.75))
    assert pytest.approx(4 * (0.5 - 2 * z * float(stats.norm.pdf(z)) + z * z / 2), abs=1e-3) == IQM_VARIANCE


@pytest.mark.parametrize(("seeds", "reached"), [(18, True), (20, False)])
def test_where_fewer_seeds_show_more_the_plan_may_run_fewer(seeds: int, reached: bool) -> None:
    """Seeds 0 to 2 of the noise floor have a σ with which 19 seeds show the planned effect and 20 do not."""
    compare = Stage(id="compare", kind=StageKind.COMPARE, arms=ARMS, seeds=seeds, max_seeds=20)
    floor = Stage(id="noise-floor", kind=StageKind.NOISE_FLOOR, arms=ARMS[:1], seeds=3, max_seeds=3)
    plan = example_plan(stages=(floor, compare))
    alpha = planning_alpha(plan, plan.hypotheses[0])
    upper = plan.planned_effect / detectable_effect(19, sigma=1.0, alpha=alpha, power=plan.power) * 0.999
    spread = upper * math.sqrt(float(stats.chi2.ppf(1 - plan.sigma_confidence, 2)) / 2)
    done = {"study_id": "s", "stage": floor.id, "arm": ARMS[0], "status": TrialStatus.DONE}
    trials = [
        TrialRecord(key=f"k{seed}", seed=seed, finals={METRIC: 0.5 + offset * spread}, **done)
        for seed, offset in enumerate((-1, 0, 1))
    ]
    assert (hypothesis_power(plan, plan.hypotheses[0], trials) >= plan.power) is reached
    assert hypothesis_seeds(plan, plan.hypotheses[0], trials) == 19


def test_what_n_seeds_can_detect_is_the_other_side_of_the_same_coin() -> None:
    effect = detectable_effect(5, sigma=0.3, alpha=0.05, power=0.8)
    assert power_of(5, sigma=0.3, effect=effect, alpha=0.05) == pytest.approx(0.8, abs=1e-6)
    expected = TTestIndPower().solve_power(nobs1=5, alpha=0.05, power=0.8, ratio=1.0) * 0.3
    assert effect == pytest.approx(float(expected), rel=1e-6)


def test_no_noise_and_hopeless_noise_have_answers_too() -> None:
    assert seeds_needed(sigma=0.0, effect=0.1, alpha=0.05, power=0.8) == 2
    assert seeds_needed(sigma=1e6, effect=0.1, alpha=0.05, power=0.8) == MOST_SEEDS
    assert power_of(3, sigma=1e-9, effect=1.0, alpha=0.05) == pytest.approx(1.0)
    assert detectable_effect(1, sigma=1.0, alpha=0.05, power=0.8) == math.inf
