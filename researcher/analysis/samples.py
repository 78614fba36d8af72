"""A study's trials, sorted by arm: values by seed, and what failed or has not ended. The unit is the trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from researcher.models import Hypothesis, Plan, Stage, StageKind, TrialRecord, TrialStatus


class NotEnoughTrials(ValueError):
    """There are too few finished trials to say anything; the text says of which arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One arm on one metric."""

    values: dict[int, float]
    """Of the trials that are done, by seed."""
    failed: int
    open: int
    """Trials that were planned and have neither succeeded nor failed yet."""


def sample(trials: Sequence[TrialRecord], arm: str, metric: str) -> Sample:
    """The arm's values.

    Raises: ValueError when a trial is called done and has no value of this metric (invariant I5).
    """
    values: dict[int, float] = {}
    failed = unended = 0
    for trial in trials:
        if trial.arm != arm:
            continue
        if trial.status is TrialStatus.FAILED:
            failed += 1
        elif trial.status is not TrialStatus.DONE:
            unended += 1
        elif metric not in trial.finals:
            raise ValueError(f"trial {trial.key} is done but has no {metric!r}; its metrics were never computed")
        else:
            values[trial.seed] = trial.finals[metric]
    return Sample(values=values, failed=failed, open=unended)


def deciding_stage(plan: Plan, hypothesis: Hypothesis) -> Stage:
    """The last stage that runs both arms of the hypothesis: its verdict rests on that stage's seeds."""
    both = {hypothesis.baseline, hypothesis.treatment}
    stages = [stage for stage in plan.stages if both <= set(stage.arms) and stage.kind is not StageKind.NOISE_FLOOR]
    if not stages:
        raise ValueError(f"no stage of the plan compares the arms of {hypothesis.id}")
    return stages[-1]


def seeds_of(stage: Stage, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials whose arm and seed belong to `stage`, whichever stage made them."""
    seeds = range(stage.first_seed, stage.first_seed + stage.max_seeds)
    return [trial for trial in trials if trial.arm in stage.arms and trial.seed in seeds]
