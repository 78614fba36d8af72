"""Arms that run the same get seeds of their own.

Two arms with one setting and one seed are the same trial twice: a copy that would count as evidence. So the second arm's seeds
begin behind the last one that the plan may need. What is the same is judged on what runs (RunSpecs, model, steps, parameters of
the tasks), not on names: `4e-5` and `0.00004`, a default that is set and one that is left, a bundle that changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from researcher.study.plan import Arm, Plan
from swarm.protocol.runspec import RunSpec


def with_own_seeds(plan: Plan) -> Plan:
    """The plan with a seed offset for every arm that runs the same as an earlier one. Call it again when stages change.

    Raises: pydantic's ValidationError for an arm that no server would take.
    """
    span = max(stage.first_seed + stage.max_seeds for stage in plan.stages) - min(
        stage.first_seed for stage in plan.stages
    )
    like: dict[str, str] = {}
    members: dict[str, int] = {}
    arms = []
    for arm in plan.arms:
        runs = _what_runs(plan, arm)
        place = members.get(runs, 0)
        members[runs] = place + 1
        first = like.setdefault(runs, arm.name)
        if first != arm.name and not any(_said_of(arm.name, first) == text for text in plan.assumptions):
            plan = plan.model_copy(update={"assumptions": (*plan.assumptions, _said_of(arm.name, first))})
        arms.append(arm.model_copy(update={"seed_offset": place * span}))
    return plan.model_copy(update={"arms": tuple(arms)})


def _said_of(arm: str, first: str) -> str:
    return (
        f"{arm} runs the same as {first}, on its own seeds, so that no trial copies another. The two differ only by chance: "
        "this measures the noise, and no difference should be found."
    )


def _what_runs(plan: Plan, arm: Arm) -> str:
    """A digest over all that an arm's trials are given, but for their seeds."""
    levels = plan.levels_of(arm)
    specs = [RunSpec.model_validate(plan.run_fields(levels, role)).model_dump(mode="json") for role in _roles(plan)]
    tasks = {target.removeprefix("task."): level for target, level in _task_levels(plan, arm)}
    whole = [specs, plan.model_of(arm.name).name, plan.steps_of(arm.name), {**tasks}]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def _roles(plan: Plan) -> Iterator[str | None]:
    yield None
    yield from plan.roles


def _task_levels(plan: Plan, arm: Arm) -> Iterator[tuple[str, object]]:
    """All parameters of the tasks. A factor that other arms vary stands at its default where this arm leaves it."""
    for factor in plan.factors:
        if factor.target.startswith("task."):
            yield factor.target, factor.default
    yield from ((f"task.{name}", value) for name, value in plan.task.items())
    yield from ((target, level) for target, level in plan.levels_of(arm).items() if target.startswith("task."))
