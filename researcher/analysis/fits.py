"""Effects that are fitted to all trials at once, by statsmodels' least squares: a trend's slope, a screen's main effects.

The unit is the trial. A regressor is 0 at the baseline's end and 1 at the treatment's, so that its coefficient is the effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from researcher.analysis.comparisons import Method, is_flat
from researcher.study.plan import Hypothesis, Plan


def places(plan: Plan, hypothesis: Hypothesis) -> dict[str, float]:
    """Of a trend: where each arm lies from its lowest level (0) to its highest (1), on the factor's own scale."""
    factor = next(each for each in plan.factors if each.name == hypothesis.factor)
    arms = (*hypothesis.baselines, *hypothesis.between_arms, *hypothesis.treatments)
    levels = {arm: float(plan.arm(arm).levels[factor.name]) for arm in arms}
    scaled = {arm: math.log(level) if factor.scale == "log" else level for arm, level in levels.items()}
    low, high = scaled[hypothesis.baseline], scaled[hypothesis.treatment]
    return {arm: (at - low) / (high - low) for arm, at in scaled.items()}


def regressors(plan: Plan, hypothesis: Hypothesis) -> tuple[Method, dict[str, tuple[float, ...]]]:
    """By arm, with that of this hypothesis first. Of a screen, with those of all other factors behind it."""
    if hypothesis.between_arms:
        return "slope", {arm: (at,) for arm, at in places(plan, hypothesis).items()}
    each = [hypothesis, *(other for other in plan.hypotheses if other.id != hypothesis.id)]
    return "main_effects", {
        arm: tuple(float(arm in one.treatments) for one in each) for arm in sorted(hypothesis.sides)
    }


@dataclass(frozen=True, slots=True)
class Fit:
    """An effect with its t interval (see `comparisons.Comparison`). flat: seeds do not vary in any arm."""

    method: Method
    centres: tuple[float, float]
    result: Any
    """statsmodels' results; the second coefficient is the effect."""
    flat: bool
    p_lack_of_fit: float | None
    """Of the arms' means, against the line; None where there are no more arms than coefficients."""

    @classmethod
    def of(cls, method: Method, values: Mapping[str, Sequence[float]], columns: Mapping[str, Sequence[float]]) -> Self:
        """values: of finished trials, by arm. columns: the regressors of each arm.

        Raises: ValueError where no arm has two trials, or the arms that have some do not tell the effects apart.
        """
        from statsmodels.regression.linear_model import OLS

        arms = [arm for arm, own in values.items() for _ in own]
        y = np.array([value for own in values.values() for value in own])
        x = np.array([(1.0, *columns[arm]) for arm in arms])
        if max((len(own) for own in values.values()), default=0) < 2:
            raise ValueError("no arm has two finished trials")
        if len(y) <= x.shape[1] or np.linalg.matrix_rank(x) < x.shape[1]:
            raise ValueError("too few of the arms have finished trials to tell the effects apart")
        fitted = OLS(y, x).fit()
        start = float(fitted.params[0] + x[:, 2:].mean(axis=0) @ fitted.params[2:])
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
