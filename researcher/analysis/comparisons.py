"""Compares two arms on one metric in one of three ways, each computed by scipy or statsmodels.

Knows only values by seed: no plans, hypotheses or verdicts. The libraries load at the first comparison, because that takes a second
or two and most commands compare nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import numpy as np

from foundation.ids import derived_seed
from researcher.study.plan import ALPHA, Hypothesis, Plan

Values = Mapping[int, float]
"""A metric's value by seed."""
Method = Literal["welch", "paired", "bootstrap_iqm", "slope", "main_effects", "arm_means"]
"""Method of comparing two sides. `Fit` computes the last three."""

BOOTSTRAP_FROM = 20
"""Number of seeds per arm from which the interquartile mean is bootstrapped; with fewer, t intervals have better coverage."""
RESAMPLES = 4999
SMALLEST_P = 2 / (RESAMPLES + 1)
"""Smallest two-sided bootstrap p-value, reached when no resample has the other sign. At levels below it, resampling cannot decide."""
PAIRING_CONFIDENCE = 0.8
_FLAT = 1e-12
"""A standard error below this share of the values' magnitude counts as rounding, not noise."""


class Comparison(Protocol):
    """A comparison of two arms: treatment minus baseline."""

    @property
    def method(self) -> Method: ...

    @property
    def centres(self) -> tuple[float, float]:
        """Means of baseline and treatment."""

    @property
    def p_value(self) -> float:
        """Two-sided p-value for no difference."""

    def interval(self, alpha: float) -> tuple[float, float]: ...

    def p_equivalence(self, margin: float) -> float:
        """p-value of two one-sided tests (TOST); small when the difference lies within ± margin."""


def compare(
    baseline: Values, treatment: Values, method: Literal["welch", "paired"], *, alpha: float, tests: int = 1
) -> Comparison:
    """Compare two arms on these seeds; `paired` only uses seeds that both arms have.

    With many seeds, interquartile means are compared. Plain means are compared instead if the interquartile means drop all seeds
    that differ, or if the level is too small for resamples to decide.

    Args:
        alpha: level of the whole family of tests.
        tests: number of tests in the family.

    Raises: ValueError when an arm has fewer than two values or, for `paired`, when there are fewer than two shared seeds.
    """
    shared = sorted(set(baseline) & set(treatment))
    smallest = len(shared) if method == "paired" else min(len(baseline), len(treatment))
    if smallest < 2:
        raise ValueError(f"a comparison needs two trials per arm, got {smallest}")
    if method == "paired":
        return _T.paired(baseline, treatment, shared)
    means = _T.welch(baseline, treatment)
    if min(len(baseline), len(treatment)) < BOOTSTRAP_FROM or alpha / tests < SMALLEST_P:
        return means
    middles = _Bootstrap.of(baseline, treatment)
    low, high = middles.interval(alpha)
    return means if not means.flat and is_flat(high - low, *middles.centres) else middles


def pairing_pays(baseline: Values, treatment: Values, n: int, alpha: float = ALPHA) -> bool:
    """True if the noise floor's trials show that pairing `n` seeds narrows the interval at 1 - alpha.

    Uses the lower confidence bound of the correlation (Fisher's z), so that luck with few seeds does not decide.
    """
    shared = sorted(set(baseline) & set(treatment))
    pairs = len(shared)
    if pairs < 4 or n < 2:
        return False
    x, y = np.array([baseline[seed] for seed in shared]), np.array([treatment[seed] for seed in shared])
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return False
    from scipy import stats

    low = stats.pearsonr(x, y).confidence_interval(1 - 2 * (1 - PAIRING_CONFIDENCE)).low
    paired = math.sqrt(max(0.0, 1 - low)) * stats.t.ppf(1 - alpha / 2, n - 1)
    return bool(paired < stats.t.ppf(1 - alpha / 2, 2 * n - 2))


