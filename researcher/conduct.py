"""Carries out one study, from its frozen plan to its report: runs a stage, follows the plan's branch, concludes, writes the report.

A study's position is read from the records, so that a study whose process was killed at any instruction continues where it was:
trials have deterministic keys, decisions follow from recorded trials, and the report can be written again from SQL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from foundation.clock import Clock
from researcher.analysis.decide import Decision, decide
from researcher.analysis.durations import EVENTS
from researcher.analysis.knowledge import findings_of
from researcher.analysis.race import due
from researcher.analysis.verdicts import conclude
from researcher.executor.tokens import TokenBudget
from researcher.executor.trials import Executor, Progress
from researcher.gates import pass_stage
from researcher.halts import StudyHalted, check_requests
from researcher.models import OVER_BUDGET, BudgetState, StudyStatus, TrialRecord, TrialStatus
from researcher.notify.study import halt_notice, subject_of
from researcher.notify.watching import Watch
from researcher.notify.words import conclusion_notice, failure_notice
from researcher.refusals import RecordsDisagree
from researcher.report.writer import Written, write_report
from researcher.store.errors import OverBudget, StoreError
from researcher.store.store import Store
from researcher.study.plan import Plan, Stage
from researcher.view import StudyPicture, TrialLine, View, losses_text

_log = logging.getLogger(__name__)
_COPY_EVERY_S = 10.0
_COUNT_EVERY_S = 30.0
"""Interval, in seconds, at which the spent wall time is saved. A crash loses at most this much."""
_WATCH_EVERY_S = 60.0
_INTERIM_EVERY_S = 86_400.0
_INTERIM_AGAIN_S = 3600.0
"""Seconds until the next try when an interim report could not be written."""


class Sink(Protocol):
    """Receives copies of the records (MLflow, TensorBoard, Weights & Biases), or notices. Handles its own outages and sends waiting
    messages later.
    """

    def drain(self, study_id: str | None = None, /) -> int: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How work on a study ended.

    `status` is the study's new status. `report` is the folder with report.md and report.html. `for_window` is true if the study only
    waits for its next window. `models` is the folder of the kept models.
    """

    status: StudyStatus
    reason: str
    report: Path | None = None
    for_window: bool = False
    models: Path | None = None


