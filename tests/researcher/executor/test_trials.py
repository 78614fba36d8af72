"""Trials on a real swarm server with the echo engine, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from bench.serving import ServerProcess
from foundation.clock import SystemClock
from researcher.analysis.durations import rests, took_s
from researcher.design.transfer import scored_on
from researcher.executor.attempts import AttemptRun, TrialLimits
from researcher.executor.errors import NoServersLeft
from researcher.executor.local_server import LocalLimits, LocalServer
from researcher.executor.processes import Berth
from researcher.executor.servers import PoolLimits, ServerPool
from researcher.executor.trials import Executor, Progress
from researcher.instruments.catalogue import InstrumentFolder, open_instrument
from researcher.models import TrialRecord, TrialStatus
from researcher.store.errors import LeaseSuperseded, OverBudget
from researcher.store.store import Store
from researcher.study.plan import Plan
from swarm.client import SwarmClient
from swarm.protocol.episodes import Cause
from swarm.protocol.runspec import RunSpec
from tests.fakes.example_plan import ARMS
from tests.fakes.repeat_study import FOLDER, repeat_plan, repeat_setup

pytestmark = pytest.mark.anyio

LIMITS = TrialLimits(
    attempt_s=60, stall_s=20, client_restarts=1, first_backoff_s=0.01, busy_s=5, grace_s=5, check_s=0.3
)
SLOW_S = 0.2
SLOW = ("--echo-latency-s", str(SLOW_S))


class Nights(SystemClock):
    """The machine's clock, put forward by a night at each `pass_by`."""

    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s

    def pass_by(self) -> None:
        self.ahead_s += 36_000.0


class Lab:
    """One study of two arms, and a pool for it."""

    def __init__(self, home: Path, store: Store, plan: Plan) -> None:
        self.home = home
        self.store = store
        self.plan = plan
        self.study = store.studies.create("a topic", {})
        store.plans.save(self.study, plan)
        self.seen: list[Progress] = []
        self.others: list[InstrumentFolder] = []
        """Further instruments on which the plan scores trained models."""

    def trials(self, seeds: int = 1) -> list[TrialRecord]:
        return self.store.trials.ensure(self.study, "compare", [(arm, seed) for seed in range(seeds) for arm in ARMS])

    @asynccontextmanager
    async def pool(
        self,
        *urls: str,
        arguments: tuple[str, ...] = (),
        limits: PoolLimits | None = None,
        keep_runs: bool = False,
    ) -> AsyncIterator[ServerPool]:
        local = LocalServer(model="echo", engine="echo", folder=self.home / "server", arguments=arguments)
        holder, own = f"study {self.study}", None if urls else local
        pool = ServerPool(self.store, holder, urls=urls, local=own, limits=limits, keep_runs=keep_runs)
        async with pool:
            yield pool

    async def run(
        self,
        pool: ServerPool,
        trials: list[TrialRecord],
        *,
        instrument: Path = FOLDER,
        limits: TrialLimits = LIMITS,
        attempts: int = 2,
        on_progress: Callable[[Progress], None] | None = None,
        may_run: Callable[[], bool] = lambda: True,
    ) -> list[TrialRecord]:
        setup = repeat_setup(self.home / "studies", instrument, *self.others)
        executor = Executor(self.store, pool, setup, limits=limits, attempts=attempts, may_run=may_run)
        return await executor.run_trials(self.study, self.plan, trials, on_progress or self.seen.append)

    def client_of(self, trial: TrialRecord, attempt: int = 1) -> Berth:
        [folder] = (self.home / "studies").glob(f"*/trials/*/{trial.arm}-seed{trial.seed}/attempt{attempt}")
        return Berth(folder, SystemClock())

    def at_step(self, step: int, act: Callable[[Progress], None]) -> Callable[[Progress], None]:
        """Do something once, when a trial has come that far."""
        done: list[bool] = []

        def watch(progress: Progress) -> None:
            self.seen.append(progress)
            if progress.step >= step and not done:
                done.append(True)
                act(progress)

        return watch


@pytest.fixture
def nights() -> Nights:
    return Nights()


@pytest.fixture
def lab(tmp_path: Path, nights: Nights) -> Iterator[Lab]:
    store = Store.open(f"sqlite:///{tmp_path}/r.db", clock=nights)
    yield Lab(tmp_path, store, repeat_plan())
    store.close()


def broken(tmp_path: Path, code: str) -> Path:
    """The instrument with a workflow that goes wrong."""
    folder = tmp_path / "broken"
    shutil.copytree(FOLDER, folder)
    workflow = folder / "workflow.py"
    workflow.write_text(workflow.read_text().replace('    """Ask once; right is right."""\n', code))
    return folder


