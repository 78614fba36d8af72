"""Slopes and main effects against textbook formulas, and how often trends of nothing are claimed."""

from __future__ import annotations

import itertools
import secrets
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.formula.api import ols
from statsmodels.stats.anova import anova_lm

from bench.made_up_studies import METRIC, instrument
from researcher.analysis.comparisons import Fit
from researcher.analysis.effects import effects
from researcher.analysis.power import seeds_needed, side_sigma
from researcher.analysis.verdicts import verdict
from researcher.design.planning import plan_of
from researcher.models import Effect, TrialRecord, TrialStatus
from researcher.study.plan import Plan, Verdict
from researcher.study.spec import StudySpec

CONFIDENCE = 0.999
PLACES = {"a": (0.0,), "b": (0.3,), "c": (1.0,)}
VALUES = {"a": [0.10, 0.14, 0.12], "b": [0.21, 0.17], "c": [0.30, 0.36, 0.35, 0.31]}


def spread() -> tuple[np.ndarray, np.ndarray]:
    x = np.array([PLACES[arm][0] for arm, own in VALUES.items() for _ in own])
    return x, np.array([value for own in VALUES.values() for value in own])


def test_a_slope_has_the_textbook_estimate_interval_and_p_values() -> None:
    fit, (x, y) = Fit.of("slope", VALUES, PLACES), spread()
    line = stats.linregress(x, y)
    assert fit.centres == pytest.approx((line.intercept, line.intercept + line.slope))
    assert fit.p_value == pytest.approx(line.pvalue)
    reach = stats.t.ppf(0.975, len(y) - 2) * line.stderr
    assert fit.interval(0.05) == pytest.approx((line.slope - reach, line.slope + reach))
    margin = line.slope + 0.03
    by_hand = stats.t.cdf((line.slope - margin) / line.stderr, len(y) - 2)
    assert fit.p_equivalence(margin) == pytest.approx(by_hand)


def test_the_lack_of_fit_is_that_of_the_means_against_the_line() -> None:
    x, y = spread()
    data = pd.DataFrame({"x": x, "y": y})
    table = anova_lm(ols("y ~ x", data).fit(), ols("y ~ C(x)", data).fit())
    assert Fit.of("slope", VALUES, PLACES).p_lack_of_fit == pytest.approx(table["Pr(>F)"].iloc[1])


def test_main_effects_are_those_of_one_model_with_all_factors() -> None:
    columns = {f"{a}{b}": (float(a), float(b)) for a, b in itertools.product((0, 1), repeat=2)}
    values = {"00": [0.1, 0.12], "01": [0.2, 0.19], "10": [0.33, 0.3], "11": [0.41, 0.44]}
    rows = [(*columns[arm], value) for arm, own in values.items() for value in own]
    data = pd.DataFrame(rows, columns=["a", "b", "y"])
    model = ols("y ~ a + b", data).fit()
    fit = Fit.of("main_effects", values, columns)
    sides = [np.mean([values[f"{a}{b}"] for b in (0, 1)]) for a in (0, 1)]
    assert fit.centres == pytest.approx(tuple(sides))
    assert fit.centres[1] - fit.centres[0] == pytest.approx(model.params["a"])
    assert fit.interval(0.05) == pytest.approx(tuple(model.conf_int().loc["a"]))
    assert fit.p_lack_of_fit is None


def test_arms_of_a_screen_have_their_own_means_and_the_spread_of_all() -> None:
    values = {"a": [0.1, 0.14], "b": [0.3, 0.36], "c": [0.2, 0.21]}
    rows = [(arm, value) for arm, own in values.items() for value in own]
    model = ols("y ~ C(arm)", pd.DataFrame(rows, columns=["arm", "y"])).fit()
    fit = Fit.of("arm_means", values, {"a": (0.0, 0.0), "b": (1.0, 0.0), "c": (0.0, 1.0)})
    assert fit.centres == pytest.approx((0.12, 0.33))
    assert fit.interval(0.05) == pytest.approx(tuple(model.conf_int().loc["C(arm)[T.b]"]))
    assert fit.p_value == pytest.approx(model.pvalues["C(arm)[T.b]"])


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ValueError, match="no arm has two"):
        Fit.of("slope", {arm: own[:1] for arm, own in VALUES.items()}, PLACES)
    with pytest.raises(ValueError, match="too few arms"):
        Fit.of("slope", {"a": VALUES["a"], "b": [], "c": []}, PLACES)