class Conduct:
    """Carries out one study for its owner.

    `store` is fenced by the study's lease. `further` are sinks in addition to `sink`; each has its own pace and outages.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        sink: Sink,
        view: View,
        clock: Clock,
        reports: Path,
        *,
        further: Sequence[Sink] = (),
    ) -> None:
        self._store = store
        self._executor = executor
        self._sinks = (sink, *further)
        self._view = view
        self._clock = clock
        self._reports = reports

    async def carry_out(self, study_id: str) -> Outcome:
        """Run the rest of the study. Returns when it is done, was asked to stop, or waits for a person or a window."""
        study = self._store.studies.get(study_id)
        plan = self._store.plans.get(study_id)
        picture = StudyPicture(
            study_id=study_id,
            topic=study.topic,
            planner=study.planned_by(plan),
            budget_s=plan.budget.wall_s,
            phase="running",
        )
        self._store.studies.set_status(study_id, StudyStatus.RUNNING)
        self._store.budgets.set(study_id, "trials", plan.budget.trials)
        self._store.budgets.set(study_id, "wall_s", plan.budget.wall_s)
        if plan.budget.tokens is not None:
            self._store.budgets.set(study_id, "tokens", plan.budget.tokens)
        watch = Watch.of(self._store, study, plan, self._reports / study_id, self._clock)
        async with self._copying(study_id, watch):
            try:
                decision = await self._stages(study_id, plan, picture)
            except OverBudget as error:
                self._store.journal.record(study_id, OVER_BUDGET, {"because": str(error)})
                notice = failure_notice(
                    subject_of(study), "Its budget is spent, and it has stopped.", self._clock.now()
                )
                self._store.studies.set_status(study_id, StudyStatus.STOPPED, str(error), notice)
                interim_report(self._store, study_id, self._reports)  # it says how the study ended
                raise
            except StudyHalted as halt:
                rest(self._store, study_id, halt, self._clock.now())
                folder = interim_report(self._store, study_id, self._reports)
                return Outcome(halt.status, halt.reason, folder, for_window=halt.cause == "window")
            return self._conclude(study_id, plan, decision, picture)

    async def _stages(self, study_id: str, plan: Plan, picture: StudyPicture) -> Decision:
        """Run stage after stage as the plan's branches say. Raises: StudyHalted."""
        stage, seeds = plan.stages[0], plan.stages[0].seeds
        seen: list[str] = []
        while True:
            seen.append(stage.id)
            pass_stage(self._store, study_id, plan, stage, seeds)
            await self._run(study_id, plan, stage, seeds, picture)
            # A resumed study may already have trials of later stages. The decision was made without them, so leave them out.
            so_far = [trial for trial in self._store.trials.all(study_id) if trial.stage in seen]
            decision = decide(plan, stage.id, so_far)
            self._store.plans.set_stage_status(study_id, stage.id, "done")
            self._tell(study_id, decision, picture)
            if decision.action != "stage":
                return decision  # even if a person asked for a stop or a pause: nothing is left to run
            check_requests(self._store, study_id)
            stage = next(each for each in plan.stages if each.id == decision.to)
            seeds = decision.seeds or stage.seeds

    async def _run(self, study_id: str, plan: Plan, stage: Stage, seeds: int, picture: StudyPicture) -> None:
        """Run all trials of a stage, including those that the stage adds because of its own results. Raises: StudyHalted."""
        self._store.plans.set_stage_status(study_id, stage.id, "running")
        seen = 0
        while True:
            pairs = due(plan, stage, seeds, self._store.trials.all(study_id))
            if len(pairs) == seen:
                return
            seen = len(pairs)
            trials = self._store.trials.ensure(study_id, stage.id, pairs)
            await self._run_trials(study_id, plan, stage, trials, picture)

    async def _run_trials(
        self, study_id: str, plan: Plan, stage: Stage, trials: list[TrialRecord], picture: StudyPicture
    ) -> None:
        """Run these trials. Raises: StudyHalted when some of them have not ended."""
        for trial in self._store.trials.all(study_id):
            picture.trials[trial.key] = _line(trial, plan.steps_of(trial.arm))
        arms = dict.fromkeys(trial.arm for trial in trials)
        picture.phase = f"stage {stage.id}: {len(trials) // len(arms)} seeds of {', '.join(arms)}"
        picture.next, picture.left_s = _next_of(plan, stage), None
        picture.spent_s = before_s = self._wall(study_id).spent
        self._view.show(picture)

        def on_progress(progress: Progress) -> None:
            picture.spent_s = before_s + progress.spent_s
            self._see(progress, picture)

        left = [trial for trial in trials if not trial.status.ended]
        try:
            if left:  # else a spent budget would be refused although nothing has to run
                await self._within_budget(
                    study_id, lambda: self._executor.run_trials(study_id, plan, left, on_progress)
                )
        except OverBudget:
            if not self._all_ended(study_id, left):
                raise
        if not self._all_ended(study_id, left):
            check_requests(self._store, study_id)
            if TokenBudget(self._store, study_id, plan).is_spent():
                raise OverBudget("tokens", 0.0, 0.0)
            raise StudyHalted("window")

    def _all_ended(self, study_id: str, trials: Sequence[TrialRecord]) -> bool:
        return all(self._store.trials.get(study_id, trial.key).status.ended for trial in trials)

    async def _within_budget(self, study_id: str, work: Callable[[], Awaitable[object]]) -> None:
        """Do the work, and record the wall time that it takes.

        Time without work on trials does not count: outside of windows, in a pause, after a crash, or while the machine sleeps.

        Raises: OverBudget once the time is spent; running trials are paused by then.
        """
        wall = self._wall(study_id)
        left_s = wall.limit - wall.spent
        item, began, ran_s = f"since {self._clock.now():.3f}", self._clock.monotonic(), 0.0
        if left_s <= 0:
            raise OverBudget("wall_s", 0.0, left_s)
        working = asyncio.ensure_future(work())
        try:
            while not working.done() and ran_s < left_s:
                await self._either(working, min(_COUNT_EVERY_S, left_s - ran_s))
                ran_s = self._clock.monotonic() - began
                await asyncio.to_thread(self._store.budgets.spend, study_id, "wall_s", item, ran_s)
            if not working.done():
                self._executor.halt("budget")
                await working
                ran_s = self._clock.monotonic() - began
                await asyncio.to_thread(self._store.budgets.spend, study_id, "wall_s", item, ran_s)
                raise OverBudget("wall_s", ran_s, left_s)
            await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _either(self, working: asyncio.Future[object], limit_s: float) -> None:
        """Wait until the work is done or `limit_s` has passed."""
        pause = asyncio.create_task(self._clock.sleep(limit_s))
        try:
            await asyncio.wait((working, pause), return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()
            await asyncio.gather(pause, return_exceptions=True)

    def _wall(self, study_id: str) -> BudgetState:
        [wall] = [budget for budget in self._store.budgets.all(study_id) if budget.kind == "wall_s"]
        return wall

    def _see(self, progress: Progress, picture: StudyPicture) -> None:
        line = picture.trials[progress.key]
        line.status, line.step, line.note = progress.status, progress.step, progress.note
        if progress.status is TrialStatus.DONE:
            line.note = _note(self._store.trials.get(picture.study_id, progress.key))
        line.curve = [value for _, value in progress.curve]
        line.held_out = progress.held_out[-1] if progress.held_out else None
        picture.left_s, picture.left_measured = progress.left_s, progress.measured
        self._view.show(picture)

    def _tell(self, study_id: str, decision: Decision, picture: StudyPicture) -> None:
        detail = {
            "after": decision.after,
            "action": decision.action,
            "to": decision.to,
            "seeds": decision.seeds,
            "seeds_needed": decision.seeds_needed,
            "power": decision.power,
            "reason": decision.reason,
        }
        self._store.journal.record_once(study_id, "decision", detail)
        seeds = f" on {decision.seeds} seeds per arm" if decision.seeds else ""
        to = f" {decision.to}" if decision.to else ""
        self._view.say(f"after {decision.after}: {decision.action}{to}{seeds} ({decision.reason})")

    def _conclude(self, study_id: str, plan: Plan, decision: Decision, picture: StudyPicture) -> Outcome:
        """Record verdicts and findings, and write the report. The study is then done, or failed if no trial finished."""
        picture.phase, picture.next, picture.left_s = "concluding", "report", 0.0
        self._view.show(picture)
        study, trials = self._store.studies.get(study_id), self._store.trials.all(study_id)
        conclusions = conclude(plan, trials)
        for record in conclusions.verdicts:
            self._store.verdicts.record(study_id, decision.after, record)
            self._view.say(f"{record.hypothesis}: {record.verdict}. {record.reason}")
        verdicts = self._store.verdicts.all(study_id)
        events = self._store.journal.events(study_id, *EVENTS)
        self._store.findings.save(study_id, findings_of(study_id, plan, verdicts, self._clock.now(), trials, events))
        status, reason = StudyStatus.DONE, decision.reason
        if not any(trial.status is TrialStatus.DONE for trial in trials):
            last = max(trials, key=lambda trial: trial.ended_at or 0.0)
            status = StudyStatus.FAILED
            reason = f"{len(trials)} of {len(trials)} trials failed; the last: {last.reason}"
            failed = failure_notice(
                subject_of(study), f"{len(trials)} of {len(trials)} trials failed.", self._clock.now()
            )
            self._store.studies.set_status(study_id, status, reason, failed)  # first, because the report says so
        written = _written(self._store, study_id, self._reports)
        done = conclusion_notice(subject_of(study), written.answer, written.folder / "report.md")
        self._store.studies.set_status(study_id, status, reason, done if status is StudyStatus.DONE else None)
        return Outcome(status, reason, written.folder)

    @contextlib.asynccontextmanager
    async def _copying(self, study_id: str, watch: Watch | None = None) -> AsyncIterator[None]:
        """While the study runs, copy its records, write an interim report once a day, and watch for standstills and the end of each
        day.

        Each sink copies one thing at a time, independently of the others. On exit, waits for the last copies.
        """
        ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        tasks = [asyncio.create_task(self._copy(study_id, sink, ended)) for sink in self._sinks]
        tasks.append(asyncio.create_task(self._interims(study_id, ended)))
        if watch is not None:
            tasks.append(asyncio.create_task(self._watch(watch, ended)))
        try:
            yield
        finally:
            ended.set_result(None)
            await asyncio.gather(*tasks)

    async def _copy(self, study_id: str, sink: Sink, ended: asyncio.Future[object]) -> None:
        last = False
        while not last:
            await self._either(ended, _COPY_EVERY_S)
            last = ended.done()  # read before the copy, so that another copy follows if the study ends during this one
            try:
                sent = await asyncio.to_thread(sink.drain, study_id)
            except StoreError as error:  # unsent messages wait in the outbox
                _log.warning("the records could not be copied: %s", error)
            except Exception:  # noqa: BLE001 - a bug, ours or of a library, must end neither the copying nor the study
                _log.exception("the records could not be copied; the next attempt is in %.0f s", _COPY_EVERY_S)
            else:
                _log.debug("sent %d messages", sent)

    async def _interims(self, study_id: str, ended: asyncio.Future[object]) -> None:
        due_at = self._clock.now() + _INTERIM_EVERY_S
        while not ended.done():
            await self._either(ended, _COPY_EVERY_S)
            if ended.done() or self._clock.now() < due_at:  # wall clock, because the machine may sleep in between
                continue
            written = interim_report(self._store, study_id, self._reports)
            due_at = self._clock.now() + (_INTERIM_AGAIN_S if written is None else _INTERIM_EVERY_S)

    async def _watch(self, watch: Watch, ended: asyncio.Future[object]) -> None:
        while not ended.done():
            await self._either(ended, _WATCH_EVERY_S)
            try:
                await asyncio.to_thread(watch.look)
            except (OSError, StoreError) as error:  # a missing notice must not end the study
                _log.warning("the check for events to notify people of failed: %s", error)


def interim_report(store: Store, study_id: str, reports: Path) -> Path | None:
    """Write a report of a study that has not concluded, if any trial has finished.

    Returns None when there is nothing to report, or when the report cannot be written. A failure is logged, and the study continues.
    """
    try:
        if not any(trial.status is TrialStatus.DONE for trial in store.trials.all(study_id, series=())):
            return None
        return report(store, study_id, reports)
    except (OSError, StoreError, RecordsDisagree) as error:
        _log.warning("the report of %s could not be written (`researcher report` writes it): %s", study_id, error)
        return None


def report(store: Store, study_id: str, reports: Path) -> Path:
    """Write the report from the records, store its claims and hashes, and return its folder."""
    return _written(store, study_id, reports).folder


def _written(store: Store, study_id: str, reports: Path) -> Written:
    written = write_report(store.study_data(study_id), reports / study_id)
    store.reports.save_claims(study_id, written.claims)
    store.reports.record(study_id, written.files, written.seal)
    return written


def rest(store: Store, study_id: str, halt: StudyHalted, at: float) -> None:
    """Record that the study stops or rests, and notify people unless they asked for it. `at` is the current time."""
    notice = halt_notice(store.studies.get(study_id), halt.cause, store.gates.open(study_id), at)
    store.studies.set_status(study_id, halt.status, halt.reason, notice)


def _line(trial: TrialRecord, steps: int) -> TrialLine:
    curve = [value for _, value in trial.series.get("reward_mean", [])]
    return TrialLine(
        arm=trial.arm,
        seed=trial.seed,
        status=trial.status.value,
        step=len(curve),
        steps=steps,
        curve=curve,
        note=_note(trial),
    )


def _note(trial: TrialRecord) -> str:
    found = trial.evidence.attrition if trial.evidence is not None else None
    return trial.reason or (losses_text(found) if found is not None else "")


def _next_of(plan: Plan, stage: Stage) -> str:
    following = [branch.to or branch.then for branch in plan.branches if branch.stage == stage.id]
    return "then " + " or ".join(dict.fromkeys(following)) if following else "report"
