"""One process's work on a study, window by window. Holds servers only while a window is open.

How plans are made and what people decide is left to other modules."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from foundation.clock import Clock, SystemClock
from foundation.logs import redact
from researcher.analysis.metrics import finals
from researcher.cli.clients import place_of
from researcher.cli.instrument_llm import repairer_of
from researcher.cli.servers import have_models, pool_of, starting
from researcher.conduct import Conduct, Outcome, Sink, interim_report, rest
from researcher.describe import known_text, when
from researcher.environments import interpreter
from researcher.executor.blueprint import Code, Setup
from researcher.executor.cleanup import Keeping, discard_if_over, end_left_of, unresumable
from researcher.executor.errors import ClusterUnreachable, ExecutorError, NoServersLeft, ServerUnfit
from researcher.executor.trials import Executor
from researcher.gates import pass_plan
from researcher.halts import StudyHalted, check_requests
from researcher.home import Home
from researcher.instruments.catalogue import InstrumentFolder, as_frozen, open_instrument
from researcher.models import StudyOptions, StudyStatus, TrialRecord
from researcher.notify.sink import sinks_of
from researcher.notify.study import subject_of
from researcher.notify.words import failure_notice
from researcher.ownership import is_dead, owned
from researcher.schedule.timetable import Timetable
from researcher.store.errors import LeaseHeld, StoreError
from researcher.store.mlflow_sink import MlflowSink
from researcher.store.sinks import open_sink
from researcher.store.store import Store
from researcher.study.plan import Plan
from researcher.view import View

_NAP_S = 5.0


async def work_on(
    home: Home,
    study_id: str,
    view: View,
    plan: Plan | None = None,
    *,
    wait: bool,
    clock: Clock | None = None,
    copy: Callable[[Store], Sink] = MlflowSink,
) -> Outcome:
    """Take ownership of the study and conduct it in its windows.

    Args:
        plan: plan to freeze first.
        wait: keep waiting between windows; else return when one closes.
        copy: creates the sink for records.

    Raises: LeaseHeld when another process works on it; OverBudget.
    """
    clock = clock or SystemClock()
    async with owned(home.store, study_id, clock) as store:
        if plan is not None:
            store.plans.save(study_id, plan)
        frozen = store.plans.get(study_id)
        view.say(f"{study_id}: plan {frozen.digest()[:16]}; records in {home.root}")
        for assumption in frozen.assumptions:
            view.say(f"assumed: {assumption}")
        for each in frozen.known:
            view.say(f"already known: {known_text(each)}")
        worker = Worker(home, store, study_id, frozen, view, clock, copy)
        try:
            worker.check_halt()
            pass_plan(store, study_id, frozen)
            return await worker.through(wait=wait)
        except StudyHalted as halt:
            return await worker.rest(halt)
        except ExecutorError as error:
            worker.cannot_go_on(error)
            raise
        finally:
            await worker.notify()
            await discard_if_over(store, study_id, home.studies / study_id, clock)


class Worker:
    """Works on one study for its owner: `store` only accepts writes while the study's lease is held."""

    def __init__(
        self,
        home: Home,
        store: Store,
        study_id: str,
        plan: Plan,
        view: View,
        clock: Clock,
        copy: Callable[[Store], Sink],
    ) -> None:
        self._home = home
        self._store = store
        self._study_id = study_id
        self._plan = plan
        self._view = view
        self._clock = clock
        self._copy = copy
        self._study = store.studies.get(study_id)
        self._notifiers = sinks_of(store, self._study.options.notify, os.environ, clock)
        detail = store.studies.schedule(study_id)
        self._timetable = Timetable(zone="UTC") if detail is None else Timetable.of_record(detail)

    async def through(self, *, wait: bool) -> Outcome:
        """Conduct the study in its windows.

        Raises: StudyHalted if no window opens any more or, without `wait`, until the next one; OverBudget.
        """
        while True:
            await self._opened(wait=wait)
            outcome = await self._work()
            if not outcome.for_window:
                return outcome

    def check_halt(self) -> None:
        """Raise StudyHalted on a request to stop or pause, or after the study's last day, even while the study waits at a gate."""
        check_requests(self._store, self._study_id)
        if self._timetable.over(self._clock.now()):
            raise StudyHalted("days")

    async def rest(self, halt: StudyHalted) -> Outcome:
        """Stop or pause the study, and end what a dead worker left running."""
        await self._end_left()
        ends = halt.status is StudyStatus.STOPPED
        rest(self._store, self._study_id, halt, self._clock.now())
        folder = interim_report(self._store, self._study_id, self._home.studies) if ends else None
        return Outcome(halt.status, halt.reason, folder)

    def cannot_go_on(self, error: ExecutorError) -> None:
        """Record why the study waits, and write an interim report. A finished study stays done, even if its models could not be
        kept."""
        if not self._store.studies.get(self._study_id).status.ended:
            interim_report(self._store, self._study_id, self._home.studies)
            notice = failure_notice(subject_of(self._study), in_words(error, "study"), self._clock.now())
            self._store.studies.set_status(self._study_id, StudyStatus.WAITING, redact(str(error)), notice)

    async def notify(self) -> None:
        """Send notices that have not been sent yet. One that cannot be sent now is kept for later, without an error."""
        for sink in self._notifiers:
            try:
                await asyncio.to_thread(sink.drain, self._study_id)
            except StoreError as error:
                self._view.say(f"notices wait: {error}")

    async def _end_left(self) -> None:
        folder = self._home.studies / self._study_id
        for line in await end_left_of(self._store, self._study_id, folder, self._clock):
            self._view.say(line)

    async def _opened(self, *, wait: bool) -> None:
        """Wait until a window is open. Raises: StudyHalted."""
        if wait and not self._timetable.open(self._clock.now()):
            await self._end_left()
        while not self._timetable.open(now := self._clock.now()):
            await asyncio.to_thread(check_requests, self._store, self._study_id)
            opening = self._timetable.next_opening(now)
            if opening is None:
                raise StudyHalted("days")
            text = f"waits for its window, which opens at {when(opening)}"
            if not wait:
                raise StudyHalted("window", text)
            self._store.studies.set_status(self._study_id, StudyStatus.WAITING, text)
            self._view.say(f"{self._study_id} {text}")
            while self._clock.now() < opening:  # short sleeps: a suspended machine wakes late from long ones
                await self._clock.sleep(min(_NAP_S, opening - self._clock.now()))
                await asyncio.to_thread(check_requests, self._store, self._study_id)

    async def _work(self) -> Outcome:
        """Work until the study ends, halts, or its window closes."""
        home, study_id, plan, say = self._home, self._study_id, self._plan, self._view.say
        options, folder = self._store.studies.get(study_id).options, home.studies / study_id
        instrument = as_frozen(open_instrument(options.instrument or plan.instrument), plan.instrument_code)
        await have_models(plan, options, say)
        pool = pool_of(home, self._store, study_id, plan, options, self._clock, say)
        say(f"waiting for {', '.join(options.servers) or starting(plan)} ...")
        mender = repairer_of(home, self._store, study_id, plan, instrument, self._clock, say)
        arranged = setup(home, instrument, plan, code=mender.code(), repairs=mender.taken_up)
        mender.tell_sandbox()
        clients = await place_of(options, instrument, self._clock, arranged.python, say)
        async with pool:
            executor = Executor(
                self._store,
                pool,
                arranged,
                may_run=lambda: self._timetable.open(self._clock.now()),
                clients=clients,
                mender=mender,
            )
            further: list[Sink] = [*(open_sink(self._store, name) for name in options.sinks), *self._notifiers]
            sink, reports = self._copy(self._store), home.studies
            conduct = Conduct(self._store, executor, sink, self._view, self._clock, reports, further=further)
            outcome = await conduct.carry_out(study_id)
        if outcome.status is StudyStatus.DONE:
            keeping = Keeping(self._store, study_id, folder, self._clock, os.environ)
            return replace(outcome, models=await keep(keeping, options, say))
        return outcome


