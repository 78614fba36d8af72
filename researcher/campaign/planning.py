"""Plans of a campaign's studies: on the instrument of each, by what trials have taken on its machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from researcher.campaign.builtin import BuiltinStrategist
from researcher.campaign.goal import Aim, CampaignGoal
from researcher.campaign.graph import Decided, decide
from researcher.campaign.judging import StudyPlanner
from researcher.campaign.records import before_all
from researcher.design.planning import plan_of, split_heldout
from researcher.design.pricing import Price, price_of
from researcher.instruments.catalogue import InstrumentFolder
from researcher.models import Role, StudyOptions
from researcher.paces import paces_on
from researcher.refusals import SpecRefused
from researcher.store.store import Store
from researcher.study.plan import ALPHA, Plan
from researcher.study.spec import StudySpec


@dataclass(frozen=True)
class InstrumentPlanner:
    """store: None where there is no database yet. check: draws tasks of a plan's arms, and returns the plan fitted to those that there are. count_heldout: how many held-out
    tasks the instrument has, up to a number. Both raise PlanningRefused."""

    store: Store | None
    folder: InstrumentFolder
    options: StudyOptions
    check: Callable[[Plan], Plan]
    count_heldout: Callable[[int], int]

    def plan(
        self, spec: StudySpec, *, role: Role, alpha: float | None, expects: float | None = None
    ) -> tuple[Plan, Price]:
        """Raises: PlanningRefused."""
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
        """Held-out tasks that explorations and confirmations score, of which they share none. Raises: PlanningRefused."""
        wanted = self.folder.instrument.defaults.heldout_tasks
        return split_heldout(self.count_heldout(2 * wanted), wanted)


@dataclass(frozen=True)
class CampaignPlanner:
    """Plans each study on its instrument. opened: the planner of an instrument by its name; it raises PlanningRefused, and is
    asked once for each."""

    opened: Callable[[str], InstrumentPlanner]
    _known: dict[str, InstrumentPlanner] = field(default_factory=dict)

    def on(self, instrument: str) -> InstrumentPlanner:
        """Raises: PlanningRefused."""
        if instrument not in self._known:
            self._known[instrument] = self.opened(instrument)
        return self._known[instrument]

    def plan(
        self, spec: StudySpec, *, role: Role, alpha: float | None, expects: float | None = None
    ) -> tuple[Plan, Price]:
        """Raises: PlanningRefused."""
        return self.on(spec.instrument).plan(spec, role=role, alpha=alpha, expects=expects)


async def first_step(goal: CampaignGoal, aims: Sequence[Aim], planner: StudyPlanner) -> Decided:
    """The first decision of a campaign without an LLM. Raises: SpecRefused where the budget pays for no study."""
    decided = await decide(before_all(goal, aims), BuiltinStrategist(), planner)
    if decided.step is None or decided.step.plan is None:
        refused = "; ".join(each.problems[0] for each in decided.judgements if each.problems)
        said = f"it pays for no first study: {refused or 'one takes a quarter of what is left'}; give more, or fewer factors"
        raise SpecRefused("budget", said)
    return decided