@dataclass(frozen=True, slots=True)
class _T:
    """Welch's or paired t-test, computed by statsmodels."""

    method: Method
    centres: tuple[float, float]
    test: Any
    """CompareMeans for Welch's test, or DescrStatsW of the differences for the paired test."""
    flat: bool
    """True if the values do not vary at all, so that there is no standard error to divide by."""

    @classmethod
    def welch(cls, baseline: Values, treatment: Values) -> _T:
        from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

        b, t = DescrStatsW(np.array(list(baseline.values()))), DescrStatsW(np.array(list(treatment.values())))
        spread = math.hypot(b.std_mean, t.std_mean)
        return cls("welch", (float(b.mean), float(t.mean)), CompareMeans(t, b), is_flat(spread, b.mean, t.mean))

    @classmethod
    def paired(cls, baseline: Values, treatment: Values, seeds: list[int]) -> _T:
        from statsmodels.stats.weightstats import DescrStatsW

        b, t = np.array([baseline[seed] for seed in seeds]), np.array([treatment[seed] for seed in seeds])
        test = DescrStatsW(t - b)
        centres = (float(b.mean()), float(t.mean()))
        return cls("paired", centres, test, is_flat(float(test.std_mean), *centres))

    @property
    def diff(self) -> float:
        return self.centres[1] - self.centres[0]

    @property
    def p_value(self) -> float:
        if self.flat:
            return 1.0 if is_flat(abs(self.diff), *self.centres) else 0.0
        if self.method == "paired":
            return float(self.test.ttest_mean(0.0)[1])
        return float(self.test.ttest_ind(usevar="unequal")[1])

    def interval(self, alpha: float) -> tuple[float, float]:
        if self.flat:
            return self.diff, self.diff
        if self.method == "paired":
            low, high = self.test.tconfint_mean(alpha)
        else:
            low, high = self.test.tconfint_diff(alpha, usevar="unequal")
        return float(low), float(high)

    def p_equivalence(self, margin: float) -> float:
        if self.flat:
            return 0.0 if abs(self.diff) < margin else 1.0
        if self.method == "paired":
            return float(self.test.ttost_mean(-margin, margin)[0])
        return float(self.test.ttost_ind(-margin, margin, usevar="unequal")[0])


@dataclass(frozen=True, slots=True)
class _Bootstrap:
    """Percentile bootstrap of the difference of interquartile means. The same values give the same resamples."""

    centres: tuple[float, float]
    differences: np.ndarray

    @classmethod
    def of(cls, baseline: Values, treatment: Values) -> _Bootstrap:
        from scipy import stats

        b, t = np.array(list(baseline.values())), np.array(list(treatment.values()))
        seed = derived_seed("bootstrap", *b.tolist(), "against", *t.tolist())
        drawn = stats.bootstrap(
            (t, b), _iqm_difference, n_resamples=RESAMPLES, vectorized=True, method="percentile", rng=seed
        )
        return cls((iqm(b), iqm(t)), np.asarray(drawn.bootstrap_distribution))

    @property
    def method(self) -> Method:
        return "bootstrap_iqm"

    @property
    def p_value(self) -> float:
        return min(1.0, 2 * min(self._share(self.differences <= 0), self._share(self.differences >= 0)))

    def interval(self, alpha: float) -> tuple[float, float]:
        low, high = np.quantile(self.differences, [alpha / 2, 1 - alpha / 2])
        return float(low), float(high)

    def p_equivalence(self, margin: float) -> float:
        return max(self._share(self.differences <= -margin), self._share(self.differences >= margin))

    def _share(self, hits: np.ndarray) -> float:
        """Return a bootstrap p-value. It counts the sample itself, so that it is never zero."""
        return float((np.count_nonzero(hits) + 1) / (len(self.differences) + 1))


def iqm(values: np.ndarray) -> float:
    """Return the interquartile mean."""
    from scipy import stats

    return float(stats.trim_mean(values, 0.25))


def _iqm_difference(treatment: np.ndarray, baseline: np.ndarray, axis: int = -1) -> Any:
    from scipy import stats

    return stats.trim_mean(treatment, 0.25, axis=axis) - stats.trim_mean(baseline, 0.25, axis=axis)


def is_flat(spread: float, *sizes: float) -> bool:
    return spread <= _FLAT * max(1.0, *(abs(size) for size in sizes))


def places(plan: Plan, hypothesis: Hypothesis) -> dict[str, float]:
    """Return the positions of a trend's arms, from the lowest level (0) to the highest (1), on the factor's scale."""
    factor = next(each for each in plan.factors if each.name == hypothesis.factor)
    arms = (*hypothesis.baselines, *hypothesis.between_arms, *hypothesis.treatments)
    levels = {arm: float(plan.arm(arm).levels[factor.name]) for arm in arms}
    scaled = {arm: math.log(level) if factor.scale == "log" else level for arm, level in levels.items()}
    low, high = scaled[hypothesis.baseline], scaled[hypothesis.treatment]
    return {arm: (at - low) / (high - low) for arm, at in scaled.items()}


