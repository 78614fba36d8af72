"""A budget of tokens: what is counted, what may begin, and how a study stops that has spent it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.serving import ServerProcess
from foundation.clock import SystemClock
from researcher.cli.status import exit_code, status_json
from researcher.conduct import Conduct
from researcher.executor.attempts import AttemptRun, Observation, TrialLimits
from researcher.executor.local_server import LocalServer
from researcher.executor.servers import ServerPool
from researcher.executor.tokens import KIND, TokenBudget, count_tokens
from researcher.executor.trials import Executor
from researcher.home import Home
from researcher.models import BudgetState, StudyStatus, TrialRecord, TrialStatus
from researcher.store.errors import OverBudget
from researcher.store.store import Store
from researcher.study.plan import Budget, Plan
from swarm.protocol.episodes import TaskProgress
from tests.fakes.example_plan import ARMS
from tests.fakes.quiet import Quiet
from tests.fakes.repeat_study import repeat_plan, repeat_setup

pytestmark = pytest.mark.anyio
LIMITS = TrialLimits(check_s=0.2, count_s=0.2, grace_s=5, attempt_s=60, stall_s=20)
PLENTY = 100_000_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store.open(f"sqlite:///{tmp_path}/r.db")
    yield found
    found.close()


def _study(store: Store, tokens: int, expected: float = 1000.0) -> tuple[str, Plan, list[TrialRecord]]:
    plan = repeat_plan(budget=Budget(wall_s=600, trials=12, tokens=tokens), trial_tokens=expected)
    study = store.studies.create("a topic", {})
    store.plans.save(study, plan)
    store.budgets.set(study, KIND, tokens)
    return study, plan, store.trials.ensure(study, "compare", [(arm, seed) for seed in range(2) for arm in ARMS])


def _state(store: Store, study: str) -> BudgetState:
    [state] = [each for each in store.budgets.all(study) if each.kind == KIND]
    return state


def _begin(store: Store, study: str, trial: TrialRecord) -> None:
    number = store.trials.get(study, trial.key).attempt + 1
    store.trials.record_intent(study, trial.key, number, "http://a", f"{trial.key}#{number}", {})


def _end(store: Store, study: str, trial: TrialRecord) -> None:
    store.trials.finish(study, trial.key, {"auc_reward": 0.5}, {})


def test_the_first_trial_may_begin_on_what_is_left_and_measures_for_the_others(store: Store) -> None:
    study, plan, (one, other, third, fourth) = _study(store, tokens=900)
    budget = TokenBudget(store, study, plan)
    budget.reserve(one)  # nobody knows what it takes: 1,000 are guessed
    assert _state(store, study).reserved == 900
    with pytest.raises(OverBudget, match="the token budget is spent"):
        budget.reserve(other)
    _begin(store, study, one)
    budget.note(one.key, 1, 250)
    assert (_state(store, study).spent, _state(store, study).reserved) == (250, 650)
    budget.note(one.key, 1, 300)
    _end(store, study, one)
    budget.settle()
    assert (_state(store, study).spent, _state(store, study).reserved) == (300, 0)
    budget.reserve(other)
    budget.reserve(third)
    assert _state(store, study).reserved == 600
    with pytest.raises(OverBudget, match="is spent"):
        budget.reserve(fourth)


def test_each_arm_is_expected_to_take_what_its_own_trials_took(store: Store) -> None:
    study, plan, (one, other, third, fourth) = _study(store, tokens=1300)
    budget = TokenBudget(store, study, plan)
    for trial, took in ((one, 100), (other, 900)):
        budget.reserve(trial)
        _begin(store, study, trial)
        budget.note(trial.key, 1, took)
        _end(store, study, trial)
        budget.settle()
    budget.reserve(third)
    assert _state(store, study).reserved == 100
    with pytest.raises(OverBudget, match="needs about 900 tokens, but the budget has only 200 left"):
        budget.reserve(fourth)


def test_what_failed_attempts_took_stays_spent_and_what_was_reserved_for_them_is_free(store: Store) -> None:
    study, plan, (one, *_) = _study(store, tokens=5000)
    for number in (1, 2):
        budget = TokenBudget(store, study, plan)  # as after a restart
        budget.reserve(one)
        _begin(store, study, one)
        budget.note(one.key, number, 400)
        budget.reserve(one)  # the same attempt goes on
        assert _state(store, study).reserved == 600
        store.trials.fail_attempt(study, one.key, "why")
        TokenBudget(store, study, plan).settle()
        assert (_state(store, study).spent, _state(store, study).reserved) == (400 * number, 0)


def test_a_study_without_a_limit_counts_nothing(store: Store) -> None:
    plan = repeat_plan()
    study = store.studies.create("a topic", {})
    store.plans.save(study, plan)
    budget = TokenBudget(store, study, plan)
    budget.reserve(store.trials.ensure(study, "compare", [(ARMS[0], 0)])[0])
    budget.settle()
    assert not budget.is_spent()
    assert store.budgets.all(study) == []


def _pool(store: Store, study: str, folder: Path, *arguments: str) -> ServerPool:
    local = LocalServer(model="echo", engine="echo", folder=folder / "server", arguments=arguments)
    return ServerPool(store, f"study {study}", local=local)


async def test_the_tokens_of_a_trial_are_those_of_its_whole_ledger(store: Store, tmp_path: Path) -> None:
    study, plan, trials = _study(store, tokens=PLENTY)
    async with _pool(store, study, tmp_path) as pool:
        executor = Executor(store, pool, repeat_setup(tmp_path / "studies"), limits=LIMITS)
        await executor.run_trials(study, plan, trials[:2])
        swarm, total = pool.servers[0].swarm, 0
        for trial in trials[:2]:
            [attempt] = store.trials.attempts(study, trial.key)
            run = attempt.run_id
            assert run is not None
            entries = [entry async for entry in swarm.ledger(run_id=run)]
            assert {entry.kind for entry in entries} == {"train", "eval"}
            took = sum(entry.prompt_tokens + entry.sampled_tokens for entry in entries)
            assert await count_tokens([(swarm, run)]) == took > sum(entry.sampled_tokens for entry in entries)
            assert store.budgets.items(study, KIND)[f"{trial.key}#1"] == (0.0, took)
            total += took
    assert (_state(store, study).spent, _state(store, study).reserved) == (total, 0)


async def test_a_study_stops_when_its_tokens_are_spent_and_resuming_it_gives_it_no_more(
    store: Store, tmp_path: Path
) -> None:
    study, _, _ = _study(store, tokens=2_000, expected=500)
    for _ in range(2):
        async with _pool(store, study, tmp_path, "--echo-latency-s", "0.3") as pool:
            executor = Executor(store, pool, repeat_setup(tmp_path / "studies"), limits=LIMITS)
            conduct = Conduct(store, executor, Quiet(), Quiet(), SystemClock(), tmp_path / "studies")
            async with asyncio.timeout(60):
                with pytest.raises(OverBudget, match="token budget is spent"):
                    await conduct.carry_out(study)
            assert (await pool.servers[0].swarm.status()).run_id is None
        state, record = _state(store, study), store.studies.get(study)
        assert record.status is StudyStatus.STOPPED
        assert {trial.status for trial in store.trials.all(study)} <= {TrialStatus.PAUSED, TrialStatus.PLANNED}
        assert state.spent >= 2_000
    home = Home(tmp_path, store)
    assert exit_code(home, record) == 4
    assert {"kind": "tokens", "limit": 2_000.0, "reserved": state.reserved, "spent": state.spent} in status_json(
        home, record
    )["budgets"]


async def test_no_trial_begins_that_what_is_left_does_not_pay_for(store: Store, tmp_path: Path) -> None:
    study, plan, trials = _study(store, tokens=PLENTY)
    async with _pool(store, study, tmp_path) as pool:
        executor = Executor(store, pool, repeat_setup(tmp_path / "studies"), limits=LIMITS)
        await executor.run_trials(study, plan, trials[:1])
        took = _state(store, study).spent
        store.budgets.set(study, KIND, took * 2.5)
        with pytest.raises(OverBudget, match="another trial needs about"):
            await executor.run_trials(study, plan, trials)
    assert [trial.status for trial in store.trials.all(study)] == [TrialStatus.DONE] * 2 + [TrialStatus.PLANNED] * 2
    assert took < _state(store, study).spent <= took * 2.5


async def test_a_trial_that_does_not_fit_yet_waits_for_what_runs_beside_it(store: Store, tmp_path: Path) -> None:
    study, plan, trials = _study(store, tokens=PLENTY, expected=1e9)  # the first one reserves all of it
    with ServerProcess(tmp_path / "a") as a, ServerProcess(tmp_path / "b") as b:
        async with ServerPool(store, f"study {study}", urls=[a.url, b.url]) as pool:
            executor = Executor(store, pool, repeat_setup(tmp_path / "studies"), limits=LIMITS)
            done = await executor.run_trials(study, plan, trials)
    assert {trial.status for trial in done} == {TrialStatus.DONE}
    begun = sorted((trial.started_at or 0.0, trial.ended_at or 0.0) for trial in done)
    assert begun[1][0] >= begun[0][1]


class _Server:
    """A server at step 2, which never answers how many tokens it counted."""

    def __init__(self) -> None:
        self.url = "http://a"
        self.swarm = self
        self.counted = asyncio.Event()
        self.done = [TaskProgress(task_id="t", kind="train", step=None, ended=4)]

    async def tasks(self, run_id: str) -> list[TaskProgress]:
        return self.done

    async def run(self, run_id: str, since_step: int) -> Any:
        return SimpleNamespace(step=2, steps=[])

    async def summary(self, **_: object) -> None:
        self.counted.set()
        await asyncio.Event().wait()


def _attempt(store: Store, server: _Server, *, tokens: int, seen: list[Observation]) -> AttemptRun:
    study, plan, (trial, *_) = _study(store, tokens)
    _begin(store, study, trial)
    work: Any = SimpleNamespace(study_id=study, plan=plan)
    site, clients, budget = SimpleNamespace(main=server, beside={}), cast(Any, None), TokenBudget(store, study, plan)
    check_halt, tell = (lambda: None), (lambda _: None)
    attempt = AttemptRun(
        work, trial, cast(Any, site), store, SystemClock(), LIMITS, check_halt, tell, clients, None, budget
    )
    attempt._observe = seen.append
    attempt._number = 1
    return attempt


async def test_a_look_that_is_cut_off_while_it_counts_tokens_has_shown_its_progress(store: Store) -> None:
    server, seen = _Server(), list[Observation]()
    attempt = _attempt(store, server, tokens=PLENTY, seen=seen)
    status: Any = SimpleNamespace(run_id="r", step=2, phase="rolling")
    look = asyncio.create_task(attempt._note("r", status))
    async with asyncio.timeout(60):
        await server.counted.wait()
    look.cancel()
    await asyncio.gather(look, return_exceptions=True)
    assert [each.step for each in seen] == [2]


async def test_a_held_out_point_is_recorded_although_episodes_no_longer_count(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def held_out(*_: object) -> tuple[list[tuple[str, int, float]], tuple[()]]:
        return [("heldout_reward", 2, 0.5)], ()

    monkeypatch.setattr("researcher.executor.attempts.interim", held_out)
    server = _Server()
    attempt = _attempt(store, server, tokens=PLENTY, seen=[])
    attempt._counted_at = math.inf
    attempt._blueprint = cast(Any, SimpleNamespace(heldout=SimpleNamespace(tasks=1, interim=SimpleNamespace(tasks=1))))
    status: Any = SimpleNamespace(run_id="r", step=2, phase="rolling")
    await attempt._note("r", status)
    server.done = [TaskProgress(task_id="t", kind="eval", step=2, ended=1)]  # the reward of the others was withdrawn
    await attempt._note("r", status)
    [trial, *_] = store.trials.all(attempt._work.study_id)
    assert trial.series == {"heldout_reward": [(2, 0.5)]}
