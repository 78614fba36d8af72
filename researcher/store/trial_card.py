"""What every copy of the records says of a trial: its parameters, its tags, its points. Plain values; knows no sink."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from researcher.models import KINDS, TrialRecord
from researcher.study.plan import Plan
from swarm.protocol.episodes import Cause

_LONGEST_REASON = 5000


def params_of(plan: Plan | None, trial: TrialRecord) -> dict[str, object]:
    """Arm, seed, and the level of each factor."""
    levels = {} if plan is None else next((arm.levels for arm in plan.arms if arm.name == trial.arm), {})
    return {"arm": trial.arm, "seed": trial.seed, **levels}


def tags_of(plan: Plan | None, trial: TrialRecord, blueprint: Mapping[str, Any]) -> dict[str, str]:
    """By which a trial is found among others: hypotheses, stage, plan, model, code, status."""
    tags = {"swarm.arm": trial.arm, "swarm.seed": str(trial.seed), "swarm.stage": trial.stage}
    tags["swarm.status"] = trial.status.value
    tags["swarm.attempts"] = str(trial.attempt)
    if trial.reason:
        tags["swarm.reason"] = trial.reason[:_LONGEST_REASON]
    if plan is not None:
        concerned = [one.id for one in plan.hypotheses if trial.arm in one.sides]
        tags["swarm.hypothesis"] = ",".join(concerned)
        tags["swarm.plan_hash"] = plan.digest()
        tags["swarm.model"] = plan.model_of(trial.arm).title
    hosted = trial.evidence.model if trial.evidence is not None else None
    if hosted is not None:
        if hosted.engine is not None:
            tags["swarm.engine"] = hosted.engine
        planned = None if plan is None else plan.model_of(trial.arm)
        known = planned is not None and planned.is_hosted(hosted.name, hosted.fingerprint, hosted.engine)
        name = planned.name if planned is not None and known else hosted.name
        tags["swarm.model"] = name if hosted.fingerprint is None else f"{name}@{hosted.fingerprint[:12]}"
    if "code_version" in blueprint:
        tags["swarm.code_version"] = str(blueprint["code_version"])
    return tags


def losses_of(trial: TrialRecord) -> dict[str, float]:
    """Attempts at episodes and how many each cause lost, training and held-out together; nothing where that was not recorded."""
    found = trial.evidence.attrition if trial.evidence is not None else None
    if found is None:
        return {}
    counts = [found.of(kind) for kind in KINDS]
    return {
        "attempts": float(sum(each.attempts for each in counts)),
        **{f"lost_{cause}": float(sum(each.lost.get(cause, 0) for each in counts)) for cause in Cause},
        "tasks_set_aside": float(sum(each.set_aside for each in counts)),
    }


def points_of(trial: TrialRecord, started: float) -> Iterator[tuple[str, float, int, int]]:
    """Name, value, time in ms, step. Times are spread over the trial, and equal whenever it is sent again."""
    began, ended = int(started * 1000), int((trial.ended_at or started) * 1000)
    for name, value in trial.finals.items():
        yield f"final.{name}", value, ended, 0
    for name, value in losses_of(trial).items():
        yield name, value, ended, 0
    for name, line in trial.series.items():
        for index, (step, value) in enumerate(line, start=1):
            yield name, value, began + (ended - began) * index // len(line), step
