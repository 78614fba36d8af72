"""Sorts a study's trials by arm: values by seed, and which trials failed or have not ended. The unit is the trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from researcher.models import TrialRecord, TrialStatus
from researcher.study.plan import Hypothesis, Plan, Stage, StageKind


class NotEnoughTrials(ValueError):
    """Raised when there are too few finished trials to say anything; the text names the arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Values of one arm on one metric."""

    values: dict[int, float]
    """Values of finished trials, by seed."""
    failed: int
    open: int
    """Number of planned trials that have neither succeeded nor failed yet."""


def sample(trials: Sequence[TrialRecord], arm: str, metric: str) -> Sample:
    """Collect the arm's values.

    Raises: ValueError when a trial is done but has no value of this metric (invariant I5).
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


def side(plan: Plan, trials: Sequence[TrialRecord], arms: Sequence[str], metric: str) -> Sample:
    """Return the values of one side of a hypothesis by seed. With several arms, these are means at the seeds that all arms finished.

    Arms that use different seeds are matched by the position of their seeds (`Plan.shared_seed`).
    """
    each = [sample(trials, arm, metric) for arm in arms]
    placed = [
        {plan.shared_seed(arm, seed): value for seed, value in one.values.items()}
        for arm, one in zip(arms, each, strict=True)
    ]
    seeds = set.intersection(*(set(values) for values in placed))
    return Sample(
        values={seed: sum(values[seed] for values in placed) / len(each) for seed in sorted(seeds)},
        failed=sum(one.failed for one in each),
        open=sum(one.open for one in each),
    )


def deciding_stage(plan: Plan, hypothesis: Hypothesis) -> Stage:
    """Return the stage that decides the hypothesis: the last one that runs all its arms and does not just explore.

    For a screen, which only explores, this is the screen.
    """
    return _deciding_stages(plan, hypothesis)[-1]


def judged_stage(plan: Plan, hypothesis: Hypothesis, trials: Sequence[TrialRecord]) -> Stage:
    """Return the deciding stage; in a sequential design, the latest look that has begun."""
    stages = _deciding_stages(plan, hypothesis)
    if stages[-1].spends is None:
        return stages[-1]
    looks = [stage for stage in stages if stage.spends is not None]
    begun = {trial.stage for trial in trials}
    return next((look for look in reversed(looks) if look.id in begun), looks[0])


def seeds_of(plan: Plan, stage: Stage, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """List the trials whose arm and seed belong to `stage`, whichever stage ran them."""
    seeds = range(stage.first_seed, stage.first_seed + stage.max_seeds)
    return [trial for trial in trials if trial.arm in stage.arms and plan.shared_seed(trial.arm, trial.seed) in seeds]


def _deciding_stages(plan: Plan, hypothesis: Hypothesis) -> list[Stage]:
    stages = [
        stage
        for stage in plan.stages
        if hypothesis.sides <= set(stage.arms)
        and stage.kind is not StageKind.NOISE_FLOOR
        and (stage.kind is StageKind.SCREEN or not stage.explores)
    ]
    if not stages:
        raise ValueError(f"no stage of the plan compares the arms of {hypothesis.id}")
    return stages


_CLOSE = 1e-9
"""Relative difference that arithmetic on another machine may cause."""


def same_number(one: float, other: float) -> bool:
    """True if the numbers are equal up to rounding."""
    try:
        return math.isclose(one, other, rel_tol=_CLOSE, abs_tol=1e-12)
    except OverflowError:  # an integer too large for a float
        return one == other


def reaches(difference: float, margin: float) -> bool:
    """True if the difference is at least the margin, up to rounding: 0.6 - 0.5 reaches 0.1, although the float is slightly smaller."""
    return difference >= margin or same_number(difference, margin)
