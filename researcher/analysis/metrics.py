"""Computes a trial's metrics from what the server recorded. Clients never report these numbers themselves.

Knows the kinds of `Metric` and the names of docs/reference/metrics.md, but no arms, plans or verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from researcher.analysis.samples import judged_stage, seeds_of
from researcher.instruments.instrument import UNTIL, Metric, heldout_outcome, trained_outcome
from researcher.models import TrialRecord, TrialStatus
from researcher.study.plan import Hypothesis, Plan

Series = Mapping[str, Sequence[tuple[int, float]]]


class MetricMissing(ValueError):
    """Raised when a metric cannot be computed from what was recorded; the text names what is missing (invariant I5)."""


def finals(metrics: Sequence[Metric], series: Series) -> dict[str, float]:
    """Return every metric of one trial by name.

    A threshold that was never reached counts as reached one step after the last (see `never_reached`); that step is assumed to take
    as long as the average step.

    Args:
        series: per-step metrics and, by episode index, `eval_reward_before|after` and `eval_success_before|after`.

    Raises: MetricMissing when a series is absent, has gaps or holds a value that is not finite.
    """
    return {metric.name: _final(metric, of_part(series, metric.part)) for metric in metrics}


def of_part(series: Series, part: str | None) -> Series:
    """Return the series of a further model or of another instrument without their prefix. `part` is as in `Metric.part`."""
    if part is None:
        return series
    before = f"{part}/"
    return {name.removeprefix(before): line for name, line in series.items() if name.startswith(before)}


def never_reached(metric: Metric, series: Series) -> bool:
    """True if the metric has a threshold that this trial never reached."""
    return metric.kind in UNTIL and _reached_at(metric, of_part(series, metric.part)) is None


def _final(metric: Metric, series: Series) -> float:
    match metric.kind:
        case "heldout_accuracy" | "heldout_reward":
            return _heldout(metric, series)
        case "auc_reward":
            steps, values = _steps(metric, series, "reward_mean")
            return float(values[0]) if len(values) == 1 else float(np.trapezoid(values, steps) / (steps[-1] - steps[0]))
        case "final_reward":
            _, values = _steps(metric, series, "reward_mean")
            return float(np.mean(_last_quarter(values)))
        case "entropy_final":
            _, values = _steps(metric, series, "entropy")
            return float(np.mean(_last_quarter(values)))
        case "steps_to_threshold":
            steps, reached = _steps(metric, series, "reward_mean")[0], _reached_at(metric, series)
            return float(steps[-1] + 1) if reached is None else float(steps[reached])
        case "seconds_to_threshold":
            seconds, reached = _steps(metric, series, "step_s")[1], _reached_at(metric, series)
            return float(np.sum(seconds) + np.mean(seconds) if reached is None else np.sum(seconds[: reached + 1]))
        case "outcome":
            return _outcome(metric, series)
        case "wall_s":
            _, values = _steps(metric, series, "step_s")
            return float(np.sum(values))
        case "tokens_sampled":
            _, values = _values(metric, series, "tokens_sampled")
            return float(np.sum(values))


def _last_quarter(values: np.ndarray) -> np.ndarray:
    return values[-math.ceil(len(values) / 4) :]


def _reached_at(metric: Metric, series: Series) -> int | None:
    """Return the index of the first step whose mean training reward reaches the threshold; None if no step does."""
    _, values = _steps(metric, series, "reward_mean")
    reached = np.flatnonzero(values >= _threshold(metric))
    return int(reached[0]) if len(reached) else None


def _outcome(metric: Metric, series: Series) -> float:
    """Return a metric that episodes report: its mean over held-out episodes, the gain of that mean, or its mean over training steps."""
    name = metric.reported_as
    if metric.when == "training":
        return float(np.mean(_values(metric, series, trained_outcome(name))[1]))
    if metric.when == "gain":
        before, after = (
            float(np.mean(_values(metric, series, heldout_outcome(name, when))[1])) for when in ("before", "after")
        )
        return after - before
    return float(np.mean(_values(metric, series, heldout_outcome(name, metric.when))[1]))


def _heldout(metric: Metric, series: Series) -> float:
    what = "success" if metric.kind == "heldout_accuracy" else "reward"
    if metric.when == "gain":
        return _eval_mean(metric, series, what, "after") - _eval_mean(metric, series, what, "before")
    return _eval_mean(metric, series, what, metric.when)


def _eval_mean(metric: Metric, series: Series, what: str, when: str) -> float:
    """Average over held-out episodes. Success must be known for every episode that has a reward."""
    name = f"eval_{what}_{when}"
    values = _values(metric, series, name)[1]
    episodes = series.get(f"eval_reward_{when}")
    if episodes is not None and len(episodes) != len(values):
        raise MetricMissing(
            f"metric {metric.name!r}: {name} has {len(values)} episodes, but eval_reward_{when} has {len(episodes)}"
        )
    return float(np.mean(values))


def _steps(metric: Metric, series: Series, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values of a per-step series. Raises MetricMissing if it has gaps."""
    steps, values = _values(metric, series, name)
    absent = sorted(set(range(int(steps[0]), int(steps[-1]) + 1)) - {int(step) for step in steps})
    if absent:
        raise MetricMissing(f"metric {metric.name!r} needs every step of {name}; missing: {absent[:5]}")
    return steps, values


def _values(metric: Metric, series: Series, name: str) -> tuple[np.ndarray, np.ndarray]:
    points = sorted(series.get(name, ()))
    if not points:
        raise MetricMissing(f"metric {metric.name!r} needs the series {name!r}, which was not recorded")
    if len({index for index, _ in points}) != len(points):
        raise MetricMissing(f"metric {metric.name!r}: {name} has two values for the same step or episode")
    if not all(math.isfinite(value) for _, value in points):
        raise MetricMissing(f"metric {metric.name!r}: {name} holds a value that is not finite")
    return np.array([index for index, _ in points], dtype=float), np.array([value for _, value in points], dtype=float)


def _threshold(metric: Metric) -> float:
    if metric.threshold is None:
        raise MetricMissing(f"metric {metric.name!r} of kind {metric.kind} has no threshold")
    return metric.threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Censored:
    """Number of finished trials on each side that never reached the metric's threshold."""

    baseline: int
    treatment: int

    @property
    def any(self) -> bool:
        return self.baseline + self.treatment > 0

    def keeps_sign(self, diff: float) -> bool:
        """True if larger values of the censored trials could not change the sign of `diff`."""
        return not (self.baseline if diff > 0 else self.treatment)


def censored(plan: Plan, hypothesis: Hypothesis, trials: Sequence[TrialRecord]) -> Censored:
    """Count the censored trials among those that decide the hypothesis.

    Raises: MetricMissing when the metric has a threshold and its series was not recorded.
    """
    between = hypothesis.between_arms  # a censored trial between the ends may tilt the fitted line either way
    within, metric = seeds_of(plan, judged_stage(plan, hypothesis, trials), trials), plan.metric(hypothesis.metric)
    return Censored(
        baseline=count_censored(metric, [trial for trial in within if trial.arm in (*hypothesis.baselines, *between)]),
        treatment=count_censored(
            metric, [trial for trial in within if trial.arm in (*hypothesis.treatments, *between)]
        ),
    )


def count_censored(metric: Metric, trials: Sequence[TrialRecord]) -> int:
    """Count the finished trials that never reached the threshold; 0 for a metric without one."""
    return sum(never_reached(metric, trial.series) for trial in trials if trial.status is TrialStatus.DONE)
