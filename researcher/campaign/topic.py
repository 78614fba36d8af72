"""Turns a topic into a campaign's goal. The planner reads it like a study's topic; the campaign may vary the factors it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from researcher.campaign.goal import CampaignGoal, goal_in
from researcher.design.planning import DEFAULT_BUDGET_S
from researcher.refusals import PlanningRefused
from researcher.study.draft import Draft, file_text
from researcher.study.spec import duration_text

_KEPT = ("model", "set", "steps", "schedule", "approve")
"""Fields that studies and campaigns share."""
_MOVED = {
    "question": "goal",
    "instrument": "instruments",
    "metric": "objective.metric",
    "margin": "objective.margin",
    "claim": "objective.direction",
}
"""Fields of a study, with their places in a goal."""


def goal_of(draft: Draft, instruments: Sequence[str] = ()) -> CampaignGoal:
    """Turn a study's draft into a goal. `instruments` are the campaign's, by default the draft's.

    Raises: PlanningRefused if the topic asks for something that campaigns cannot do.
    """
    named = {"instruments": list(instruments)} if instruments else {}
    return goal_in(goal_draft(draft).fields | named)


def goal_text(draft: Draft, problems: tuple[str, ...] = ()) -> str:
    """Turn a study's draft into a goal file for a person to edit. `problems` are those that the person has to fix first.

    Raises: PlanningRefused if the topic asks for something that campaigns cannot do.
    """
    heading = (
        f"Goal file, written by {draft.author}. Run it: researcher campaign start FILE\n"
        "If a factor has no levels, code chooses some around its default."
    )
    return file_text(goal_draft(draft), CampaignGoal, heading, problems)


def goal_draft(draft: Draft) -> Draft:
    """Return the draft of a goal, not yet validated. Levels named in the topic are tried; otherwise code chooses them.

    Raises: PlanningRefused if the topic asks for something that campaigns cannot do.
    """
    fields = draft.fields
    if "arms" in fields or isinstance(fields.get("model"), list):
        raise PlanningRefused(
            "the topic compares bundles of settings or models: that is a single study, which `researcher start --topic` runs"
        )
    goal: dict[str, Any] = {name: fields[name] for name in _KEPT if name in fields}
    for name, path in _MOVED.items():
        above, _, last = path.rpartition(".")
        if name in fields and (name != "claim" or fields[name] in ("increase", "decrease")):
            (goal.setdefault(above, {}) if above else goal)[last] = fields[name]
    if "instruments" in goal:
        goal["instruments"] = [goal["instruments"]]
    factors: dict[str, list[Any]] = {
        name: [*([each["baseline"]] if "baseline" in each else []), *each["levels"]]
        if draft.sources.get(f"compare.{name}") == "topic"
        else []
        for name, each in fields.get("compare", {}).items()
    }
    budget = fields.get("budget", {})
    if not budget.keys() & {"wall", "trials"}:
        budget = {**budget, "wall": duration_text(DEFAULT_BUDGET_S)}
    goal |= {"budget": budget} | ({"factors": factors} if factors else {})
    sources = {_moved(path): source for path, source in draft.sources.items()}
    asked = dict.fromkeys(path.partition(".")[0] for path, source in sources.items() if source == "topic")
    own = [f"{name} (each study of a campaign has its own)" for name in asked if name not in (*goal, "design")]
    return replace(draft, fields=goal, sources=sources, because="", uncovered=(*draft.uncovered, *own))


def _moved(path: str) -> str:
    """Return the path in a goal that corresponds to this dotted path in a study."""
    name, dot, rest = path.partition(".")
    return f"{'factors' if name == 'compare' else _MOVED.get(name, name)}{dot}{rest}"
