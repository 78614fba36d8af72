"""Sentinel for arms that look better in training but do worse afterwards.

A metric of training episodes can rise although the model learns nothing more: a lower temperature samples more right answers from
the same weights, and a learning rate that is too high wins the first steps and then ruins the model. Held-out tasks are sampled
alike in all arms, after training. For each hypothesis on such a metric the sentinel asks: if one side looks better by half a margin
or more, is its held-out reward lower? The unit is the trial. A difference counts if it exceeds both the noise between trials
(Welch's t-test) and the noise of the tasks within them (normal). All hypotheses of a study share a 5 % error rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from researcher.analysis.sentinel_findings import (
    Estimate,
    SentinelFinding,
    Unchecked,
    mean_of,
    points,
    task_means,
    unchecked,
)
from researcher.models import TrialRecord
from researcher.study.plan import Hypothesis, Plan

NAME = "worse_on_heldout"
ALPHA = 0.05
_LOOKS_BETTER = 0.5
"""Share of the margin by which a side must look better."""
_LEAST = 2
"""Minimum number of trials per side."""


def worse_on_heldout(name: str, plan: Plan, done: Sequence[TrialRecord]) -> list[SentinelFinding]:
    """Find hypotheses whose better-looking side is worse on held-out tasks."""
    asked = [hypothesis for hypothesis in plan.hypotheses if _on_training(plan, hypothesis)]
    found: list[SentinelFinding] = []
    blind: dict[str, TrialRecord] = {}
    for hypothesis in asked:
        sides = [[trial for trial in done if trial.arm in arms] for arms in better_first(plan, hypothesis, done)]
        if any(len(side) < _LEAST for side in sides):
            continue
        try:
            better, other = ([_held_out(plan, trial) for trial in side] for side in sides)
        except Unchecked:
            blind |= {trial.key: trial for side in sides for trial in side}
            continue
        if _p_lower(better, other) <= ALPHA / len(asked):
            found.append(_finding(name, hypothesis, sides, mean_of(better) - mean_of(other)))
    return [*found, *([unchecked(name, [*blind.values()])] if blind else [])]


def better_first(
    plan: Plan, hypothesis: Hypothesis, done: Sequence[TrialRecord]
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the arms of the side that looks better by half a margin, then the arms of the other side; both empty if neither does."""
    metric = next(each for each in plan.metrics if each.name == hypothesis.metric)
    sides = (hypothesis.treatments, hypothesis.baselines)
    means = []
    for arms in sides:
        values = [trial.finals[metric.name] for trial in done if trial.arm in arms and metric.name in trial.finals]
        if not values:
            return (), ()
        means.append(math.fsum(values) / len(values))
    gain = (means[0] - means[1]) * (1 if metric.direction == "increase" else -1)
    if abs(gain) < _LOOKS_BETTER * hypothesis.margin:
        return (), ()
    return sides if gain > 0 else sides[::-1]


def _on_training(plan: Plan, hypothesis: Hypothesis) -> bool:
    return any(
        each.name == hypothesis.metric and each.on_training and not (each.role or each.on) for each in plan.metrics
    )


def _finding(
    name: str, hypothesis: Hypothesis, sides: Sequence[Sequence[TrialRecord]], value: float
) -> SentinelFinding:
    both = [trial for side in sides for trial in side]
    return SentinelFinding(
        name=name,
        severity="invalid",
        text="what looks better in training is worse on held-out tasks afterwards",
        arms=tuple(dict.fromkeys(trial.arm for trial in both)),
        trials=tuple(trial.key for trial in both),
        hypotheses=(hypothesis.id,),
        value=value,
    )


def _held_out(plan: Plan, trial: TrialRecord) -> Estimate:
    """Return one trial's mean reward on held-out tasks after training. Raises: Unchecked."""
    return Estimate.over([*task_means(points(trial, "eval_reward_after"), max(1, plan.heldout_episodes)).values()])


def _p_lower(better: Sequence[Estimate], other: Sequence[Estimate]) -> float:
    """Return the one-sided p-value of the hypothesis that the better side's held-out reward is not lower than the other's."""
    from scipy import stats

    drop = mean_of(other) - mean_of(better)
    if drop <= 0:
        return 1.0
    parts = [float(np.var([each.value for each in side], ddof=1)) / len(side) for side in (better, other)]
    spread = math.sqrt(math.fsum(parts))
    by_trials = 0.0
    if spread > 0:
        freedom = math.fsum(parts) ** 2 / math.fsum(
            part**2 / (len(side) - 1) for part, side in zip(parts, (better, other), strict=True)
        )
        by_trials = float(stats.t.sf(drop / spread, freedom))
    within = math.sqrt(
        math.fsum(math.fsum(each.error**2 for each in side) / len(side) ** 2 for side in (better, other))
    )
    by_tasks = float(stats.norm.sf(drop / within)) if within > 0 else 0.0
    return max(by_trials, by_tasks)