async def test_every_trial_is_run_and_recorded_from_the_servers_records(lab: Lab) -> None:
    trials = lab.trials()
    async with lab.pool() as pool:
        done = await lab.run(pool, trials)
        again = await lab.run(pool, trials)
        assert pool.servers[0].owned
    assert again == done
    for trial in done:
        assert (trial.status, trial.attempt) == (TrialStatus.DONE, 1)
        assert set(trial.finals) == {"auc_reward", "heldout_accuracy"}
        assert [step for step, _ in trial.series["reward_mean"]] == [1, 2, 3, 4]
        assert len(trial.series["eval_reward_before"]) == len(trial.series["eval_success_after"]) == 8
        assert trial.evidence is not None
        assert trial.evidence.spec is not None
        assert trial.evidence.spec["optimizer"]["learning_rate"] == lab.plan.arm(trial.arm).levels["learning_rate"]
        assert trial.evidence.parameters == {"syllables": 2}
        assert trial.evidence.changes == []
        assert len(trial.evidence.heldout_tasks or []) == 8
        assert not set(trial.evidence.heldout_tasks or []) & set(trial.evidence.train_tasks or [])
        sampled = lab.store.trials.sampled_episodes(lab.study, trial.key)
        assert [episode.kind for episode in sampled] == ["eval"] * 2 + ["train"] * 4 + ["eval"] * 2
        assert all(call.request["messages"] and call.sampled_tokens for episode in sampled for call in episode.sampled)
        attempt = lab.store.trials.attempts(lab.study, trial.key)[0]
        assert (attempt.outcome, attempt.step) == ("done", 4)
        assert (lab.client_of(trial).folder / "blueprint.json").is_file()
        assert not lab.client_of(trial).alive()
    last = {progress.key: progress for progress in lab.seen}
    assert {progress.status for progress in last.values()} == {"done"}
    assert [len(progress.curve) for progress in last.values()] == [4, 4]
    assert min(progress.left_s or 0 for progress in lab.seen) == 0
    assert not Berth(lab.home / "server" / "process", SystemClock()).alive()


async def test_held_out_tasks_are_played_while_it_trains_and_change_no_result(lab: Lab) -> None:
    arm = ARMS[0]
    async with lab.pool() as pool:
        [plain] = await lab.run(pool, lab.trials()[:1])
        watched = Lab(lab.home / "watched", lab.store, repeat_plan(heldout_every=1))
        shown: list[list[int]] = []

        def look(_: Progress) -> None:
            now = watched.store.trials.get(watched.study, watched.trials()[0].key)
            shown.append([step for step, _ in now.series.get("heldout_reward", [])])

        [done] = await watched.run(pool, watched.trials()[:1], on_progress=look)
    assert plain.arm == done.arm == arm
    assert done.finals == plain.finals
    same = {name: line for name, line in done.series.items() if not name.startswith("heldout_") and name != "step_s"}
    assert {name: same[name] for name in ("reward_mean", "eval_reward_before", "eval_reward_after")} == {
        name: plain.series[name] for name in ("reward_mean", "eval_reward_before", "eval_reward_after")
    }
    assert [step for step, _ in done.series["heldout_reward"]] == [0, 1, 2, 3, 4]
    assert done.series["heldout_success"] == done.series["heldout_reward"]
    ends = [sum(value for _, value in done.series[f"eval_reward_{when}"]) / 8 for when in ("before", "after")]
    assert [done.series["heldout_reward"][0][1], done.series["heldout_reward"][-1][1]] == ends
    assert "heldout_reward" not in plain.series
    assert done.evidence is not None
    assert plain.evidence is not None
    assert done.evidence.attrition == plain.evidence.attrition
    assert any(steps and steps[-1] < 4 for steps in shown), "nothing was seen while it trained"


async def test_a_trained_model_is_scored_on_another_instrument_also_when_its_client_is_killed_there(
    tmp_path: Path,
) -> None:
    guess = open_instrument("guess_number")
    store = Store.open(f"sqlite:///{tmp_path}/r.db")
    plan = scored_on(repeat_plan(), [guess])
    lab = Lab(
        tmp_path, store, plan.model_copy(update={"transfers": (plan.transfers[0].model_copy(update={"tasks": 3}),)})
    )
    lab.others = [guess]
    [trial] = lab.trials()[:1]

    def kill_it_there() -> None:
        while not (logs := [*tmp_path.glob("studies/*/trials/**/out.log")]) or '"on": "gu' not in logs[0].read_text():
            time.sleep(0.02)
        os.kill(int((logs[0].parent / "pid").read_text()), signal.SIGKILL)

    async with lab.pool(arguments=SLOW) as pool, asyncio.TaskGroup() as meanwhile:
        meanwhile.create_task(asyncio.to_thread(kill_it_there))
        [done] = await lab.run(pool, [trial])
        async with SwarmClient(pool.servers[0].url) as swarm:
            played = [entry async for entry in swarm.ledger(kind="eval")]
    store.close()
    assert done.status is TrialStatus.DONE
    assert {"auc_reward", "heldout_accuracy", "guess_number_heldout_accuracy"} <= set(done.finals)
    assert len(done.series["on:guess_number/eval_reward_after"]) == 3 * guess.instrument.defaults.heldout_episodes
    assert "on:guess_number/eval_reward_before" not in done.series
    there = [entry for entry in played if entry.client_id.endswith(":on:guess_number") and entry.reward is not None]
    assert {(entry.claimed_step, entry.client_version) for entry in there} == {(4, guess.code)}
    assert done.evidence is not None
    assert not {entry.task_id for entry in there} & set(done.evidence.heldout_tasks or [])


