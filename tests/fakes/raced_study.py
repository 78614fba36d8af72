"""A race made up for tests: five arms against one baseline, and the trials of its stages in turn."""

from __future__ import annotations

from researcher.analysis.race import due
from researcher.design.stages import raced
from researcher.models import TrialRecord
from researcher.study.plan import Branch, Condition, Plan, Stage
from tests.fakes.study import done_trial, study_plan

LEVELS = (2e-5, 4e-5, 6e-5, 8e-5, 1e-4)
ARMS = tuple(f"lr={level}" for level in LEVELS)
BASE = "lr=base"


def race_plan(fine: int = 0) -> Plan:
    plan = study_plan(LEVELS)
    competing, between = (ARMS[:2], ARMS[2:]) if fine else (ARMS, ())
    stages = raced(competing, between, BASE, (3, 6), fine, racing=not fine)
    ends = tuple(Branch(stage=s.id, when=Condition(kind="always"), then="stop", reason="") for s in stages)
    return plan.model_copy(update={"stages": stages, "branches": ends})


def trials_of(plan: Plan, stage: Stage, seeds: int, before: list[TrialRecord], **means: float) -> list[TrialRecord]:
    """The stage's trials, each arm a little apart by seed; arms are named by their place in ARMS."""
    worth = {arm: means.get(f"arm{place}", 0.0) for place, arm in enumerate(ARMS)}
    known = {(trial.arm, trial.seed) for trial in before}
    made = [
        done_trial(plan, arm, seed, worth.get(arm, 0.0) + 0.001 * (seed % 3)).model_copy(update={"stage": stage.id})
        for arm, seed in due(plan, stage, seeds, before)
        if (arm, seed) not in known
    ]
    return [*before, *made]


def run(plan: Plan, *, until: str, **means: float) -> list[TrialRecord]:
    trials: list[TrialRecord] = []
    for stage in plan.stages:
        while len(more := trials_of(plan, stage, stage.seeds, trials, **means)) > len(trials):
            trials = more  # a fine stage asks for more as its trials end
        if stage.id == until:
            break
    return trials
