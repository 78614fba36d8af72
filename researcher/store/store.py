"""The store: the rest of the researcher accesses SQL only through it.

    store = Store.open()                                 # SQLite in the user data directory, or RESEARCHER_DATABASE_URL
    study_id = store.studies.create(topic, options)
    token = store.leases.acquire(study_id, owner, ttl_s=60)
    mine = store.fenced(study_id, token)                 # for the orchestrator: every write checks the token
    mine.plans.save(study_id, plan)
    mine.trials.ensure(study_id, "compare", [("lr=1e-5", 0), ("lr=4e-5", 0)])

Reading, requesting a stop or a pause, and answering at a gate need no lease. All other writes need the current lease, except
that anyone may write to a study that nobody has leased (to rebuild a report, or to export).
"""

from __future__ import annotations

from foundation.clock import Clock, SystemClock
from foundation.ids import Ids, RandomIds
from researcher.models import StudyData
from researcher.store.campaigns import Campaigns
from researcher.store.conclusions import Reports, Verdicts
from researcher.store.database import connect, default_url, upgrade
from researcher.store.errors import DatabaseRefused
from researcher.store.findings import Findings
from researcher.store.gates import GateRecords
from researcher.store.journal import Journal
from researcher.store.leases import Budgets, Leases
from researcher.store.notices import Notices
from researcher.store.outbox import Outbox
from researcher.store.plans import Plans
from researcher.store.retries import PATIENCE_S, Retries
from researcher.store.studies import Studies
from researcher.store.transactions import Transactions, readable
from researcher.store.trials import Trials


class Store:
    """The researcher's database, with one attribute for each kind of record."""

    def __init__(self, db: Transactions) -> None:
        self._db = db
        self.studies = Studies(db)
        self.campaigns = Campaigns(db)
        self.plans = Plans(db)
        self.trials = Trials(db)
        self.verdicts = Verdicts(db)
        self.reports = Reports(db)
        self.journal = Journal(db)
        self.gates = GateRecords(db)
        self.findings = Findings(db)
        self.leases = Leases(db)
        self.budgets = Budgets(db)
        self.outbox = Outbox(db)
        self.notices = Notices(db)

    @classmethod
    def open(
        cls,
        url: str | None = None,
        *,
        clock: Clock | None = None,
        ids: Ids | None = None,
        patience_s: float = PATIENCE_S,
    ) -> Store:
        """Open the database, and create or upgrade it. In later outages, calls retry for `patience_s` seconds.

        Raises: DatabaseRefused when the database cannot be reached, is not ours, or was made by newer code.
        """
        engine = connect(url or default_url())
        try:
            upgrade(engine)
        except DatabaseRefused:
            engine.dispose()
            raise
        clock, ids = clock or SystemClock(), ids or RandomIds()
        return cls(Transactions(engine, clock, ids, Retries(engine, clock, ids, patience_s), {}))

    def fenced(self, study_id: str, token: int) -> Store:
        """Return the store for the holder of the study's lease. Its writes to the study fail once the lease has another holder."""
        db = self._db
        return Store(Transactions(db.engine, db.clock, db.ids, db.retries, {**db.tokens, study_id: token}))

    def study_data(self, study_id: str) -> StudyData:
        """Return the input of analysis and report: the newest plan with its trials, verdicts and journal.

        A tampered plan is returned too, along with the hash it was frozen with. Raises: NotFound, Unreadable.
        """
        with readable("the rows of the plan"):
            plan, digest = self.plans.frozen(study_id)
            altered = self.plans.altered_rows(study_id, plan)
        with readable("the rows of trials and their metrics"):
            trials = self.trials.all(study_id, plan_version=plan.version)
        with readable("the rows of attempts"):
            attempts = self.trials.attempts_of_study(study_id)
        with readable("the rows of trial_attrition"):
            attrition = self.trials.attrition(study_id)
        with readable("the rows of budgets and stages"):
            budgets = {budget.kind: budget.limit for budget in self.budgets.all(study_id)}
            stage_times = self.plans.stage_times(study_id)
        with readable("the rows of verdicts and findings"):
            verdicts, decided = self.verdicts.all(study_id), self.verdicts.stages(study_id)
            findings = [each for each in self.findings.all(study_id=study_id) if each.recomputable]
        with readable("the rows of events and repairs"):
            events, repairs = self.journal.events(study_id), self.journal.repairs(study_id)
        with readable("the rows of llm_calls"):
            llm_calls = self.journal.llm_calls(study_id)
        with readable("the rows of episodes"):
            samples = self.trials.samples(study_id)
        study = self.studies.get(study_id)
        return StudyData(
            study_id=study_id,
            topic=study.topic,
            plan=plan,
            plan_hash=digest,
            trials=tuple(trials),
            request=study.request,
            status=study.status,
            reason=study.reason,
            verdicts=tuple(verdicts),
            events=tuple(events),
            repairs=tuple(repairs),
            altered=altered,
            decided=decided,
            attempts=attempts,
            attrition=attrition,
            budgets=budgets,
            stage_times=stage_times,
            findings=tuple(findings),
            llm_calls=tuple(llm_calls),
            samples=samples,
        )

    @property
    def url(self) -> str:
        """The database's URL, without the password."""
        return self._db.engine.url.render_as_string(hide_password=True)

    def close(self) -> None:
        self._db.engine.dispose()