async def test_an_evaluation_that_a_killed_client_began_is_ended_by_the_next_once(lab: Lab) -> None:
    watched = Lab(lab.home, lab.store, repeat_plan(heldout_every=2, heldout_tasks=16))
    trials = watched.trials()[:1]

    def kill(_: Progress) -> None:
        pid = watched.client_of(trials[0]).pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    async with watched.pool(arguments=SLOW) as pool:
        [done] = await watched.run(pool, trials, on_progress=watched.at_step(2, kill))
        run_id = watched.store.trials.attempts(watched.study, done.key)[0].run_id or ""
        entries = [entry async for entry in pool.servers[0].swarm.ledger(run_id=run_id, kind="eval")]
    played = Counter(entry.claimed_step for entry in entries if entry.reward is not None)
    assert played == {0: 16, 2: 16, 4: 16}
    assert [step for step, _ in done.series["heldout_reward"]] == [0, 2, 4]


@pytest.mark.parametrize("keep_runs", [False, True])
async def test_a_server_of_ours_keeps_the_checkpoints_of_its_newest_run_alone_unless_all_are_wanted(
    lab: Lab, keep_runs: bool
) -> None:
    trials = lab.trials()
    async with lab.pool(keep_runs=keep_runs) as pool:
        await lab.run(pool, trials)
    runs = [lab.store.trials.attempts(lab.study, trial.key)[0].run_id for trial in trials]
    kept = {folder.name for folder in (lab.home / "server" / "state" / "runs").glob("*") if any(folder.iterdir())}
    assert kept == set(runs if keep_runs else runs[-1:])


async def test_trials_are_spread_over_the_servers_that_are_given(lab: Lab, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "a") as one, ServerProcess(tmp_path / "b") as other:
        async with lab.pool(one.url, other.url) as pool:
            assert lab.store.leases.server_holder(one.url) is not None
            done = await lab.run(pool, lab.trials(seeds=2))
        assert lab.store.leases.server_holder(one.url) is None
    assert {trial.status for trial in done} == {TrialStatus.DONE}
    used = [lab.store.trials.attempts(lab.study, trial.key)[0].server_url for trial in done]
    assert set(used) == {one.url, other.url}


async def test_a_client_that_was_killed_goes_on_where_it_stopped(lab: Lab) -> None:
    trials = lab.trials()[:1]

    def kill(_: Progress) -> None:
        pid = lab.client_of(trials[0]).pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    async with lab.pool(arguments=SLOW) as pool:
        [done] = await lab.run(pool, trials, on_progress=lab.at_step(2, kill))
    assert (done.status, done.attempt) == (TrialStatus.DONE, 1)
    assert lab.client_of(trials[0]).tail("out.log", 100_000).count('"event": "train"') == 2


@pytest.mark.campaign
async def test_a_client_that_stopped_moving_is_killed_from_outside_and_started_again(lab: Lab) -> None:
    trials = lab.trials()[:1]

    def freeze(_: Progress) -> None:
        pid = lab.client_of(trials[0]).pid()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

    limits = TrialLimits(attempt_s=180, stall_s=10, client_restarts=1, first_backoff_s=0.01, grace_s=0.5, check_s=0.3)
    async with lab.pool(arguments=SLOW) as pool:
        [done] = await lab.run(pool, trials, on_progress=lab.at_step(2, freeze), limits=limits)
    assert (done.status, done.attempt) == (TrialStatus.DONE, 1)


HANGS = """
    import pathlib
    mark = pathlib.Path(__file__).with_name(f"client-{__import__('os').getpid()}")
    mark.touch()
    if episode.claim.kind == "train" and len(list(mark.parent.glob("client-*"))) == 1:
        await asyncio.Event().wait()
"""
"""In the first client, every training episode."""


async def test_an_episode_that_hangs_until_its_client_is_ended_from_outside_was_lost_by_the_client(
    lab: Lab, tmp_path: Path
) -> None:
    folder = broken(tmp_path, HANGS)
    limits = replace(LIMITS, stall_s=3, client_restarts=1)
    async with lab.pool() as pool:
        [done] = await lab.run(pool, lab.trials()[:1], instrument=folder, limits=limits)
    assert (done.status, done.attempt) == (TrialStatus.DONE, 1)
    assert done.evidence is not None
    assert done.evidence.attrition is not None
    lost = done.evidence.attrition.train.lost
    assert lost.pop(Cause.CLIENT) > 0
    assert Cause.PERSON not in lost


BAD_TASK = """
    if episode.claim.kind == "eval" and task.id == min(other.id for other in tasks("heldout", 0, 8)):
        raise KeyError(task.id)
"""


