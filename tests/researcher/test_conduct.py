"""A conduct and its budget of wall time: what it counts, and what becomes of a trial when it is spent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from foundation.clock import ManualClock, SystemClock
from researcher.analysis.race import due
from researcher.conduct import Conduct
from researcher.executor.attempts import TrialLimits
from researcher.executor.local_server import LocalServer
from researcher.executor.servers import ServerPool
from researcher.executor.trials import Executor, OnProgress, Progress
from researcher.models import StudyStatus, TrialRecord, TrialStatus
from researcher.report.verify import verify
from researcher.store.errors import OverBudget
from researcher.store.store import Store
from researcher.study.plan import Budget, Plan
from researcher.view import StudyPicture
from tests.fakes.quiet import Quiet
from tests.fakes.repeat_study import repeat_plan, repeat_setup
from tests.fakes.shown_study import finish
from tests.fakes.study import study_plan

pytestmark = pytest.mark.anyio


async def test_when_its_wall_time_is_spent_what_runs_is_paused_and_the_study_stops(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/r.db")
    plan = repeat_plan(budget=Budget(wall_s=4, trials=12))
    study = store.studies.create("a topic", {})
    store.plans.save(study, plan)
    slow = LocalServer(model="echo", engine="echo", folder=tmp_path / "server", arguments=("--echo-latency-s", "0.5"))
    limits = TrialLimits(check_s=0.3, grace_s=5)
    for _ in range(2):  # resuming it does not give it more
        async with ServerPool(store, f"study {study}", local=slow) as pool:
            executor = Executor(store, pool, repeat_setup(tmp_path / "studies"), limits=limits)
            conduct = Conduct(store, executor, Quiet(), Quiet(), SystemClock(), tmp_path / "studies")
            with pytest.raises(OverBudget, match="wall-time budget is spent"):
                await conduct.carry_out(study)
            assert (await pool.servers[0].swarm.status()).run_id is None
        assert store.studies.get(study).status is StudyStatus.STOPPED
        states = {trial.status for trial in store.trials.all(study)}
        assert states == {TrialStatus.PAUSED, TrialStatus.PLANNED}
        [wall] = [budget for budget in store.budgets.all(study) if budget.kind == "wall_s"]
        assert wall.spent >= 4
    store.close()


class _Finishing:
    """An executor that finishes every trial it is given; `late`: the wall time ends while it does."""

    def __init__(self, store: Store, clock: ManualClock, takes_s: float) -> None:
        self._store = store
        self._clock = clock
        self._takes_s = takes_s
        self.halted = asyncio.Event()
        self.then: Callable[[], object] = lambda: None

    async def run_trials(
        self, study_id: str, plan: Plan, trials: Sequence[TrialRecord], on_progress: object
    ) -> list[TrialRecord]:
        if trials:
            for _ in range(5):  # whoever waits beside it goes to sleep first
                await asyncio.sleep(0)
            self._clock.advance(self._takes_s)
            await self.halted.wait()
        for trial in trials:
            finish(self._store, study_id, trial, 0.3 if trial.arm == "lr=base" else 0.6)
        self.then()
        return []

    def halt(self, wish: str) -> None:
        self.halted.set()


async def test_a_study_whose_last_trials_end_as_its_wall_time_does_is_concluded(tmp_path: Path) -> None:
    """Nothing is left to spend time on."""
    clock = ManualClock()
    store = Store.open(f"sqlite:///{tmp_path}/r.db", clock=clock)
    plan = study_plan()
    study = store.studies.create("a topic", {})
    store.plans.save(study, plan)
    store.budgets.set(study, "trials", 20)
    for stage in plan.stages[:1]:
        for trial in store.trials.ensure(study, stage.id, [(arm, seed) for arm in stage.arms for seed in range(3)]):
            finish(store, study, trial, 0.3 + 0.01 * trial.seed)
    executor = _Finishing(store, clock, plan.budget.wall_s + 1)
    conduct = Conduct(store, executor, Quiet(), Quiet(), clock, tmp_path / "studies")  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        outcome = await conduct.carry_out(study)
    assert outcome.status is StudyStatus.DONE
    store.close()


@pytest.mark.parametrize("wish", ["request_stop", "request_pause"])
async def test_a_request_that_comes_as_a_stage_ends_keeps_the_next_one_from_running_and_the_last_one_from_nothing(
    tmp_path: Path, wish: str
) -> None:
    clock = ManualClock()
    store = Store.open(f"sqlite:///{tmp_path}/r.db", clock=clock)
    plan = study_plan()
    study = store.studies.create("a topic", {})
    store.plans.save(study, plan)
    executor = _Finishing(store, clock, 1.0)
    executor.halted.set()
    executor.then = lambda: getattr(store.studies, wish)(study)
    conduct = Conduct(store, executor, Quiet(), Quiet(), clock, tmp_path / "studies")  # type: ignore[arg-type]
    statuses = []
    for _ in plan.stages:
        outcome = await conduct.carry_out(study)
        statuses.append(outcome.status)
        store.studies.clear_requests(study)
        assert {trial.stage for trial in store.trials.all(study)} <= {
            stage.id for stage in plan.stages[: len(statuses)]
        }
    rests = StudyStatus.STOPPED if wish == "request_stop" else StudyStatus.WAITING
    assert statuses == [rests] * (len(plan.stages) - 1) + [StudyStatus.DONE]
    assert store.verdicts.all(study)
    store.close()


async def test_a_study_in_which_not_one_trial_is_finished_has_failed(tmp_path: Path) -> None:
    clock = ManualClock()
    store = Store.open(f"sqlite:///{tmp_path}/r.db", clock=clock)
    plan = study_plan()
    study = store.studies.create("a topic", {})
    store.plans.save(study, plan)
    for trial in store.trials.ensure(study, plan.stages[0].id, due(plan, plan.stages[0], plan.stages[0].seeds, [])):
        store.trials.fail(study, trial.key, f"2 attempts failed; the last: no {trial.key}")
        clock.advance(1.0)
    executor = _Finishing(store, clock, 0.0)
    conduct = Conduct(store, executor, Quiet(), Quiet(), clock, tmp_path / "studies")  # type: ignore[arg-type]
    for _ in range(2):  # resuming it changes nothing
        outcome = await conduct.carry_out(study)
        trials = store.trials.all(study)
        says = (
            f"{len(trials)} of {len(trials)} trials failed; the last: 2 attempts failed; the last: no {trials[-1].key}"
        )
        assert (outcome.status, outcome.reason) == (StudyStatus.FAILED, says)
        assert (store.studies.get(study).status, store.studies.get(study).reason) == (StudyStatus.FAILED, says)
        assert verify(store.study_data(study), store.reports.claims(study), store.reports.files(study)) == []
    store.close()


async def test_a_study_whose_report_cannot_be_written_stops_all_the_same(tmp_path: Path) -> None:
    clock = ManualClock()
    store = Store.open(f"sqlite:///{tmp_path}/r.db", clock=clock)
    study = store.studies.create("a topic", {})
    store.plans.save(study, study_plan())
    [trial] = store.trials.ensure(study, "floor", [("lr=base", 0)])
    store.budgets.set(study, "trials", 20)
    finish(store, study, trial, 0.3)
    store.budgets.set(study, "wall_s", 1.0)
    store.budgets.spend(study, "wall_s", "before", 1e9)
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / study).write_text("in the way")
    executor = _Finishing(store, clock, 0.0)
    conduct = Conduct(store, executor, Quiet(), Quiet(), clock, tmp_path / "studies")  # type: ignore[arg-type]
    with pytest.raises(OverBudget):
        await conduct.carry_out(study)
    assert store.studies.get(study).status is StudyStatus.STOPPED
    store.close()


@pytest.mark.parametrize("spent", [True, False])
async def test_the_report_that_is_written_at_a_studys_end_tells_of_it_and_verifies(spent: bool, tmp_path: Path) -> None:
    clock = ManualClock()
    store = Store.open(f"sqlite:///{tmp_path}/r.db", clock=clock)
    study = store.studies.create("a topic", {})
    store.plans.save(study, study_plan())
    store.budgets.set(study, "trials", 20)
    [trial] = store.trials.ensure(study, "floor", [("lr=base", 0)])
    finish(store, study, trial, 0.3)
    if spent:
        store.budgets.set(study, "wall_s", 1.0)
        store.budgets.spend(study, "wall_s", "before", 1e9)
    else:
        store.studies.request_stop(study)
    executor = _Finishing(store, clock, 0.0)
    executor.halted.set()
    conduct = Conduct(store, executor, Quiet(), Quiet(), clock, tmp_path / "studies")  # type: ignore[arg-type]
    with pytest.raises(OverBudget) if spent else contextlib.nullcontext():
        await conduct.carry_out(study)
    assert store.studies.get(study).status is StudyStatus.STOPPED
    text = (tmp_path / "studies" / study / "report.md").read_text()
    assert f"ended without an answer: {'the wall-time budget is spent' if spent else 'stopped on request'}" in text
    assert ("`--budget`" in text) == spent
    kept = store.reports.claims(study), store.reports.files(study), store.reports.seal(study)
    assert verify(store.study_data(study), *kept) == []
    store.close()


async def test_a_study_that_died_before_its_conclusion_is_concluded_though_its_wall_time_is_spent(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    store = Store.open(f"sqlite:///{tmp_path}/r.db", clock=clock)
    plan = study_plan()
    study = store.studies.create("a topic", {})
    store.plans.save(study, plan)
    for stage in plan.stages:
        for trial in store.trials.ensure(study, stage.id, [(arm, seed) for arm in stage.arms for seed in range(3)]):
            if not trial.status.ended:
                finish(store, study, trial, 0.01 * trial.seed + (0.3 if trial.arm == "lr=base" else 0.6))
    store.budgets.set(study, "wall_s", plan.budget.wall_s)
    store.budgets.spend(study, "wall_s", "since 0", plan.budget.wall_s)
    executor = _Finishing(store, clock, 0.0)
    conduct = Conduct(store, executor, Quiet(), Quiet(), clock, tmp_path / "studies")  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        outcome = await conduct.carry_out(study)
    assert outcome.status is StudyStatus.DONE
    assert [record.verdict.value for record in store.verdicts.all(study)] == ["supported"]
    store.close()


class _Paced:
    """An executor whose trials take 300 s each; it ends after the first `calls` calls as one that was told to pause does."""

    def __init__(self, store: Store, clock: ManualClock, calls: int) -> None:
        self._store = store
        self._clock = clock
        self._calls = calls

    async def run_trials(
        self, study_id: str, plan: Plan, trials: Sequence[TrialRecord], on_progress: OnProgress
    ) -> list[TrialRecord]:
        self._calls -= 1
        if self._calls < 0:
            self._store.studies.request_pause(study_id)
            return []
        began = self._clock.monotonic()
        for trial in trials:
            finish(self._store, study_id, trial, 0.01 * trial.seed + (0.3 if trial.arm == "lr=base" else 0.6))
            self._clock.advance(300.0)
            spent_s = self._clock.monotonic() - began
            on_progress(
                Progress(
                    key=trial.key,
                    status="done",
                    attempt=1,
                    step=1,
                    note="",
                    curve=(),
                    held_out=(),
                    spent_s=spent_s,
                    left_s=None,
                    measured=False,
                )
            )
        return []

    def halt(self, wish: str) -> None: ...


class _Watched(Quiet):
    def __init__(self) -> None:
        self.spent_s: list[float] = []

    def show(self, picture: StudyPicture) -> None:
        self.spent_s.append(picture.spent_s)


async def test_what_is_spent_counts_on_over_stages_and_resumes(tmp_path: Path) -> None:
    """It stands beside the budget of the whole study."""
    clock = ManualClock()
    store = Store.open(f"sqlite:///{tmp_path}/r.db", clock=clock)
    study = store.studies.create("a topic", {})
    store.plans.save(study, study_plan())
    view = _Watched()
    for calls in (1, 9):  # paused after its noise floor, then resumed
        executor = _Paced(store, clock, calls)
        conduct = Conduct(store, executor, Quiet(), view, clock, tmp_path / "studies")  # type: ignore[arg-type]
        async with asyncio.timeout(30):
            await conduct.carry_out(study)
        clock.advance(3600.0)
        store.studies.clear_requests(study)
    assert store.studies.get(study).status is StudyStatus.DONE
    [wall] = [budget for budget in store.budgets.all(study) if budget.kind == "wall_s"]
    assert view.spent_s == sorted(view.spent_s)
    assert view.spent_s[-1] == wall.spent == 300.0 * len(store.trials.all(study))
    store.close()
