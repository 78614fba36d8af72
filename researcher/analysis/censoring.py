"""Trials that ended before they reached a threshold, and what a difference between arms still tells with them.

Such a trial counts as one step more than its last (`metrics.never_reached`): its true value is that or larger, by nobody knows how
much. So a difference with them is a bound, and only some of its signs can be relied on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from researcher.analysis.metrics import never_reached
from researcher.analysis.samples import judged_stage, seeds_of
from researcher.instruments.instrument import Metric
from researcher.models import TrialRecord, TrialStatus
from researcher.study.plan import Hypothesis, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Censored:
    """How many finished trials of either side never reached the threshold of the metric that is compared."""

    baseline: int
    treatment: int

    @property
    def any(self) -> bool:
        return self.baseline + self.treatment > 0

    def keeps_sign(self, diff: float) -> bool:
        """Whether treatment minus baseline has the sign of `diff` whatever larger values these trials would have come to."""
        return not (self.baseline if diff > 0 else self.treatment)


def censored(plan: Plan, hypothesis: Hypothesis, trials: Sequence[TrialRecord]) -> Censored:
    """Of the trials that the hypothesis is judged by.

    Raises: MetricMissing where their metric is a threshold's and the series behind it was not recorded.
    """
    between = hypothesis.between_arms  # which may tilt a line either way
    within, metric = seeds_of(plan, judged_stage(plan, hypothesis, trials), trials), plan.metric(hypothesis.metric)
    return Censored(
        baseline=count_censored(metric, [trial for trial in within if trial.arm in (*hypothesis.baselines, *between)]),
        treatment=count_censored(
            metric, [trial for trial in within if trial.arm in (*hypothesis.treatments, *between)]
        ),
    )


def count_censored(metric: Metric, trials: Sequence[TrialRecord]) -> int:
    """Finished ones of these trials that never reached the threshold; 0 for a metric without one."""
    return sum(never_reached(metric, trial.series) for trial in trials if trial.status is TrialStatus.DONE)
