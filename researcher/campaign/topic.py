"""A campaign's goal from a topic: the planner reads it as it reads a study's, and what it would screen is what may be changed."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from foundation.strict import explain
from researcher.campaign.goal import CampaignGoal
from researcher.design.planning import DEFAULT_BUDGET_S
from researcher.refusals import PlanningRefused
from researcher.study.draft import Draft


def goal_of(draft: Draft) -> CampaignGoal:
    """The goal of a study's draft. Levels that the topic names are the ones that are tried; else code chooses them.

    Raises: PlanningRefused where the topic asks for what a campaign has not.
    """
    fields = draft.fields
    if "arms" in fields or isinstance(fields.get("model"), list):
        raise PlanningRefused(
            "the topic compares bundles of settings or models: that is one study, `researcher start --topic` runs it"
        )
    factors: dict[str, list[Any]] = {
        name: [*([each["baseline"]] if "baseline" in each else []), *each["levels"]]
        if draft.sources.get(f"compare.{name}") == "topic"
        else []
        for name, each in fields.get("compare", {}).items()
    }
    objective: dict[str, Any] = {name: fields[name] for name in ("metric", "margin") if name in fields}
    if fields.get("claim") in ("increase", "decrease"):
        objective["direction"] = fields["claim"]
    budget = fields.get("budget", {})
    if not budget.keys() & {"wall", "trials"}:
        budget = {**budget, "wall": DEFAULT_BUDGET_S}
    goal: dict[str, Any] = {
        "goal": fields["question"],
        "instruments": [fields["instrument"]],
        "objective": objective,
        "factors": factors,
        "budget": budget,
        **{name: fields[name] for name in ("model", "set", "steps", "schedule", "approve") if name in fields},
    }
    try:
        return CampaignGoal.model_validate(goal)
    except ValidationError as error:
        problems = [str(problem) for problem in explain(error, CampaignGoal)]
        raise PlanningRefused(f"the topic makes no goal: {'; '.join(problems)}", problems) from error