async def test_a_held_out_task_that_is_always_lost_costs_no_trial_and_stands_in_its_counts(
    lab: Lab, tmp_path: Path
) -> None:
    async with lab.pool() as pool:
        [done] = await lab.run(pool, lab.trials()[:1], instrument=broken(tmp_path, BAD_TASK), limits=LIMITS)
    assert (done.status, done.attempt) == (TrialStatus.DONE, 1)
    for when in ("before", "after"):
        assert [index for index, _ in done.series[f"eval_reward_{when}"]] == [1, 2, 3, 4, 5, 6, 7]
    assert done.evidence is not None
    assert done.evidence.attrition is not None
    lost = done.evidence.attrition.eval
    assert (lost.lost, lost.ended, lost.set_aside) == ({Cause.ROLLOUT: 6}, 14, 1)


async def test_a_server_of_ours_that_was_killed_is_started_again_and_goes_on(lab: Lab) -> None:
    trials = lab.trials()[:1]
    server = Berth(lab.home / "server" / "process", SystemClock())

    def kill(_: Progress) -> None:
        pid = server.pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    quick = PoolLimits(local=LocalLimits(first_backoff_s=0.01))
    async with lab.pool(arguments=SLOW, limits=quick) as pool:
        [done] = await lab.run(pool, trials, on_progress=lab.at_step(2, kill))
    assert (done.status, done.attempt) == (TrialStatus.DONE, 1)


async def test_a_trial_whose_client_always_fails_is_recorded_as_failed_with_its_last_words(
    lab: Lab, tmp_path: Path
) -> None:
    folder = broken(tmp_path, '    raise RuntimeError("the moon is made of cheese")\n')
    trials = lab.trials()[:1]
    async with lab.pool() as pool:
        [failed] = await lab.run(pool, trials, instrument=folder)
        assert (await pool.servers[0].swarm.status()).run_id is None
    assert (failed.status, failed.attempt) == (TrialStatus.FAILED, 2)
    assert failed.reason is not None
    assert "made of cheese" in failed.reason
    assert [attempt.outcome for attempt in lab.store.trials.attempts(lab.study, failed.key)] == ["failed", "failed"]


@pytest.mark.campaign
async def test_failures_count_over_the_life_of_a_trial_and_interruptions_do_not(lab: Lab, tmp_path: Path) -> None:
    folder = broken(tmp_path, '    raise RuntimeError("no")\n')
    one, other = lab.trials()
    for number, (trial, end) in enumerate(
        ((one, lab.store.trials.fail_attempt), (other, lab.store.trials.withdraw_attempt))
    ):
        lab.store.trials.record_intent(lab.study, trial.key, 1, "http://gone", f"key-{number}", {})
        end(lab.study, trial.key, "before this process began")
    async with lab.pool() as pool:
        failed = await lab.run(pool, [one, other], instrument=folder)
    assert [(trial.status, trial.attempt) for trial in failed] == [(TrialStatus.FAILED, 2), (TrialStatus.FAILED, 3)]
    assert all(str(trial.reason).startswith("2 attempts failed; the last: ") for trial in failed)


async def test_a_trial_that_failed_often_enough_before_a_crash_is_not_tried_again(lab: Lab) -> None:
    trials = lab.trials()[:1]
    for number in (1, 2):
        lab.store.trials.record_intent(lab.study, trials[0].key, number, "http://gone", f"key-{number}", {})
        lab.store.trials.fail_attempt(lab.study, trials[0].key, "no luck")
    async with lab.pool() as pool:
        [failed] = await lab.run(pool, trials)
    assert (failed.status, failed.attempt, failed.reason) == (
        TrialStatus.FAILED,
        2,
        "2 attempts failed; the last: no luck",
    )


def test_time_limits_follow_from_how_long_a_trial_of_the_plan_takes() -> None:
    plan = repeat_plan()
    short, long = (TrialLimits.expecting(plan.model_copy(update={"trial_s": s})) for s in (60.0, 36_000.0))
    assert short.attempt_s < 1800 < 36_000 * 2 < long.attempt_s
    assert short.stall_s < 600 < 36_000 / plan.steps < long.stall_s
    assert TrialLimits.expecting(plan) == TrialLimits()


async def test_a_server_that_does_not_answer_is_named_at_once_and_given_up_in_time(lab: Lab) -> None:
    told: list[str] = []
    with socket.socket() as taken:  # bound and not listening: nothing answers there, and nobody else takes it
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        limits = PoolLimits(first_answer_s=1.5)
        with pytest.raises(NoServersLeft, match=f"no swarm server answers at {url} .*tried for 2 s"):
            await ServerPool(lab.store, "x", urls=[url], limits=limits, tell=told.append).open()
    assert len(told) == 1
    assert told[0].startswith(f"{url} does not answer; trying for")
    assert lab.store.leases.server_holder(url) is None


async def test_an_attempt_may_not_take_longer_than_its_limit_and_its_client_loses_what_is_open(
    lab: Lab, tmp_path: Path
) -> None:
    limits = TrialLimits(attempt_s=10, grace_s=5, check_s=0.2)
    trials = lab.trials()[:1]
    folder = broken(tmp_path, HANGS)
    async with lab.pool() as pool:
        [failed] = await lab.run(pool, trials, instrument=folder, limits=limits, attempts=1)
        [attempt] = lab.store.trials.attempts(lab.study, failed.key)
        entries = [entry async for entry in pool.servers[0].swarm.ledger(run_id=attempt.run_id)]
    assert {entry.cause for entry in entries if entry.kind == "train"} == {Cause.CLIENT}
    assert failed.status == TrialStatus.FAILED
    assert "exceeded its limit" in str(failed.reason)
    assert not lab.client_of(failed).alive()


