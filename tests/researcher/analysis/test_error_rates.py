"""False positives, power and coverage over thousands of made-up studies, through the functions that judge real ones.

Seeds are drawn when the test runs, and printed. A rate fails only when its exact binomial interval excludes the target.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from scipy import stats

from researcher.analysis.effects import effects
from researcher.analysis.power import seeds_needed
from researcher.analysis.verdicts import verdict
from researcher.models import Effect, TrialRecord, TrialStatus
from researcher.study.plan import Plan, Verdict
from tests.fakes.study import study_plan

CONFIDENCE = 0.999
"""Of the binomial interval: five rates are checked, and a sound one should fail once in hundreds of runs."""


@pytest.fixture(params=[300, pytest.param(3000, marks=pytest.mark.campaign)])
def count(request: pytest.FixtureRequest) -> int:
    """Studies to make up."""
    return int(request.param)


@pytest.fixture
def rng() -> np.random.Generator:
    seed = secrets.randbits(32)
    print(f"\nseed of this simulation: {seed}")  # noqa: T201 - shown by pytest when the test fails
    return np.random.default_rng(seed)


def studies(
    plan: Plan, means: dict[str, float], sigma: float, n: int, draw: np.random.Generator, count: int
) -> Iterator[tuple[dict[str, Effect], list[TrialRecord]]]:
    for _ in range(count):
        trials = [
            TrialRecord.model_construct(
                key=f"{arm}/{seed}",
                study_id="s",
                stage="compare",
                arm=arm,
                seed=seed,
                status=TrialStatus.DONE,
                finals={"auc": float(value)},
                series={},
                evidence=None,
            )
            for arm, mean in means.items()
            for seed, value in enumerate(draw.normal(mean, sigma, n))
        ]
        measured = effects(plan, trials)
        yield {name: effect for name, effect in measured.items() if isinstance(effect, Effect)}, trials


def rate(
    hit: Callable[[dict[str, Effect], list[TrialRecord]], bool],
    drawn: Iterator[tuple[dict[str, Effect], list[TrialRecord]]],
) -> tuple[float, float]:
    """Exact binomial interval of the share of studies in which `hit` holds."""
    hits = [hit(found, trials) for found, trials in drawn]
    interval = stats.binomtest(sum(hits), len(hits)).proportion_ci(CONFIDENCE, method="exact")
    return float(interval.low), float(interval.high)


def test_intervals_cover_the_true_difference_as_often_as_they_say(rng: np.random.Generator, count: int) -> None:
    plan = study_plan(seeds=4)
    drawn = studies(plan, {"lr=base": 0.2, "lr=4e-05": 0.3}, 0.1, 4, rng, count)
    low, high = rate(lambda found, _: found["H1"].low <= 0.1 <= found["H1"].high, drawn)
    # Welch's approximation is a little conservative with four seeds: it may cover more, never less.
    assert high >= 0.95, f"coverage lies in [{low:.3f}, {high:.3f}]"


def test_two_true_nulls_are_rejected_in_at_most_five_percent_of_studies(rng: np.random.Generator, count: int) -> None:
    plan = study_plan((2e-5, 4e-5))
    drawn = studies(plan, {"lr=base": 0.2, "lr=2e-05": 0.2, "lr=4e-05": 0.2}, 0.1, 5, rng, count)
    low, high = rate(lambda found, _: any(effect.p_adjusted <= 0.05 for effect in found.values()), drawn)
    assert low <= 0.05, f"the family-wise error rate lies in [{low:.3f}, {high:.3f}]"


def test_the_planned_seeds_reach_the_planned_power(rng: np.random.Generator, count: int) -> None:
    sigma = 0.1
    n = seeds_needed(sigma=sigma, effect=0.15, alpha=0.05, power=0.8)
    plan = study_plan(max_seeds=n)
    assert (plan.planned_effect, plan.power) == pytest.approx((0.15, 0.8))
    drawn = studies(plan, {"lr=base": 0.2, "lr=4e-05": 0.2 + plan.planned_effect}, sigma, n, rng, count)
    low, high = rate(lambda found, _: found["H1"].low > 0, drawn)
    assert high >= plan.power, f"power with {n} seeds lies in [{low:.3f}, {high:.3f}]"


def test_a_null_study_is_called_supported_in_at_most_half_of_five_percent(rng: np.random.Generator, count: int) -> None:
    plan = study_plan()

    def supported(found: dict[str, Effect], trials: list[TrialRecord]) -> bool:
        return verdict(plan, plan.hypotheses[0], found["H1"], [], trials).verdict is Verdict.SUPPORTED

    low, high = rate(supported, studies(plan, {"lr=base": 0.2, "lr=4e-05": 0.2}, 0.1, 3, rng, count))
    assert low <= 0.025, f"false support lies in [{low:.3f}, {high:.3f}]"


def test_an_effect_as_large_as_the_margin_is_called_equivalent_in_at_most_five_percent(
    rng: np.random.Generator,
    count: int,
) -> None:
    plan = study_plan()

    def equivalent(found: dict[str, Effect], trials: list[TrialRecord]) -> bool:
        return verdict(plan, plan.hypotheses[0], found["H1"], [], trials).verdict is Verdict.EQUIVALENT

    low, high = rate(equivalent, studies(plan, {"lr=base": 0.2, "lr=4e-05": 0.3}, 0.03, 5, rng, count))
    assert low <= 0.05, f"false equivalence lies in [{low:.3f}, {high:.3f}]"
