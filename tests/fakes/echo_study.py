"""A study of the `repeat` instrument, carried out on an echo server from its plan to a report that recomputes."""

from __future__ import annotations

from pathlib import Path

from foundation.clock import SystemClock
from researcher.analysis.metrics import finals
from researcher.conduct import Conduct
from researcher.executor.blueprint import Setup
from researcher.executor.local_server import LocalServer
from researcher.executor.servers import ServerPool
from researcher.executor.trials import Executor
from researcher.instruments.catalogue import read_instrument
from researcher.models import StudyStatus, TrialStatus
from researcher.report.verify import verify
from researcher.store.store import Store
from researcher.study.plan import Plan
from tests.fakes.quiet import Quiet
from tests.fakes.repeat_study import FOLDER


async def carried_out(home: Path, store: Store, plan: Plan, *arguments: str) -> tuple[str, str]:
    """The study's id and its report. arguments: of the server."""
    folder, studies = read_instrument(FOLDER), home / "studies"
    setup = Setup(
        instrument=folder.instrument,
        instrument_dir=folder.path,
        code_version=folder.code,
        finals=finals,
        studies=studies,
    )
    study = store.studies.create(plan.question, {})
    store.plans.save(study, plan)
    server = LocalServer(model="echo", engine="echo", folder=home / "server", arguments=arguments)
    async with ServerPool(store, f"study {study}", local=server) as pool:
        conduct = Conduct(store, Executor(store, pool, setup), Quiet(), Quiet(), SystemClock(), studies)
        outcome = await conduct.carry_out(study)
    assert outcome.status is StudyStatus.DONE
    data = store.study_data(study)
    assert all(trial.status is TrialStatus.DONE for trial in data.trials)
    assert verify(data, store.reports.claims(study), store.reports.files(study), store.reports.seal(study)) == []
    return study, (studies / study / "report.md").read_text()