async def test_a_trial_that_goes_forward_may_take_longer_than_was_expected_of_it(lab: Lab) -> None:
    """The plan was priced for a faster machine: the first steps show how long the rest takes."""
    limits = TrialLimits(attempt_s=8, grace_s=5, check_s=0.2)
    trials = lab.trials()[:1]
    began = time.monotonic()
    async with lab.pool(arguments=("--echo-latency-s", "1.5")) as pool:
        [done] = await lab.run(pool, trials, limits=limits, attempts=1)
    assert (done.status, done.reason) == (TrialStatus.DONE, None)
    assert time.monotonic() - began > limits.attempt_s
    assert {seen.measured for seen in lab.seen if seen.step >= 2} == {True}
    assert {seen.measured for seen in lab.seen if seen.step == 0 and seen.status != "done"} == {False}


async def test_a_stop_ends_what_runs_and_a_later_call_goes_on(lab: Lab) -> None:
    trials = lab.trials()

    def stop(_: Progress) -> None:
        lab.store.studies.request_stop(lab.study)

    async with lab.pool(arguments=SLOW) as pool:
        stopped = await lab.run(pool, trials, on_progress=lab.at_step(1, stop))
        assert [trial.status for trial in stopped] == [TrialStatus.PLANNED, TrialStatus.PLANNED]
        assert not lab.client_of(trials[0]).alive()
        lab.store.studies.clear_requests(lab.study)
        done = await lab.run(pool, trials)
    assert [(trial.status, trial.attempt) for trial in done] == [(TrialStatus.DONE, 2), (TrialStatus.DONE, 1)]


def assert_whole(trial: TrialRecord, steps: int = 4) -> None:
    """Done, with a curve that has neither a gap nor a step twice, and every evaluation."""
    assert trial.status == TrialStatus.DONE, trial.reason
    assert [step for step, _ in trial.series["reward_mean"]] == [*range(1, steps + 1)]
    assert len(trial.series["eval_reward_before"]) == len(trial.series["eval_reward_after"]) == 8


def told(lab: Lab, kind: str) -> list[dict[str, object]]:
    return [event.detail for event in lab.store.journal.events(lab.study, kind)]


async def test_a_pause_keeps_a_checkpoint_and_the_trial_goes_on_in_the_same_run(lab: Lab) -> None:
    trials = lab.trials()

    def pause(_: Progress) -> None:
        lab.store.studies.request_pause(lab.study)

    async with lab.pool(arguments=SLOW) as pool:
        paused = await lab.run(pool, trials, on_progress=lab.at_step(1, pause))
        assert (await pool.servers[0].swarm.status()).run_id is None
    assert [trial.status for trial in paused] == [TrialStatus.PAUSED, TrialStatus.PLANNED]
    assert not lab.client_of(trials[0]).alive()
    [rested] = told(lab, "trial_paused")
    step = lab.store.trials.attempts(lab.study, trials[0].key)[0].step
    assert rested["step"] == step == len(paused[0].series["reward_mean"]) >= 1
    lab.store.studies.clear_requests(lab.study)
    async with lab.pool() as pool:  # the server was ended, and is started again from its folder
        done = await lab.run(pool, trials)
        report = await pool.servers[0].swarm.run(str(lab.store.trials.attempts(lab.study, trials[0].key)[0].run_id))
    assert {trial.attempt for trial in done} == {1}
    for trial in done:
        assert_whole(trial)
    assert {step.branch for step in report.steps} == {0, 1}
    assert [each["step"] for each in told(lab, "trial_continued")] == [step]
    assert set(paused[0].series["reward_mean"]) <= set(done[0].series["reward_mean"])


@pytest.mark.campaign
async def test_when_its_window_closes_a_trial_leaves_its_server_free_and_goes_on_in_the_next(
    lab: Lab, tmp_path: Path
) -> None:
    trials, shut = lab.trials(), asyncio.Event()
    with ServerProcess(tmp_path / "a", *SLOW) as server:
        async with lab.pool(server.url) as pool:
            await lab.run(
                pool, trials, on_progress=lab.at_step(2, lambda _: shut.set()), may_run=lambda: not shut.is_set()
            )
        assert lab.store.trials.get(lab.study, trials[0].key).status == TrialStatus.PAUSED
        async with SwarmClient(server.url) as swarm:
            assert (await swarm.status()).run_id is None
        async with lab.pool(server.url) as pool:
            done = await lab.run(pool, trials)
    for trial in done:
        assert trial.attempt == 1
        assert_whole(trial)


