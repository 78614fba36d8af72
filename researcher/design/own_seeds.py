"""Arms that run the same get seeds of their own.

Two arms with one setting and one seed are the same trial twice: a copy that would count as evidence. So the second arm's seeds
begin behind the last one that the plan may need. What is the same is judged on what runs (RunSpecs, model, steps, parameters of
the tasks), not on names: `4e-5` and `0.00004`, a default that is set and one that is left, a bundle that changes nothing.
"""

from __future__ import annotations

import json

from researcher.study.plan import Arm, Plan
from swarm.protocol.runspec import RunSpec


def with_own_seeds(plan: Plan) -> Plan:
    """The plan with a seed offset for every arm that runs the same as an earlier one. Call it again when stages change.

    Raises: pydantic's ValidationError for an arm that no server would take.
    """
    span = max(stage.first_seed + stage.max_seeds for stage in plan.stages) - min(
        stage.first_seed for stage in plan.stages
    )
    alike: dict[str, list[str]] = {}
    arms, assumptions = list[Arm](), list(plan.assumptions)
    for arm in plan.arms:
        names = alike.setdefault(_what_runs(plan, arm), [])
        if names:
            note = (
                f"{arm.name} runs the same as {names[0]}, on its own seeds, so that no trial copies another. The two differ only "
                "by chance: this measures the noise, and no difference should be found."
            )
            assumptions += [note] * (note not in assumptions)
        arms.append(arm.model_copy(update={"seed_offset": len(names) * span}))
        names.append(arm.name)
    return plan.model_copy(update={"arms": tuple(arms), "assumptions": tuple(assumptions)})


def _what_runs(plan: Plan, arm: Arm) -> str:
    """Everything an arm's trials get, except seeds. Factors that only other arms vary have their defaults."""
    levels = plan.levels_of(arm)
    specs = [
        RunSpec.model_validate(plan.run_fields(levels, role)).model_dump(mode="json") for role in (None, *plan.roles)
    ]
    tasks = {factor.target: factor.default for factor in plan.factors}
    tasks |= {f"task.{name}": value for name, value in plan.task.items()} | levels
    tasks = {target: level for target, level in tasks.items() if target.startswith("task.")}
    return json.dumps([specs, plan.model_of(arm.name).name, plan.steps_of(arm.name), tasks], sort_keys=True)
