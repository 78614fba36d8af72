"""A small plan over the `repeat` instrument, for tests that need one."""

from __future__ import annotations

from typing import Any

from researcher.instruments.instrument import Metric
from researcher.models import ReportSeal
from researcher.study.plan import Arm, Branch, Budget, Condition, Hypothesis, Plan, PlanModel, Stage, StageKind

ARMS = ("learning_rate=1e-05", "learning_rate=4e-05")
SEAL = ReportSeal(files={"markdown": "0" * 64}, claims="1" * 64, wording="2" * 64)


def example_plan(**changes: Any) -> Plan:
    """Two learning rates, three seeds, six steps."""
    fields: dict[str, Any] = {
        "question": "Does a higher learning rate learn to repeat faster?",
        "instrument": "repeat",
        "instrument_version": "1",
        "instrument_code": "0" * 64,
        "model": PlanModel(name="echo"),
        "hypotheses": (
            Hypothesis(
                id="H1",
                statement="4e-5 learns faster than 1e-5",
                factor="learning_rate",
                baseline=ARMS[0],
                treatment=ARMS[1],
                metric="heldout_accuracy",
                direction="increase",
                margin=0.1,
            ),
        ),
        "arms": (Arm(name=ARMS[0], levels={"learning_rate": 1e-5}), Arm(name=ARMS[1], levels={"learning_rate": 4e-5})),
        "stages": (Stage(id="compare", kind=StageKind.COMPARE, arms=ARMS, seeds=3, max_seeds=5),),
        "branches": (Branch(stage="compare", when=Condition(kind="always"), then="stop", reason="one stage"),),
        "steps": 6,
        "run": {},
        "task": {},
        "heldout_tasks": 4,
        "heldout_episodes": 1,
        "heldout_temperature": 1.0,
        "metrics": (Metric(name="heldout_accuracy", kind="heldout_accuracy", margin=0.1),),
        "planned_effect": 0.15,
        "budget": Budget(wall_s=3600, trials=12),
        "planner": "builtin",
    }
    return Plan(**{**fields, **changes})


def plan_of_arms(baseline: str, treatment: str) -> Plan:
    """The same with arms of these names."""
    plan = example_plan()
    return example_plan(
        arms=tuple(
            arm.model_copy(update={"name": name}) for arm, name in zip(plan.arms, (baseline, treatment), strict=True)
        ),
        hypotheses=tuple(
            each.model_copy(update={"baseline": baseline, "treatment": treatment}) for each in plan.hypotheses
        ),
        stages=tuple(each.model_copy(update={"arms": (baseline, treatment)}) for each in plan.stages),
    )
