"""Plans a campaign's studies, each on its instrument, using the durations of earlier trials on this machine."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from researcher.campaign.builtin import BuiltinStrategist
from researcher.campaign.goal import Aim, CampaignBudget, CampaignGoal
from researcher.campaign.graph import Decided, decide
from researcher.campaign.judging import StudyPlanner
from researcher.campaign.records import before_all
from researcher.design.planning import plan_of, split_heldout
from researcher.design.pricing import Price, price_of
from researcher.instruments.catalogue import InstrumentFolder
from researcher.models import Role, StudyOptions
from researcher.paces import paces_on
from researcher.refusals import BudgetTooSmall
from researcher.store.store import Store
from researcher.study.plan import ALPHA, Plan
from researcher.study.spec import StudySpec

_LIMITS = {"wall": 300, "trials": 1, "tokens": 1000}
"""Budget limits that trials count against. A suggested limit is rounded up to a multiple of this value (`wall` in seconds)."""
_MOST_DOUBLINGS = 6
_CLOSE = 1.1
"""A suggested budget may exceed the smallest sufficient one by at most this factor."""


@dataclass(frozen=True)
class InstrumentPlanner:
    """Plans studies on one instrument.

    Attributes:
        store: None if there is no database yet.
        check: draws tasks for a plan's arms, and returns the plan fitted to the available tasks. Raises: PlanningRefused.
        count_heldout: counts the instrument's held-out tasks, up to a given number. Raises: PlanningRefused.
    """

    store: Store | None
    folder: InstrumentFolder
    options: StudyOptions
    check: Callable[[Plan], Plan]
    count_heldout: Callable[[int], int]

    def plan(
        self, spec: StudySpec, *, role: Role, alpha: float | None, expects: float | None = None
    ) -> tuple[Plan, Price]:
        """Plan a study, and price it; see `StudyPlanner`. Raises: PlanningRefused."""
        servers, on_echo = max(1, len(self.options.servers)), self.options.engine == "echo"
        store = self.store
        known = [] if store is None else [each for each in store.findings.all() if ("echo" in each.models) == on_echo]
        paces = [] if store is None else paces_on(store, self.options.servers, self.options.engine)
        before, after = self._heldout
        skipped, scored = (0, before) if role == "explore" else (before, after)
        plan = plan_of(
            spec,
            self.folder,
            known=known,
            paces=paces,
            servers=servers,
            alpha=ALPHA if alpha is None else alpha,
            heldout_from=skipped,
            heldout_tasks=scored,
            planned_effect=expects,
        )
        plan = self.check(plan)
        return plan, price_of(plan, self.folder.instrument, servers=servers)

    @cached_property
    def _heldout(self) -> tuple[int, int]:
        """Number of held-out tasks for explorations and number for confirmations. The two sets share no tasks. Raises:
        PlanningRefused."""
        wanted = self.folder.instrument.defaults.heldout_tasks
        return split_heldout(self.count_heldout(2 * wanted), wanted)


@dataclass(frozen=True)
class CampaignPlanner:
    """Plans each study on its instrument.

    `opened` returns the planner of an instrument by its name, or raises PlanningRefused. It is called once per instrument.
    """

    opened: Callable[[str], InstrumentPlanner]
    _known: dict[str, InstrumentPlanner] = field(default_factory=dict)

    def on(self, instrument: str) -> InstrumentPlanner:
        """Return the planner of an instrument. Raises: PlanningRefused."""
        if instrument not in self._known:
            self._known[instrument] = self.opened(instrument)
        return self._known[instrument]

    def plan(
        self, spec: StudySpec, *, role: Role, alpha: float | None, expects: float | None = None
    ) -> tuple[Plan, Price]:
        """Plan a study, and price it; see `StudyPlanner`. Raises: PlanningRefused."""
        return self.on(spec.instrument).plan(spec, role=role, alpha=alpha, expects=expects)


async def first_step(goal: CampaignGoal, aims: Sequence[Aim], planner: StudyPlanner) -> Decided:
    """Make a campaign's first decision, without an LLM. Raises: BudgetTooSmall if the budget does not pay for any study."""
    decided = await _begun(goal, aims, planner)
    if not _is_study(decided):
        refused = dict.fromkeys(each.problems[0] for each in decided.judgements if each.problems)
        why = await _enough(goal, aims, planner) or "; ".join(refused)
        raise BudgetTooSmall("budget", f"too small for a first study, which may take a quarter of it: {why}")
    return decided


async def _begun(goal: CampaignGoal, aims: Sequence[Aim], planner: StudyPlanner) -> Decided:
    return await decide(before_all(goal, aims), BuiltinStrategist(), planner)


def _is_study(decided: Decided) -> bool:
    return decided.step is not None and decided.step.plan is not None


async def _enough(goal: CampaignGoal, aims: Sequence[Aim], planner: StudyPlanner) -> str:
    """Find a budget that pays for a first study, and return it in words; empty if none does.

    Increase only one limit if that is enough.
    """
    given = [name for name in _LIMITS if getattr(goal.budget, name) is not None]
    for names in [*([name] for name in given), given]:

        async def pays(times: float, names: Sequence[str] = names) -> bool:
            return _is_study(await _begun(_richer(goal, names, times), aims, planner))

        if await pays(2.0**_MOST_DOUBLINGS):
            limits = _richer(goal, names, await _least(pays)).budget
            return f"{_limits_text(limits, names)} would be enough, or use fewer factors"
    return ""


async def _least(pays: Callable[[float], Awaitable[bool]]) -> float:
    """Find the smallest factor by which to multiply the budget, within 10 %.

    Try doublings first, because each test takes a whole decision. The largest factor is known to be enough."""
    low, high = 0, _MOST_DOUBLINGS
    while high > low + 1:
        middle = (low + high) // 2
        low, high = (low, middle) if await pays(2.0**middle) else (middle, high)
    few, enough = 2.0**low, 2.0**high
    while enough > _CLOSE * few:
        times = math.sqrt(few * enough)
        few, enough = (few, times) if await pays(times) else (times, enough)
    return enough


def _richer(goal: CampaignGoal, names: Sequence[str], factor: float) -> CampaignGoal:
    """Return the goal with these limits multiplied by `factor`, in round numbers."""
    limits = {
        name: math.ceil(getattr(goal.budget, name) * factor / step) * step
        for name, step in _LIMITS.items()
        if name in names
    }
    return goal.model_copy(update={"budget": goal.budget.model_copy(update=limits)})


def _limits_text(budget: CampaignBudget, names: Sequence[str]) -> str:
    """Write the limits in words: `wall 145m and trials 40`."""
    written = budget.model_dump(mode="json")
    return " and ".join(f"{name} {written[name]}" for name in names)