async def wind_up(home: Home, study_id: str, tell: Callable[[str], None], clock: Clock | None = None) -> Outcome:
    """Finish what an earlier process left undone for a study that has ended or that nothing continues.

    Raises: LeaseHeld; ModelsNotKept; ServerUnfit.
    """
    clock = clock or SystemClock()
    folder, models = home.studies / study_id, None
    async with owned(home.store, study_id, clock) as store:
        study = store.studies.get(study_id)
        if study.status is StudyStatus.DONE:
            models = await keep(Keeping(store, study_id, folder, clock, os.environ), study.options, tell)
        else:
            for line in await end_left_of(store, study_id, folder, clock):
                tell(line)
            if not study.status.ended:
                store.studies.set_status(study_id, StudyStatus.STOPPED, "its process was killed")
                study = store.studies.get(study_id)
            await discard_if_over(store, study_id, folder, clock)
    written = study.status is StudyStatus.DONE or (folder / "report.md").exists()
    return Outcome(study.status, study.reason or "nothing left to do", folder if written else None, models=models)


async def lone_trials(
    home: Home,
    study_id: str,
    plan: Plan,
    arranged: Setup,
    stage: str,
    pairs: Sequence[tuple[str, int]],
    *,
    because: str,
    tell: Callable[[str], None] = lambda _: None,
) -> list[TrialRecord]:
    """Run trials as a separate study that no command can resume, and free its servers.

    Args:
        pairs: arm and seed of each trial.
        because: reason recorded for the study's end.
        tell: receives progress lines.
    """
    clock = SystemClock()
    await _wind_up_killed(home, clock, tell)
    options, folder = home.store.studies.get(study_id).options, home.studies / study_id
    async with owned(home.store, study_id, clock) as store:
        try:
            store.plans.save(study_id, plan)
            trials = store.trials.ensure(study_id, stage, pairs)
            for arm in {plan.model_of(arm).name: arm for arm, _ in pairs}.values():
                await have_models(plan, options, tell, arm=arm)
            pool = pool_of(home, store, study_id, plan, options, clock, tell)
            async with pool:
                return await Executor(store, pool, arranged).run_trials(study_id, plan, trials)
        finally:  # even after a refusal, an interrupt or a lack of servers: nothing continues this study
            store.studies.set_status(study_id, StudyStatus.STOPPED, because)
            await Keeping(store, study_id, folder, clock, os.environ).discard_servers()