@pytest.mark.campaign
async def test_a_trial_whose_run_was_replaced_meanwhile_starts_afresh_and_says_so(lab: Lab, tmp_path: Path) -> None:
    trials, shut = lab.trials()[:1], asyncio.Event()
    with ServerProcess(tmp_path / "a", *SLOW) as server:
        async with lab.pool(server.url) as pool:
            await lab.run(
                pool, trials, on_progress=lab.at_step(1, lambda _: shut.set()), may_run=lambda: not shut.is_set()
            )
        async with SwarmClient(server.url) as person:
            run = await person.start_run(RunSpec.model_validate({"limits": {"steps": 3}}))
            await person.stop_run(run.run_id)
            async for status in person.statuses():
                if status.run_id is None:
                    break
        async with lab.pool(server.url) as pool:
            [done] = await lab.run(pool, trials)
    assert_whole(done)
    assert done.attempt == 2
    [withdrawn] = told(lab, "attempt_withdrawn")
    assert "starts again" in str(withdrawn["because"])


@pytest.mark.campaign
async def test_a_trial_whose_server_lost_its_state_starts_afresh_and_says_so(lab: Lab) -> None:
    trials, shut = lab.trials()[:1], asyncio.Event()
    async with lab.pool(arguments=SLOW) as pool:
        await lab.run(pool, trials, on_progress=lab.at_step(1, lambda _: shut.set()), may_run=lambda: not shut.is_set())
    shutil.rmtree(lab.home / "server" / "state")
    async with lab.pool() as pool:
        [done] = await lab.run(pool, trials)
    assert_whole(done)
    assert done.attempt == 2
    assert "no longer knows run" in str(told(lab, "attempt_withdrawn")[0]["because"])


@pytest.mark.campaign
@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
async def test_a_server_without_room_on_its_disk_halts_a_study_and_counts_against_no_trial(
    lab: Lab, tmp_path: Path
) -> None:
    trials = lab.trials()
    with ServerProcess(tmp_path / "a", *SLOW) as server:

        def room(size: int) -> None:
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        watch, limits = lab.at_step(1, lambda _: room(1)), replace(LIMITS, stall_s=8)
        with pytest.raises(NoServersLeft, match=r"could not be written|cannot write") as full:
            async with lab.pool(server.url) as pool:
                await lab.run(pool, trials, attempts=1, on_progress=watch, limits=limits)
        assert f"`researcher resume {lab.study}`" in str(full.value)
        assert str(full.value).count(server.url) == 1
        assert not any(lab.store.trials.get(lab.study, trial.key).status.ended for trial in trials)
        room(resource.RLIM_INFINITY)
        async with lab.pool(server.url) as pool:
            for done in await lab.run(pool, trials, attempts=1):
                assert_whole(done)
    assert told(lab, "attempt_withdrawn")


@pytest.mark.campaign
async def test_a_run_of_the_studys_own_that_finds_no_room_to_stop_is_given_up_in_time(lab: Lab, tmp_path: Path) -> None:
    limits, told_in_time = replace(LIMITS, busy_s=1.0), list[str]()
    with ServerProcess(tmp_path / "a", *SLOW) as server:

        def no_room(_: Progress) -> None:
            [run] = (tmp_path / "a").glob("**/runs/run-*")
            shutil.rmtree(run, ignore_errors=True)
            run.write_text("in the way of every checkpoint")
            lab.store.studies.request_stop(lab.study)

        async with lab.pool(server.url) as pool:
            await lab.run(pool, lab.trials()[:1], limits=limits, on_progress=lab.at_step(1, no_room))
            lab.store.studies.clear_requests(lab.study)
            pool.tell = told_in_time.append
            with pytest.raises(NoServersLeft, match="was asked to stop but has not: cannot write in"):
                async with asyncio.timeout(60):
                    await lab.run(pool, lab.trials()[:1], limits=limits)
    assert [f"of study {lab.study}; waiting up to 1 s" in told_in_time[0], "make room" in told_in_time[1]] == [
        True,
        True,
    ]
    assert not lab.store.trials.all(lab.study)[0].status.ended


@pytest.mark.campaign
async def test_a_trial_that_was_interrupted_on_a_server_of_others_goes_on_there(lab: Lab, tmp_path: Path) -> None:
    trials, reached = lab.trials()[:1], asyncio.Event()
    with ServerProcess(tmp_path / "a", *SLOW) as server:
        async with lab.pool(server.url) as pool:
            running = asyncio.create_task(lab.run(pool, trials, on_progress=lab.at_step(2, lambda _: reached.set())))
            await reached.wait()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            assert (await pool.servers[0].swarm.status()).run_id is None
        async with lab.pool(server.url) as pool:
            [done] = await lab.run(pool, trials)
    assert_whole(done)
    assert done.attempt == 1


@pytest.mark.campaign
async def test_trials_that_are_interrupted_together_all_leave_their_servers_free(lab: Lab, tmp_path: Path) -> None:
    trials, reached = lab.trials(), {key: asyncio.Event() for key in (trial.key for trial in lab.trials())}

    def watch(progress: Progress) -> None:
        if progress.step >= 1:
            reached[progress.key].set()

    with ServerProcess(tmp_path / "a", *SLOW) as one, ServerProcess(tmp_path / "b", *SLOW) as other:
        async with lab.pool(one.url, other.url) as pool:
            running = asyncio.create_task(lab.run(pool, trials, on_progress=watch))
            await asyncio.gather(*(each.wait() for each in reached.values()))
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            assert [(await server.swarm.status()).run_id for server in pool.servers] == [None, None]
    assert {str(event["trial"]) for event in told(lab, "trial_paused")} == set(reached)


