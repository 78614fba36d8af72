"""Two arms compared on one metric: three ways to do it, each by scipy or statsmodels.

Knows values by seed and nothing else: no plans, no hypotheses, no verdicts. The libraries are loaded by the first comparison:
they take a second or two, and most commands compare nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from foundation.ids import derived_seed

Values = Mapping[int, float]
"""A metric's value by seed."""
Method = Literal["welch", "paired", "bootstrap_iqm", "slope", "main_effects"]
"""The last two: `researcher.analysis.fits`."""

BOOTSTRAP_FROM = 20
"""Seeds per arm from which the interquartile mean is bootstrapped; below it t intervals cover better."""
RESAMPLES = 4999
SMALLEST_P = 2 / (RESAMPLES + 1)
"""The two-sided p-value where no resample has the other sign; below it resamples decide nothing."""
PAIRING_CONFIDENCE = 0.8
_FLAT = 1e-12
"""A standard error below this share of the values' size is rounding, not noise."""


class Comparison(Protocol):
    """Treatment minus baseline."""

    @property
    def method(self) -> Method: ...

    @property
    def centres(self) -> tuple[float, float]:
        """Of baseline and treatment."""

    @property
    def p_value(self) -> float:
        """Two-sided, for no difference."""

    def interval(self, alpha: float) -> tuple[float, float]: ...

    def p_equivalence(self, margin: float) -> float:
        """Two one-sided tests: small when the difference lies within ± margin."""


def compare(
    baseline: Values, treatment: Values, method: Literal["welch", "paired"], *, alpha: float, tests: int = 1
) -> Comparison:
    """The comparison for these seeds; `paired` keeps the seeds that both arms have.

    Of many seeds interquartile means are compared, but where these leave out all that differs between seeds, and at levels that
    resamples cannot decide: there means are.

    Args:  alpha: the level at which it is judged, together with all others of its family. tests: how many these are with it.
    Raises: ValueError when an arm has fewer than two values (for `paired`: fewer than two shared seeds).
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


def pairing_pays(baseline: Values, treatment: Values, n: int) -> bool:
    """Whether the noise floor's own trials show that pairing `n` seeds gives the narrower interval.

    Judged at the lower confidence bound of the correlation (Fisher's z), so that luck with few seeds does not decide.
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
    paired = math.sqrt(max(0.0, 1 - low)) * stats.t.ppf(0.975, n - 1)
    return bool(paired < stats.t.ppf(0.975, 2 * n - 2))


@dataclass(frozen=True, slots=True)
class _T:
    """Welch's or the paired t-test, as statsmodels has them."""

    method: Method
    centres: tuple[float, float]
    test: Any
    """CompareMeans (welch) or DescrStatsW of the differences (paired)."""
    flat: bool
    """No spread at all: there is no standard error to divide by."""

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
        """With the sample itself counted in: a bootstrap p-value is never zero."""
        return float((np.count_nonzero(hits) + 1) / (len(self.differences) + 1))


def iqm(values: np.ndarray) -> float:
    """Interquartile mean."""
    from scipy import stats

    return float(stats.trim_mean(values, 0.25))


def _iqm_difference(treatment: np.ndarray, baseline: np.ndarray, axis: int = -1) -> Any:
    from scipy import stats

    return stats.trim_mean(treatment, 0.25, axis=axis) - stats.trim_mean(baseline, 0.25, axis=axis)


def is_flat(spread: float, *sizes: float) -> bool:
    return spread <= _FLAT * max(1.0, *(abs(size) for size in sizes))