async def _wind_up_killed(home: Home, clock: Clock, tell: Callable[[str], None]) -> None:
    """Wind up separate studies whose process was killed on this machine: nothing else ends their servers and clients."""
    for study in home.store.studies.all():
        lease = home.store.leases.holder(study.id)
        if lease is None or not is_dead(lease.owner) or not (home.studies / study.id).exists():  # else of another home
            continue
        if study.campaign_id is None and unresumable(home.store, study) is not None:
            with suppress(LeaseHeld, ServerUnfit):
                await wind_up(home, study.id, tell, clock)


def setup(
    home: Home, folder: InstrumentFolder, plan: Plan, *, code: Code | None = None, repairs: tuple[str, ...] = ()
) -> Setup:
    """Assemble what the executor needs.

    `code` is given if the study runs other code than the folder's. `repairs` are the code versions recorded as the study's repairs.
    """
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
        others={each.instrument: as_frozen(open_instrument(each.instrument), each.code) for each in plan.transfers},
    )


def in_words(error: Exception, what: str) -> str:
    """Say in a notice why the study or campaign cannot continue. Leaves out the error's text, which may quote a server or a client."""
    if isinstance(error, NoServersLeft | ServerUnfit):
        return f"The {what} waits: no server is left that can run its trials."
    if isinstance(error, ClusterUnreachable):
        return f"The {what} waits: the Ray cluster that runs its clients cannot be reached."
    return f"The {what} waits: it cannot continue without help."


async def keep(keeping: Keeping, options: StudyOptions, tell: Callable[[str], None]) -> Path | None:
    """Keep the models if requested, and free disk space on the servers. Raises: ModelsNotKept, ServerUnfit."""
    models = await keeping.keep_models(tell) if options.keep_models else None
    await keeping.discard_servers()
    return models
