"""A study of the `repeat` instrument whose code can be broken, with a repairer and a scripted LLM: for tests of repairs."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from foundation.clock import SystemClock
from researcher.analysis.metrics import finals
from researcher.executor.attempts import TrialLimits
from researcher.executor.blueprint import Setup
from researcher.executor.clients import Case
from researcher.executor.diagnosis import Cause, Diagnosis
from researcher.executor.jobs import ClientPlace
from researcher.executor.local_server import LocalServer
from researcher.executor.servers import ServerPool
from researcher.executor.trials import Executor, Progress
from researcher.instruments.catalogue import InstrumentFolder, read_instrument
from researcher.llm.asking import Asker
from researcher.llm.endpoint import LlmSettings
from researcher.models import TrialRecord
from researcher.repair.asking import Llm
from researcher.repair.repairs import Helpers, Repairer, RepairLimits
from researcher.store.store import Store
from researcher.study.plan import Plan
from swarm.protocol.blueprint import HeldOut, TrialBlueprint
from tests.fakes.example_plan import ARMS
from tests.fakes.repeat_study import FOLDER, repeat_plan
from tests.fakes.scripted_llm import ScriptedLlm, said

LIMITS = TrialLimits(
    attempt_s=240, stall_s=60, client_restarts=1, first_backoff_s=0.01, busy_s=10, grace_s=5, check_s=0.3
)
WORKFLOW = (FOLDER / "workflow.py").read_text()
NINTH_TASK = WORKFLOW.replace(
    "    rng = random.Random(seed)\n    while True:\n        yield from rng.sample(words, len(words))\n",
    "    rng = random.Random(seed)\n    for at, word in enumerate(rng.sample(words, len(words))):\n"
    "        if at == 8:\n            word = {'word': word}['wrod']\n        yield word\n",
)
"""Fails where it has come to its ninth training task: in the midst of a run."""
assert NINTH_TASK != WORKFLOW


def mended(text: str = WORKFLOW, name: str = "workflow.py", reason: str = "The key was misspelt.") -> dict[str, Any]:
    """An LLM's answer."""
    return said({"reason": reason, "files": [{"name": name, "content": text}]})


class MendedStudy:
    """llm: None where a person has to mend."""

    def __init__(
        self,
        home: Path,
        workflow: str = NINTH_TASK,
        *,
        llm: ScriptedLlm | None = None,
        limits: RepairLimits | None = None,
    ) -> None:
        self.home = home
        self.folder = home / "instrument"
        shutil.copytree(FOLDER, self.folder, ignore=shutil.ignore_patterns("__pycache__"))
        (self.folder / "workflow.py").write_text(workflow)
        self.store = Store.open(f"sqlite:///{home}/r.db")
        # A group that the client of before began is not filled by the next: do not wait for it.
        impatient = {"batch": {"group_patience_s": 2.0}}
        self.plan: Plan = repeat_plan(instrument_code=self.instrument.code, run=impatient)
        self.study = self.store.studies.create("a topic", {})
        self.store.plans.save(self.study, self.plan)
        self.llm = llm
        self.limits = limits
        self.said: list[str] = []
        self.seen: list[Progress] = []

    @property
    def instrument(self) -> InstrumentFolder:
        return read_instrument(self.folder)

    def repairer(self) -> Repairer:
        """As a process makes it that takes the study up."""
        helpers = Helpers()
        if self.llm is not None:
            settings = LlmSettings(model="some-llm", patience_s=0.0)

            def keep(call: Any) -> None:
                self.store.journal.record_llm_call(self.study, call)

            asker = Asker(self.llm, settings, SystemClock(), keep=keep, tell=self.said.append)
            helpers = Helpers(mending=Llm(asker, "some-llm", 4096), opinion=Llm(asker, "some-llm", 4096))
        return Repairer(
            self.store,
            self.study,
            self.plan,
            self.instrument,
            self.home / "studies" / self.study / "code",
            helpers=helpers,
            limits=self.limits,
            tell=self.said.append,
        )

    def trials(self, count: int = 1) -> list[TrialRecord]:
        return self.store.trials.ensure(self.study, "compare", [(arm, 0) for arm in ARMS[:count]])

    def case(self, repairer: Repairer, *, seed: int = 0) -> Case:
        """A client of the study that failed, as the executor tells of it."""
        code = repairer.code()
        [trial] = self.store.trials.ensure(self.study, "compare", [(ARMS[0], seed)])
        blueprint = TrialBlueprint(
            trial_key=trial.key,
            server_url="http://127.0.0.1:1",
            run_id="run-1",
            instrument_dir=str(code.folder),
            workflow="workflow.py",
            code_version=code.version,
            seed=seed,
            group_size=8,
            concurrency=1,
            heldout=HeldOut(tasks=8, episodes=1, temperature=1.0),
        )
        diagnosis = Diagnosis(
            cause=Cause.CODE,
            why="the instrument raised an error",
            error="KeyError: 'wrod'",
            place="workflow.py:66",
            trace="Traceback (most recent call last): ... KeyError: 'wrod'",
        )
        return Case(
            study_id=self.study,
            plan=self.plan,
            trial=trial,
            attempt=1,
            code=code,
            blueprint=blueprint,
            diagnosis=diagnosis,
            last=True,
        )

    @asynccontextmanager
    async def pool(self) -> AsyncIterator[ServerPool]:
        local = LocalServer(model="echo", engine="echo", folder=self.home / "server")
        async with ServerPool(self.store, f"study {self.study}", local=local) as pool:
            yield pool

    async def run(
        self,
        pool: ServerPool,
        trials: list[TrialRecord],
        repairer: Repairer | None = None,
        attempts: int = 2,
        clients: ClientPlace | None = None,
    ) -> list[TrialRecord]:
        mender = repairer or self.repairer()
        code = mender.code()
        setup = Setup(
            instrument=self.instrument.instrument,
            instrument_dir=code.folder,
            code_version=code.version,
            sandboxed=code.sandboxed,
            repairs=mender.taken_up,
            finals=finals,
            studies=self.home / "studies",
        )
        executor = Executor(self.store, pool, setup, limits=LIMITS, attempts=attempts, clients=clients, mender=mender)
        return await executor.run_trials(self.study, self.plan, trials, self.seen.append)
