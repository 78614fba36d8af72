"""Studies in a store at the moments that a page shows: at a gate, with trials that run, done with a report."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from researcher.analysis.knowledge import findings_of
from researcher.analysis.verdicts import conclude
from researcher.conduct import report
from researcher.gates import pass_plan
from researcher.halts import StudyHalted
from researcher.home import Home
from researcher.models import StudyStatus, TrialEvidence, TrialRecord
from researcher.store.store import Store
from researcher.study.plan import Plan
from tests.fakes.study import SENTINELS, done_trial, sent_spec, study_plan

TOPIC = "Does a higher learning rate learn faster?"
ARM = "lr=4e-05"
SERVER = "http://10.0.0.7:8642"


def opened(folder: Path) -> tuple[Home, str]:
    """A home in that folder, and its database's address."""
    folder.mkdir(parents=True, exist_ok=True)
    url = f"sqlite:///{folder / 'researcher.db'}"
    return Home(folder, Store.open(url)), url


def planned(store: Store, topic: str = TOPIC, *, approve: str = "never", plan: Plan | None = None) -> str:
    study = store.studies.create(topic, {"approve": approve, "servers": [SERVER]})
    store.plans.save(study, plan or study_plan(sentinels=SENTINELS))
    return study


def at_gate(store: Store, topic: str = TOPIC, *, plan: Plan | None = None) -> str:
    """It waits for a person's word on its plan, as a conductor would have left it."""
    study = planned(store, topic, approve="plan", plan=plan)
    meet_gate(store, study)
    return study


def meet_gate(store: Store, study: str) -> StudyStatus:
    """What whoever resumes the study does first; returns how the study stands then."""
    try:
        pass_plan(store, study, store.plans.get(study))
        store.studies.set_status(study, StudyStatus.RUNNING)
    except StudyHalted as halt:
        store.studies.set_status(study, halt.status, halt.reason)
    return store.studies.get(study).status


def running(store: Store, topic: str = TOPIC) -> tuple[str, TrialRecord]:
    """One trial is done, one runs at step 2; returns the study and the trial that runs."""
    study = planned(store, topic)
    store.studies.set_status(study, StudyStatus.RUNNING)
    plan = store.plans.get(study)
    store.budgets.set(study, "trials", plan.budget.trials)
    store.budgets.set(study, "wall_s", plan.budget.wall_s)
    store.plans.set_stage_status(study, "floor", "running")
    first, second = store.trials.ensure(study, "floor", [("lr=base", 0), ("lr=base", 1)])
    finish(store, study, first, 0.3)
    store.trials.record_intent(study, second.key, 1, SERVER, "k#1", sent_spec(study, plan, second))
    store.trials.record_submitted(study, second.key, "run-2", {})
    store.trials.record_progress(study, second.key, 2, [("reward_mean", 1, 0.1), ("reward_mean", 2, 0.25)])
    return study, store.trials.get(study, second.key)


def finish(store: Store, study: str, trial: TrialRecord, value: float, evidence: TrialEvidence | None = None) -> None:
    """Carry a planned trial to its end with a flat curve at `value`."""
    plan = store.plans.get(study)
    made = done_trial(plan, trial.arm, trial.seed, value)
    store.trials.record_intent(study, trial.key, 1, SERVER, f"{trial.key}#1", sent_spec(study, plan, trial))
    store.trials.finish(study, trial.key, made.finals, made.series, evidence=evidence)


def done(home: Home, topic: str = TOPIC) -> str:
    """Every trial done, a verdict, a report."""
    store = home.store
    study = planned(store, topic, plan=study_plan())
    plan = store.plans.get(study)
    for stage, arm, values in (
        ("floor", "lr=base", (0.30, 0.31, 0.32)),
        ("compare", ARM, (0.55, 0.56, 0.54)),
    ):
        store.plans.set_stage_status(study, stage, "running")
        for trial, value in zip(store.trials.ensure(study, stage, [(arm, s) for s in range(3)]), values, strict=True):
            finish(store, study, trial, value)
        store.plans.set_stage_status(study, stage, "done")
    trials = store.trials.all(study)
    verdicts = conclude(plan, trials).verdicts
    for record in verdicts:
        store.verdicts.record(study, "compare", record)
    store.findings.save(study, findings_of(study, plan, verdicts, 1.0, trials))
    detail = {"after": "compare", "action": "stop", "to": None, "seeds": None, "reason": "all questions were asked"}
    with suppress(FileExistsError):
        home.studies.mkdir(parents=True)
    store.journal.record(study, "decision", detail)
    report(store, study, home.studies)
    store.studies.set_status(study, StudyStatus.DONE, "all questions were asked")
    return study
