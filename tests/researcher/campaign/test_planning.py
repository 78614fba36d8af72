"""A budget that pays for no first study: what would do, and how much work it is to say so."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bench.campaigns import Bench, goal
from foundation.durations import duration_s
from researcher.campaign.goal import CampaignGoal, aims_of
from researcher.campaign.graph import Decided
from researcher.campaign.planning import first_step
from researcher.design.pricing import Price
from researcher.models import Role
from researcher.refusals import BudgetTooSmall
from researcher.study.plan import Plan
from researcher.study.spec import StudySpec

pytestmark = pytest.mark.anyio


class Counted(Bench):
    """plans: how many were asked for."""

    plans = 0

    def plan(
        self, spec: StudySpec, *, role: Role, alpha: float | None, expects: float | None = None
    ) -> tuple[Plan, Price]:
        self.plans += 1
        return super().plan(spec, role=role, alpha=alpha, expects=expects)


async def begun(planner: Bench, budget: dict[str, Any], **fields: Any) -> Decided:
    asked = CampaignGoal.model_validate({**goal(list(planner.folders)).document(), "budget": budget, **fields})
    aims = aims_of(asked, [folder.instrument for folder in planner.folders.values()])
    return await first_step(asked, aims, planner)


def in_words(refused: BudgetTooSmall) -> dict[str, Any]:
    """The limits that would do."""
    said = re.search(r": ((?:\w+ \w+)(?: and \w+ \w+)*) would be enough, or use fewer factors$", str(refused))
    assert said is not None, str(refused)
    found = dict(part.split() for part in said[1].split(" and "))
    return {name: int(limit) if name == "trials" else limit for name, limit in found.items()}


@pytest.mark.parametrize(
    ("budget", "named"),
    [
        ({"trials": 10}, {"trials"}),
        ({"wall": "1m"}, {"wall"}),
        ({"trials": 10, "wall": "9h"}, {"trials"}),
        ({"trials": 900, "wall": "1m"}, {"wall"}),
        ({"trials": 10, "wall": "1m"}, {"trials", "wall"}),
    ],
)
async def test_what_is_said_to_do_does_and_little_less_would_not(budget: dict[str, Any], named: set[str]) -> None:
    planner = Counted()
    with pytest.raises(BudgetTooSmall) as refused:
        await begun(planner, budget)
    assert planner.plans <= 60
    enough = in_words(refused.value)
    assert enough.keys() == named
    decided = await begun(planner, budget | enough)
    assert decided.step is not None
    assert decided.step.plan is not None
    less = {
        "trials": int(enough.get("trials", 0) / 1.2),
        "wall": max(60.0, (duration_s(str(enough.get("wall", "0s"))) or 0.0) / 1.2 - 300),
    }
    with pytest.raises(BudgetTooSmall):
        await begun(planner, budget | {name: limit for name, limit in less.items() if name in named})


async def test_where_no_budget_in_reach_would_do_the_reason_is_said() -> None:
    planner = Counted()
    with pytest.raises(BudgetTooSmall, match=r"a quarter of it: budget.wall: [0-9]+ trials take") as refused:
        await begun(planner, {"wall": "1m"}, steps=100_000)
    assert "would do" not in str(refused.value)
    assert planner.plans <= 20