# -- rates --------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[300, pytest.param(3000, marks=pytest.mark.campaign)])
def count(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def rng() -> np.random.Generator:
    seed = secrets.randbits(32)
    print(f"\nseed of this simulation: {seed}")  # noqa: T201 - shown by pytest when the test fails
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def plan() -> Plan:
    spec: dict[str, Any] = {"question": "q", "instrument": "simulation", "design": "trend", "claim": "increase"}
    spec |= {"compare": {"learning_rate": {"levels": [1e-5, 2e-5, 4e-5, 8e-5]}}, "seeds": {"min": 2}}
    return plan_of(StudySpec.model_validate(spec), instrument())


def trials_of(
    plan: Plan, change: float, sigma: float, n: int, draw: np.random.Generator, *, shared: float = 0.0
) -> list[TrialRecord]:
    """shared: standard deviation of what a seed does to all arms."""
    by_seed = draw.normal(0, shared, n) if shared else np.zeros(n)
    return [
        TrialRecord.model_construct(
            key=f"{arm.name}/{seed}",
            study_id="s",
            stage="compare",
            arm=arm.name,
            seed=seed,
            status=TrialStatus.DONE,
            finals={METRIC: float(draw.normal(0.2 + change * place / 3, sigma) + by_seed[seed])},
            series={},
            evidence=None,
        )
        for place, arm in enumerate(plan.arms)
        for seed in range(n)
    ]


def judged(plan: Plan, trials: list[TrialRecord]) -> tuple[Effect, Verdict]:
    effect = effects(plan, trials)["H1"]
    assert isinstance(effect, Effect)
    return effect, verdict(plan, plan.hypotheses[0], effect, [], trials).verdict


def bounds(hits: list[bool]) -> tuple[float, float]:
    interval = stats.binomtest(sum(hits), len(hits)).proportion_ci(CONFIDENCE, method="exact")
    return float(interval.low), float(interval.high)


@pytest.mark.parametrize("shared", [0.0, 0.1])
def test_trends_of_nothing_are_rejected_in_at_most_five_percent_and_supported_in_half_of_that(
    plan: Plan, rng: np.random.Generator, count: int, shared: float
) -> None:
    found = [judged(plan, trials_of(plan, 0.0, 0.1, 3, rng, shared=shared)) for _ in range(count)]
    low, _ = bounds([effect.p_value <= 0.05 for effect, _ in found])
    assert low <= 0.05, f"false rejections begin at {low:.3f}"
    low, _ = bounds([said is Verdict.SUPPORTED for _, said in found])
    assert low <= 0.025, f"false support begins at {low:.3f}"


def test_a_trend_as_large_as_the_margin_is_called_equivalent_in_at_most_five_percent_and_its_interval_covers(
    plan: Plan, rng: np.random.Generator, count: int
) -> None:
    found = [judged(plan, trials_of(plan, 0.1, 0.03, 4, rng)) for _ in range(count)]
    low, _ = bounds([said is Verdict.EQUIVALENT for _, said in found])
    assert low <= 0.05, f"false equivalence begins at {low:.3f}"
    _, high = bounds([effect.low <= 0.1 <= effect.high for effect, _ in found])
    assert high >= 0.95, f"coverage ends at {high:.3f}"


def test_the_planned_seeds_reach_the_planned_power(plan: Plan, rng: np.random.Generator, count: int) -> None:
    sigma = 0.15
    n = seeds_needed(sigma=side_sigma(plan, plan.hypotheses[0], sigma), effect=0.15, alpha=0.05, power=0.8)
    found = [judged(plan, trials_of(plan, plan.planned_effect, sigma, n, rng))[0] for _ in range(count)]
    _, high = bounds([effect.low > 0 for effect in found])
    assert high >= 0.8, f"power with {n} seeds ends at {high:.3f}"
