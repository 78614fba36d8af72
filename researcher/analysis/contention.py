"""Sentinels of a machine that was shared: trials far slower than others of the same arm.

Within an arm: arms may differ in speed by what they vary. Only what is compared by wall time becomes invalid.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from researcher.analysis.sightings import SentinelFinding, finding, series, unchecked
from researcher.instruments.instrument import TIMED
from researcher.models import TrialRecord
from researcher.study.plan import Plan

SLOW = 2.0
_SHARED = "steps of some trials took far longer than those of the same arm: the machine was shared"


def shared_machine(name: str, plan: Plan, done: Sequence[TrialRecord]) -> list[SentinelFinding]:
    """Each trial against the median of the others of its arm: by its median step, or by the sum of its steps where that is what is
    compared."""
    timed = _timed(plan)
    unseen: list[TrialRecord] = []
    hits: list[tuple[TrialRecord, float]] = []
    for arm in plan.arms:
        own = [trial for trial in done if trial.arm == arm.name]
        taken = {trial.key: _seconds(trial, whole=timed) for trial in own if trial.series.get("step_s")}
        unseen += [trial for trial in own if trial.key not in taken or len(taken) < 2]
        for trial in own:
            others = [seconds for key, seconds in taken.items() if key != trial.key]
            if trial.key in taken and others and taken[trial.key] > SLOW * float(np.median(others)) > 0:
                hits.append((trial, taken[trial.key] / float(np.median(others))))
    found = [finding(name, "invalid" if timed else "warning", _SHARED, hits)] if hits else []
    return found + ([unchecked(name, unseen)] if unseen else [])


def contention(name: str, plan: Plan, done: Sequence[TrialRecord]) -> list[SentinelFinding]:
    """As plans name it that were made before `shared_machine`: against the median of the whole arm, the slow trial's own in it."""
    timed = _timed(plan)
    found = []
    for arm in plan.arms:
        own = [trial for trial in done if trial.arm == arm.name]
        if any("step_s" not in trial.series for trial in own):
            return [unchecked(name)]
        medians = {trial.key: float(np.median(series(trial, "step_s"))) for trial in own}
        usual = float(np.median(list(medians.values()))) if medians else 0.0
        slow = [key for key, median in medians.items() if usual > 0 and median > SLOW * usual]
        if slow:
            hits = [(trial, medians[trial.key] / usual) for trial in own if trial.key in slow]
            found.append(finding(name, "invalid" if timed else "warning", _SHARED, hits))
    return found


def _timed(plan: Plan) -> bool:
    return any(plan.metric(hypothesis.metric).kind in TIMED for hypothesis in plan.hypotheses)


def _seconds(trial: TrialRecord, *, whole: bool) -> float:
    """whole: of all its steps; else of one, as it usually was."""
    step_s = series(trial, "step_s")
    return float(np.sum(step_s) if whole else np.median(step_s))