def regressors(
    plan: Plan, hypothesis: Hypothesis, finished: Collection[str]
) -> tuple[Method, dict[str, tuple[float, ...]]]:
    """Return the values of the regressors for each arm, with the regressor of this hypothesis first.

    In a screen, the regressors of all other factors or arms follow. `finished` names the arms with a finished trial; without one, an
    arm's mean cannot be fitted.
    """
    if hypothesis.between_arms:
        return "slope", {arm: (at,) for arm, at in places(plan, hypothesis).items()}
    each = [hypothesis, *(other for other in plan.hypotheses if other.id != hypothesis.id)]
    if not hypothesis.treatment_arms:
        each = [one for one in each if one is hypothesis or one.treatment in finished]
        arms = dict.fromkeys(arm for one in each for arm in (one.baseline, one.treatment))
        return "arm_means", {arm: tuple(float(arm == one.treatment) for one in each) for arm in arms}
    return "main_effects", {
        arm: tuple(float(arm in one.treatments) for one in each) for arm in sorted(hypothesis.sides)
    }


@dataclass(frozen=True, slots=True)
class Fit:
    """An effect with its t interval, as a `Comparison`. `flat` is true if no arm varies between seeds."""

    method: Method
    centres: tuple[float, float]
    result: Any
    """Result object of statsmodels; its second coefficient is the effect."""
    flat: bool
    p_lack_of_fit: float | None
    """p-value of the F test for lack of fit, which compares the arms' means with the line. None unless there are more arms than
    coefficients.
    """

    @classmethod
    def of(cls, method: Method, values: Mapping[str, Sequence[float]], columns: Mapping[str, Sequence[float]]) -> Self:
        """Fit the effect.

        Args:
            values: values of finished trials, by arm.
            columns: regressors of each arm.

        Raises: ValueError when no arm has two trials, or the arms cannot separate the effects.
        """
        from statsmodels.regression.linear_model import OLS

        arms = [arm for arm, own in values.items() for _ in own]
        y = np.array([value for own in values.values() for value in own])
        x = np.array([(1.0, *columns[arm]) for arm in arms])
        if max((len(own) for own in values.values()), default=0) < 2:
            raise ValueError("no arm has two finished trials")
        if len(y) <= x.shape[1] or np.linalg.matrix_rank(x) < x.shape[1]:
            raise ValueError("too few arms have finished trials to tell the effects apart")
        fitted = OLS(y, x).fit()
        others = x[:, 2:].mean(axis=0) if method == "main_effects" else np.zeros(x.shape[1] - 2)
        start = float(fitted.params[0] + others @ fitted.params[2:])
        spread = math.sqrt(sum(float(np.var(own)) for own in values.values() if own))
        flat = is_flat(spread, *y)
        means = np.array([[float(arm == name) for name in dict.fromkeys(arms)] for arm in arms])
        lacks = None
        if method == "slope" and not flat and x.shape[1] < means.shape[1] < len(y):
            lacks = float(OLS(y, means).fit().compare_f_test(fitted)[1])
        return cls(method, (start, start + float(fitted.params[1])), fitted, flat, lacks)

    @property
    def p_value(self) -> float:
        if self.flat:
            return 1.0 if is_flat(abs(self.centres[1] - self.centres[0]), *self.centres) else 0.0
        return float(self.result.pvalues[1])

    def interval(self, alpha: float) -> tuple[float, float]:
        if self.flat:
            diff = self.centres[1] - self.centres[0]
            return diff, diff
        low, high = self.result.conf_int(alpha)[1]
        return float(low), float(high)

    def p_equivalence(self, margin: float) -> float:
        if self.flat:
            return 0.0 if abs(self.centres[1] - self.centres[0]) < margin else 1.0
        from scipy import stats

        effect = np.eye(len(self.result.params))[1]
        above, below = (float(self.result.t_test((effect, bound)).tvalue.item()) for bound in (-margin, margin))
        freedom = self.result.df_resid
        return max(float(stats.t.sf(above, freedom)), float(stats.t.cdf(below, freedom)))
