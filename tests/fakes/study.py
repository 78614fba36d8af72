"""A study made up for tests: a plan with any number of arms, and trials whose curves give the finals that one asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from researcher.analysis.metrics import finals
from researcher.instruments.instrument import Direction, Factor, Metric
from researcher.models import TrialEvidence, TrialRecord, TrialStatus
from researcher.study.plan import (
    PLANNED_SENTINELS,
    Arm,
    Branch,
    Budget,
    Condition,
    Hypothesis,
    Plan,
    PlanModel,
    Stage,
    StageKind,
    trial_key,
)

STEPS = 4
METRIC = Metric(name="auc", kind="auc_reward", margin=0.1)
THRESHOLD = Metric(name="steps_to_half", kind="steps_to_threshold", threshold=0.5, direction="decrease", margin=2.0)
LEARNING_RATE = Factor(name="lr", target="run.optimizer.learning_rate", type="float", default=1e-5, low=0, high=1e-3)
SENTINELS = tuple(name for name in PLANNED_SENTINELS if name not in ("reward_against_success", "worse_on_heldout"))
"""What plans made here name."""


def study_plan(
    treatments: Sequence[float] = (4e-5,),
    *,
    seeds: int = 3,
    max_seeds: int = 5,
    margin: float = 0.1,
    direction: Direction = "increase",
    metrics: Sequence[Metric] = (METRIC,),
    sentinels: Sequence[str] = (),
    **changes: Any,
) -> Plan:
    """Baseline lr=1e-05 against each treatment on the first metric; noise floor, comparison, branches as planned ones."""
    arms = (Arm(name="lr=base", levels={"lr": 1e-5}), *(Arm(name=f"lr={t}", levels={"lr": t}) for t in treatments))
    hypotheses = tuple(
        Hypothesis(
            id=f"H{i}",
            statement=f"{arm.name} beats lr=base",
            factor="lr",
            baseline="lr=base",
            treatment=arm.name,
            metric=metrics[0].name,
            direction=direction,
            margin=margin,
        )
        for i, arm in enumerate(arms[1:], start=1)
    )
    names = tuple(arm.name for arm in arms)
    plan = Plan(
        question="Does a higher learning rate learn faster?",
        instrument="arithmetic",
        instrument_version="1",
        instrument_code="0" * 64,
        model=PlanModel(name="tiny"),
        hypotheses=hypotheses,
        arms=arms,
        factors=(LEARNING_RATE,),
        stages=(
            Stage(id="floor", kind=StageKind.NOISE_FLOOR, arms=names[:1], seeds=seeds, max_seeds=seeds),
            Stage(id="compare", kind=StageKind.COMPARE, arms=names, seeds=seeds, max_seeds=max_seeds),
        ),
        branches=(
            Branch(stage="floor", when=Condition(kind="power_below", value=0.8), then="underpowered", reason="noisy"),
            Branch(stage="floor", when=Condition(kind="always"), then="stage", to="compare", reason="enough power"),
            Branch(stage="compare", when=Condition(kind="always"), then="stop", reason="all questions were asked"),
        ),
        steps=STEPS,
        run={},
        task={},
        heldout_tasks=4,
        heldout_episodes=1,
        heldout_temperature=0.0,
        metrics=tuple(metrics),
        planned_effect=1.5 * margin,
        sentinels=tuple(sentinels),
        budget=Budget(wall_s=3600, trials=20),
        planner="builtin",
    )
    return plan.model_copy(update=changes)


def done_trial(
    plan: Plan,
    arm: str,
    seed: int,
    value: float,
    *,
    series: Mapping[str, Sequence[float]] | None = None,
    evidence: TrialEvidence | None = None,
) -> TrialRecord:
    """A finished trial with a flat reward curve at `value`: its area under the curve and its final reward are `value`.

    series: overrides by name; an empty sequence takes the series away.
    """
    lines: dict[str, Sequence[float]] = {
        "reward_mean": [value] * STEPS,
        "reward_std": [0.3] * STEPS,
        "weights_change": [1e-4] * STEPS,
        "entropy": [1.0] * STEPS,
        "kl_to_start": [0.01] * STEPS,
        "zero_variance_share": [0.2] * STEPS,
        "sampled_tokens_mean": [10.0] * STEPS,
        "tokens_called": [1000.0] * STEPS,
        "tokens_merged": [300.0] * STEPS,
        "tokens_trained": [200.0] * STEPS,
        "step_s": [2.0] * STEPS,
        "logprob_mismatch_mean": [0.01] * STEPS,
        "staleness_max": [0.0] * STEPS,
        "repetition_within": [0.05] * STEPS,
        "repetition_across": [0.1] * STEPS,
    }
    lines |= series or {}
    points = {name: [(i, float(v)) for i, v in enumerate(line, start=1)] for name, line in lines.items() if line}
    rewards = {"eval_reward_before": [0.0, 0.0], "eval_reward_after": [value, value]}
    points |= {name: list(enumerate(line)) for name, line in rewards.items()}
    flat = {metric.name: value for metric in plan.metrics if metric.kind in ("auc_reward", "final_reward")}
    return _record(plan, arm, seed, TrialStatus.DONE, finals=flat, series=points, evidence=evidence)


def reaching_trial(plan: Plan, arm: str, seed: int, reached: int | None, *, steps: int = 10) -> TrialRecord:
    """A finished trial whose training reward is 1 from step `reached` on, and 0 before it; None: it never is."""
    curve = [float(reached is not None and step >= reached) for step in range(1, steps + 1)]
    trial = done_trial(plan, arm, seed, 0.3, series={"reward_mean": curve})
    return trial.model_copy(update={"finals": finals(plan.metrics, trial.series)})


def failed_trial(plan: Plan, arm: str, seed: int) -> TrialRecord:
    return _record(plan, arm, seed, TrialStatus.FAILED, reason="the client kept crashing")


def planned_trial(plan: Plan, arm: str, seed: int) -> TrialRecord:
    return _record(plan, arm, seed, TrialStatus.PLANNED)


def trials_with(plan: Plan, values: Mapping[str, Sequence[float]]) -> list[TrialRecord]:
    """Finished trials: arm → value of seed 0, 1, …"""
    return [done_trial(plan, arm, seed, value) for arm, line in values.items() for seed, value in enumerate(line)]


def sent_spec(study_id: str, plan: Plan, trial: TrialRecord) -> dict[str, Any]:
    """The part of a RunSpec that plan and arm settle, and a group size."""
    labels = {"study": study_id, "trial": trial.key, "arm": trial.arm, "seed": str(trial.seed), "plan": plan.digest()}
    set_by_plan = plan.run_fields(plan.levels_of(plan.arm(trial.arm)))
    steps = {"steps": plan.steps_of(trial.arm)}
    return {**set_by_plan, "seed": trial.seed, "limits": steps, "labels": labels, "batch": {"group_size": 8}}


def _record(plan: Plan, arm: str, seed: int, status: TrialStatus, **fields: Any) -> TrialRecord:
    ended = {"started_at": 1000.0, "ended_at": 1060.0} if status is not TrialStatus.PLANNED else {}
    return TrialRecord(
        key=trial_key(plan.digest(), arm, seed),
        study_id="s-1",
        stage="floor" if arm == plan.arms[0].name else "compare",
        arm=arm,
        seed=seed,
        status=status,
        **ended,
        **fields,
    )
