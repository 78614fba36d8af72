"""Plans of a campaign's studies: on its instrument, by what trials have taken on its machine."""

from __future__ import annotations

from dataclasses import dataclass

from researcher.design.planning import plan_of
from researcher.design.pricing import Price, price_of
from researcher.environments import check_tasks
from researcher.instruments.catalogue import InstrumentFolder
from researcher.models import Role, StudyOptions
from researcher.paces import paces_on
from researcher.store.store import Store
from researcher.study.plan import Plan
from researcher.study.spec import StudySpec


@dataclass(frozen=True, slots=True)
class InstrumentPlanner:
    """python: the interpreter that has the instrument's packages."""

    store: Store
    folder: InstrumentFolder
    options: StudyOptions
    python: str

    def plan(self, spec: StudySpec, *, role: Role, alpha: float | None) -> tuple[Plan, Price]:
        """Raises: PlanningRefused."""
        servers, on_echo = max(1, len(self.options.servers)), self.options.engine == "echo"
        known = [each for each in self.store.findings.all() if ("echo" in each.models) == on_echo]
        paces = paces_on(self.store, self.options.servers, self.options.engine)
        terms = {} if alpha is None else {"alpha": alpha}
        plan = plan_of(spec, self.folder, known=known, paces=paces, servers=servers, **terms)
        plan = check_tasks(plan, self.folder, self.python)
        return plan, price_of(plan, self.folder.instrument, servers=servers)