class AnsweredLate(httpx.AsyncHTTPTransport):
    """Answers to starts of runs are held back: the server has the run, and whoever asked does not know of it."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.let_through = asyncio.Event(), asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await super().handle_async_request(request)
        if request.method == "POST" and request.url.path.endswith("/runs"):
            self.started.set()
            await self.let_through.wait()
        return answer


@pytest.mark.campaign
async def test_interrupted_while_its_run_is_started_it_leaves_no_run_on_a_server_of_others(
    lab: Lab, tmp_path: Path
) -> None:
    trials, wire = lab.trials()[:1], AnsweredLate()
    with ServerProcess(tmp_path / "a") as server:
        async with ServerPool(lab.store, f"study {lab.study}", urls=[server.url], transport=wire) as pool:
            running = asyncio.create_task(lab.run(pool, trials))
            await wire.started.wait()
            assert (await pool.servers[0].swarm.status()).run_id is not None
            running.cancel()
            wire.let_through.set()
            with suppress(asyncio.CancelledError):
                await running
            assert (await pool.servers[0].swarm.status()).run_id is None
        async with lab.pool(server.url) as pool:
            [done] = await lab.run(pool, trials)
    assert_whole(done)
    assert done.attempt == 1


async def test_interrupted_it_leaves_no_process_behind_and_goes_on_later_with_the_same_attempt(lab: Lab) -> None:
    trials = lab.trials()[:1]
    reached = asyncio.Event()
    async with lab.pool(arguments=SLOW) as pool:
        running = asyncio.create_task(lab.run(pool, trials, on_progress=lab.at_step(2, lambda _: reached.set())))
        await reached.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert not lab.client_of(trials[0]).alive()
    assert not Berth(lab.home / "server" / "process", SystemClock()).alive()
    async with lab.pool(arguments=SLOW) as pool:
        [done] = await lab.run(pool, trials)
    assert (done.status, done.attempt) == (TrialStatus.DONE, 1)


def took(lab: Lab, trial: TrialRecord) -> float:
    seconds = took_s(trial, rests(lab.store.journal.events(lab.study)))
    assert seconds is not None
    return seconds


async def test_nights_between_an_interruption_a_pause_and_their_ends_are_no_time_that_the_trial_took(
    lab: Lab, nights: Nights
) -> None:
    trials, began = lab.trials(), time.monotonic()
    reached = asyncio.Event()
    async with lab.pool(arguments=SLOW) as pool:
        running = asyncio.create_task(lab.run(pool, trials, on_progress=lab.at_step(1, lambda _: reached.set())))
        await reached.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    nights.pass_by()
    async with lab.pool(arguments=SLOW) as pool:
        watch = lab.at_step(2, lambda _: lab.store.studies.request_pause(lab.study))
        await lab.run(pool, trials, on_progress=watch)
    nights.pass_by()
    lab.store.studies.clear_requests(lab.study)
    lab.seen.clear()
    async with lab.pool() as pool:
        [resumed, whole] = await lab.run(pool, trials)
    assert (resumed.status, resumed.attempt) == (TrialStatus.DONE, 1)
    assert resumed.started_at is not None
    assert resumed.ended_at is not None
    assert resumed.ended_at - resumed.started_at > 2 * 36_000
    assert 0 < took(lab, resumed) < time.monotonic() - began
    assert [each["because"] for each in told(lab, "trial_paused")] == ["interrupted", "a pause was requested"]
    assert len(told(lab, "trial_continued")) == 2
    left = [seen.left_s for seen in lab.seen if seen.key == whole.key and seen.step == 0]
    assert left[0] == pytest.approx(took(lab, resumed))
    assert {seen.measured for seen in lab.seen if seen.key == whole.key} == {True}


async def test_a_client_that_ended_alone_after_its_researcher_was_killed_worked_until_then(
    lab: Lab, nights: Nights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, reached = lab.trials()[:1], asyncio.Event()

    async def killed(*_: object) -> None:
        """Nobody tidies up."""

    with ServerProcess(tmp_path / "a", *SLOW) as server:
        with monkeypatch.context() as patched:
            patched.setattr(AttemptRun, "_leave", killed)
            async with lab.pool(server.url) as pool:
                watch = lab.at_step(1, lambda _: reached.set())
                running = asyncio.create_task(lab.run(pool, trials, on_progress=watch))
                await reached.wait()
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
        await lab.client_of(trials[0]).ended()
        [attempt] = lab.store.trials.attempts(lab.study, trials[0].key)
        nights.pass_by()
        async with lab.pool(server.url) as pool:
            ledger = pool.servers[0].swarm.ledger(run_id=str(attempt.run_id))
            last = max([entry.ended_at or 0.0 async for entry in ledger])
            [done] = await lab.run(pool, trials)
    assert_whole(done)
    assert done.started_at is not None
    assert attempt.heartbeat_at - done.started_at < last - done.started_at <= took(lab, done) < 60


@pytest.mark.campaign
async def test_what_is_left_is_not_guessed_from_a_trial_that_was_nearly_over_when_it_was_resumed(lab: Lab) -> None:
    trials = lab.trials()
    reached = asyncio.Event()
    async with lab.pool(arguments=SLOW) as pool:
        running = asyncio.create_task(lab.run(pool, trials, on_progress=lab.at_step(3, lambda _: reached.set())))
        await reached.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    lab.seen.clear()
    async with lab.pool() as pool:
        await lab.run(pool, lab.trials())
    [first] = [seen.left_s for seen in lab.seen if (seen.key, seen.status) == (trials[0].key, TrialStatus.DONE)]
    whole = took(lab, lab.store.trials.get(lab.study, trials[0].key))
    assert first == pytest.approx(whole)  # of the second trial, of which nothing was done
    assert whole > 3 * SLOW_S, "it is the time of the interrupted steps, too"


async def test_a_server_that_someone_else_uses_is_waited_for_and_then_given_up(lab: Lab, tmp_path: Path) -> None:
    limits = TrialLimits(busy_s=0.5, grace_s=5, check_s=0.3)
    with ServerProcess(tmp_path / "a") as server:
        async with SwarmClient(server.url) as person:
            run = await person.start_run(RunSpec.model_validate({"limits": {"steps": 3}}))
            async with lab.pool(server.url) as pool:
                with pytest.raises(NoServersLeft, match=run.run_id):
                    await lab.run(pool, lab.trials()[:1], limits=limits)
            assert (await person.status()).run_id == run.run_id
    [trial] = lab.store.trials.all(lab.study)[:1]
    assert trial.status == TrialStatus.PLANNED


async def test_a_pause_is_heeded_while_a_server_that_someone_else_uses_is_waited_for(lab: Lab, tmp_path: Path) -> None:
    limits = TrialLimits(busy_s=600, grace_s=5, check_s=0.3)
    with ServerProcess(tmp_path / "a") as server:
        async with SwarmClient(server.url) as person:
            run = await person.start_run(RunSpec.model_validate({"limits": {"steps": 3}}))
            async with lab.pool(server.url) as pool, asyncio.timeout(60):
                pool.tell = lambda _: lab.store.studies.request_pause(lab.study)
                await lab.run(pool, lab.trials()[:1], limits=limits)
            assert (await person.status()).run_id == run.run_id
    [trial] = lab.store.trials.all(lab.study)[:1]
    assert trial.status == TrialStatus.PLANNED


@pytest.mark.campaign
async def test_the_run_that_a_finished_study_left_behind_is_stopped(lab: Lab, tmp_path: Path) -> None:
    from researcher.models import StudyStatus

    earlier = lab.store.studies.create("an earlier one", {})
    lab.store.studies.set_status(earlier, StudyStatus.DONE)
    with ServerProcess(tmp_path / "a") as server:
        async with SwarmClient(server.url) as swarm:
            await swarm.start_run(RunSpec.model_validate({"labels": {"study": earlier}}))
        async with lab.pool(server.url) as pool:
            [done] = await lab.run(pool, lab.trials()[:1])
    assert done.status == TrialStatus.DONE


async def test_two_studies_do_not_share_a_server(lab: Lab, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "a") as server:
        async with lab.pool(server.url):
            with pytest.raises(NoServersLeft, match="is in use by study"):
                await ServerPool(lab.store, "study other", urls=[server.url]).open()


async def test_a_server_that_cannot_start_is_one_clear_error(lab: Lab) -> None:
    local = LocalServer(model="no-such-model", folder=lab.home / "server")
    with pytest.raises(NoServersLeft, match="no-such-model"):
        await ServerPool(lab.store, "x", local=local).open()


async def test_nothing_is_started_beyond_the_budget(lab: Lab) -> None:
    lab.store.budgets.set(lab.study, "trials", 1)
    async with lab.pool() as pool:
        with pytest.raises(OverBudget):
            await lab.run(pool, lab.trials())
    assert [trial.status for trial in lab.store.trials.all(lab.study)] == [TrialStatus.DONE, TrialStatus.PLANNED]
    assert lab.store.budgets.all(lab.study)[0].spent == 1


async def test_an_owner_that_was_superseded_writes_nothing_more(lab: Lab) -> None:
    trials = lab.trials()[:1]
    token = lab.store.leases.acquire(lab.study, "first", 60)
    first = lab.store
    lab.store = first.fenced(lab.study, token)

    def supersede(_: Progress) -> None:
        first.leases.acquire(lab.study, "second", 60, dead_owner="first")

    async with lab.pool(arguments=SLOW) as pool:
        with pytest.raises(LeaseSuperseded):
            await lab.run(pool, trials, on_progress=lab.at_step(1, supersede))
        assert lab.client_of(trials[0]).alive()  # the new owner continues it
        await lab.client_of(trials[0]).end(grace_s=5)
    assert first.trials.get(lab.study, trials[0].key).status == TrialStatus.RUNNING
