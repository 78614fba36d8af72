"""One process's work on a study: it sits through the study's windows, on servers that it holds only while one is open.

How plans are made, and what people decide, it does not know.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from foundation.clock import Clock, SystemClock
from foundation.logs import redact
from researcher.analysis.metrics import finals
from researcher.cli.clients import place_of
from researcher.cli.instrument_llm import repairer_of
from researcher.cli.servers import have_models, pool_of, starting
from researcher.conduct import Conduct, Outcome, Sink, interim_report
from researcher.describe import known_text, when
from researcher.environments import interpreter
from researcher.executor.blueprint import Code, Setup
from researcher.executor.cleanup import Keeping, end_left_of
from researcher.executor.errors import ExecutorError
from researcher.executor.trials import Executor
from researcher.gates import Gates, Halted, heed
from researcher.home import Home
from researcher.instruments.catalogue import InstrumentFolder, as_frozen, open_instrument
from researcher.models import StudyStatus
from researcher.ownership import owned
from researcher.schedule.timetable import Timetable
from researcher.store.checkpoints import Gate
from researcher.store.database import default_url
from researcher.store.mlflow_sink import MlflowSink
from researcher.store.sinks import open_sink
from researcher.store.store import Store
from researcher.study.plan import Plan
from researcher.view import View

_NAP_S = 5.0
_DAYS_OVER = "its days are over; `researcher report` shows what was found"


async def sit(
    home: Home,
    study_id: str,
    view: View,
    plan: Plan | None = None,
    *,
    wait: bool,
    clock: Clock | None = None,
    copy: Callable[[Store], Sink] = MlflowSink,
) -> Outcome:
    """Own the study and conduct it in its windows. plan: to be frozen first. wait: sit through the times between windows;
    else return when one closes. copy: of the records.

    Raises: LeaseHeld when another process works on it; OverBudget.
    """
    clock = clock or SystemClock()
    async with owned(home.store, study_id, clock) as store:
        if plan is not None:
            store.save_plan(study_id, plan)
        frozen = store.plan(study_id)
        view.say(f"{study_id}: plan {frozen.digest()[:16]}; records in {home.root}")
        for assumption in frozen.assumptions:
            view.say(f"assumed: {assumption}")
        for each in frozen.known:
            view.say(f"already known: {known_text(each)}")
        gates = Gates(store, lambda name, question: Gate(default_url(), study_id, name).ask(question))
        sitting = Sitting(home, store, study_id, frozen, view, gates, clock, copy)
        try:
            sitting.heed()
            gates.before_plan(study_id, frozen)
            return await sitting.through(wait=wait)
        except Halted as halt:
            return await sitting.rest(halt)
        except ExecutorError as error:
            sitting.cannot_go_on(error)
            raise


class Sitting:
    """One process's work on a study: window after window, on servers that it holds only while a window is open."""

    def __init__(
        self,
        home: Home,
        store: Store,
        study_id: str,
        plan: Plan,
        view: View,
        gates: Gates,
        clock: Clock,
        copy: Callable[[Store], Sink],
    ) -> None:
        self._home = home
        self._store = store
        self._study_id = study_id
        self._plan = plan
        self._view = view
        self._gates = gates
        self._clock = clock
        self._copy = copy
        detail = store.schedule(study_id)
        self._timetable = Timetable(zone="UTC") if detail is None else Timetable.of_record(detail)

    async def through(self, *, wait: bool) -> Outcome:
        """Raises: Halted when no window opens any more, or (without `wait`) until the next one; OverBudget."""
        while True:
            await self._opened(wait=wait)
            outcome = await self._work()
            if not outcome.for_window:
                return outcome

    def heed(self) -> None:
        """Raises: Halted when a person asked for a stop or a pause, or its days are over: also where it waits at a gate."""
        heed(self._store, self._study_id)
        if self._timetable.over(self._clock.now()):
            raise Halted(StudyStatus.STOPPED, _DAYS_OVER)

    async def rest(self, halt: Halted) -> Outcome:
        """Leave the study as it is to rest, with no server held by one who died over it."""
        await self._end_left()
        ends = halt.status is StudyStatus.STOPPED
        self._store.set_study_status(self._study_id, halt.status, halt.reason)
        folder = interim_report(self._store, self._study_id, self._home.studies) if ends else None
        return Outcome(halt.status, halt.reason, folder)

    def cannot_go_on(self, error: ExecutorError) -> None:
        """Say what the study waits for, with the report as far as there is one. One that is done stays done, though its models
        could not be kept."""
        if not self._store.study(self._study_id).status.ended:
            interim_report(self._store, self._study_id, self._home.studies)
            self._store.set_study_status(self._study_id, StudyStatus.WAITING, redact(str(error)))

    async def _end_left(self) -> None:
        folder = self._home.studies / self._study_id
        for line in await end_left_of(self._store, self._study_id, folder, self._clock):
            self._view.say(line)

    async def _opened(self, *, wait: bool) -> None:
        """Wait until a window is open."""
        if wait and not self._timetable.open(self._clock.now()):
            await self._end_left()
        while not self._timetable.open(now := self._clock.now()):
            heed(self._store, self._study_id)
            opening = self._timetable.next_opening(now)
            if opening is None:
                raise Halted(StudyStatus.STOPPED, _DAYS_OVER)
            text = f"waits for its window, which opens at {when(opening)}"
            if not wait:
                raise Halted(StudyStatus.WAITING, text)
            self._store.set_study_status(self._study_id, StudyStatus.WAITING, text)
            self._view.say(f"{self._study_id} {text}")
            while self._clock.now() < opening:  # short sleeps: a machine that was suspended wakes late from long ones
                await self._clock.sleep(min(_NAP_S, opening - self._clock.now()))
                heed(self._store, self._study_id)

    async def _work(self) -> Outcome:
        """Until the study ends, halts, or its window closes."""
        home, study_id, plan = self._home, self._study_id, self._plan
        choices = self._store.study(study_id).options
        folder = as_frozen(open_instrument(choices.get("instrument") or plan.instrument), plan.instrument_code)
        await have_models(plan, choices, self._view.say)
        pool = pool_of(home, self._store, study_id, plan, choices, self._clock, self._view.say)
        servers = ", ".join(choices["servers"]) or starting(plan)
        self._view.say(f"waiting for {servers} ...")
        mender = repairer_of(home, self._store, study_id, plan, folder, self._clock, self._view.say)
        arranged = setup(home, folder, code=mender.code(), repairs=mender.taken_up)
        mender.tell_sandbox()
        clients = await place_of(choices, folder, self._clock, arranged.python, self._view.say)
        async with pool:
            executor = Executor(self._store, pool, arranged, may_run=self._may_run, clients=clients, mender=mender)
            sink = self._copy(self._store)
            further = [open_sink(self._store, name) for name in choices.get("sinks", ())]
            conduct = Conduct(
                self._store,
                executor,
                sink,
                self._view,
                self._clock,
                home.studies,
                gates=self._gates,
                further=further,
            )
            outcome = await conduct.carry_out(study_id)
        if outcome.status is StudyStatus.DONE:
            keeping = Keeping(self._store, study_id, home.studies / study_id, self._clock, os.environ)
            return replace(outcome, models=await keep(keeping, choices, self._view.say))
        return outcome

    def _may_run(self) -> bool:
        return self._timetable.open(self._clock.now())


def setup(home: Home, folder: InstrumentFolder, *, code: Code | None = None, repairs: tuple[str, ...] = ()) -> Setup:
    """code: where the study runs other code than the folder's. repairs: the versions that are its own."""
    code = code or Code(folder=folder.path, version=folder.code, sandboxed=folder.instrument.generated is not None)
    return Setup(
        instrument=folder.instrument,
        instrument_dir=code.folder,
        code_version=code.version,
        sandboxed=code.sandboxed,
        repairs=repairs,
        finals=finals,
        studies=home.studies,
        python=interpreter(folder, home.root),
    )


async def keep(keeping: Keeping, choices: dict[str, Any], tell: Callable[[str], None]) -> Path | None:
    """Where the models are, where they were asked for; the disk of the servers is freed. Raises: ModelsNotKept, ServerUnfit."""
    models = await keeping.keep_models(tell) if choices.get("keep_models") else None
    await keeping.discard_servers()
    return models
