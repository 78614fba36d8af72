"""Seeds are counted on σ's upper bound, by statsmodels."""

from __future__ import annotations

import math

import pytest
from statsmodels.stats.power import TTestIndPower

from researcher.analysis.power import (
    MOST_SEEDS,
    detectable_effect,
    measured_noise,
    noise_floor,
    power_of,
    seeds_needed,
)
from researcher.analysis.samples import NotEnoughTrials
from researcher.models import Stage, StageKind, TrialRecord, TrialStatus
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
    assert (found.sigma, found.upper) == (0.0, pytest.approx(math.sqrt(0.75 * 0.25 / 48)))


def test_one_trial_is_no_noise_floor() -> None:
    with pytest.raises(NotEnoughTrials):
        noise_floor([[1.0], [2.0]], metric="auc", confidence=0.8)


@pytest.mark.parametrize(("effect", "n"), [(2.03, 5), (1.0, 17), (0.5, 64)])
def test_seeds_needed_are_the_fewest_that_reach_the_power(effect: float, n: int) -> None:
    found = seeds_needed(sigma=1.0, effect=effect, alpha=0.05, power=0.8)
    assert found == n
    assert power_of(n, sigma=1.0, effect=effect, alpha=0.05) >= 0.8
    assert power_of(n - 1, sigma=1.0, effect=effect, alpha=0.05) < 0.8


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
