"""Trials that train several models at once: every server or none, each with its own run, all of it in the records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.serving import ServerProcess
from researcher.executor.attempts import TrialLimits
from researcher.executor.errors import NoServersLeft
from researcher.executor.local_server import LocalServer
from researcher.executor.servers import ServerPool
from researcher.executor.trials import Executor, Progress
from researcher.instruments.instrument import Factor
from researcher.models import TrialRecord, TrialStatus
from researcher.store.store import Store
from researcher.study.plan import Arm, Plan, PlanRole
from swarm.client import SwarmClient
from swarm.protocol.runspec import RunSpec
from tests.fakes.example_plan import ARMS
from tests.fakes.repeat_study import repeat_plan, repeat_setup

pytestmark = pytest.mark.anyio

DUET = Path(__file__).parents[2] / "instruments" / "duet"
LIMITS = TrialLimits(attempt_s=240, stall_s=120, client_restarts=1, first_backoff_s=0.01, busy_s=60, check_s=0.3)
SECOND_RATE = Factor(
    name="second_rate", target="roles.second.optimizer.learning_rate", type="float", default=1e-5, low=0, high=1e-3
)


def duet_plan() -> Plan:
    """In one arm both models learn, in the other (the control) the second does not."""
    arms = (
        Arm(name=ARMS[0], levels={"learning_rate": 4e-5, "second_rate": 0.0}),
        Arm(name=ARMS[1], levels={"learning_rate": 4e-5}),
    )
    run = {"max_staleness": 0, "batch": {"tasks": 2, "group_size": 4}, "sampling": {"max_tokens": 8}}
    second = PlanRole(model="echo", run={"sampling": {"max_tokens": 9}})
    return repeat_plan(arms=arms, factors=(SECOND_RATE,), roles={"second": second}, run=run, heldout_tasks=4)


class Lab:
    def __init__(self, home: Path, store: Store) -> None:
        self.home, self.store, self.plan = home, store, duet_plan()
        self.study = store.studies.create("a topic", {})
        store.plans.save(self.study, self.plan)
        self.seen: list[Progress] = []

    def pool(self, *urls: str, **options: Any) -> ServerPool:
        starts = [LocalServer(model="echo", engine="echo", folder=self.home / name) for name in ("one", "two")]
        return ServerPool(
            self.store, f"study {self.study}", urls=urls, local=[] if urls else starts, roles=("second",), **options
        )

    async def run(self, pool: ServerPool, *arms: str) -> list[TrialRecord]:
        trials = self.store.trials.ensure(self.study, "compare", [(arm, 0) for arm in arms])
        setup = repeat_setup(self.home / "studies", DUET)
        return await Executor(self.store, pool, setup, limits=LIMITS, attempts=1).run_trials(
            self.study, self.plan, trials, self.seen.append
        )


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    store = Store.open(f"sqlite:///{tmp_path}/r.db")
    yield Lab(tmp_path, store)
    store.close()


async def test_every_model_has_its_run_and_both_are_in_the_records(lab: Lab) -> None:
    async with lab.pool() as pool:
        control, both = await lab.run(pool, *ARMS)
        [site] = pool.sites()
        assert [(await server.swarm.status()).run_id for server in site.servers] == [None, None], "all are given back"
    assert (control.status, both.status) == (TrialStatus.DONE, TrialStatus.DONE), (control.reason, both.reason)
    for trial in (control, both):
        assert [step for step, _ in trial.series["second/reward_mean"]] == [1, 2, 3, 4]
        assert len(trial.series["second/eval_reward_before"]) == len(trial.series["eval_reward_after"]) == 4
        assert trial.evidence is not None
        assert trial.evidence.spec is not None
        assert trial.evidence.roles is not None
        own, second = trial.evidence.spec, trial.evidence.roles["second"]
        assert (own["sampling"]["max_tokens"], second["sampling"]["max_tokens"]) == (8, 9)
        assert own["batch"] == second["batch"]
        assert own["optimizer"]["learning_rate"] == 4e-5
        assert second["optimizer"]["learning_rate"] == (0.0 if trial is control else 4e-5)
    assert not any(change for _, change in control.series["second/weights_change"])


async def test_a_trial_gets_all_of_its_servers_or_none(lab: Lab, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "a", "--log-level", "warning") as server:
        with pytest.raises(
            NoServersLeft, match=r"needs 2 servers at the same time .*, but only 1 can be used: give each"
        ):
            await lab.pool(server.url, f"{server.url}/").open()
        assert lab.store.leases.server_holder(server.url) is None, "nothing is held while it waits for more"


async def test_a_run_of_somebody_else_is_told_at_once_with_what_to_do(lab: Lab, tmp_path: Path) -> None:
    told: list[str] = []
    with ServerProcess(tmp_path / "a") as ours, ServerProcess(tmp_path / "b") as theirs:
        async with SwarmClient(theirs.url) as other:
            held = await other.start_run(RunSpec())
            heard = asyncio.Event()

            def tell(text: str) -> None:
                told.append(text)
                heard.set()

            async with lab.pool(ours.url, theirs.url, tell=tell) as pool:
                working = asyncio.create_task(lab.run(pool, ARMS[1]))
                await heard.wait()
                await other.stop_run(held.run_id)
                [done] = await working
    assert done.status is TrialStatus.DONE, done.reason
    assert len(told) == 1
    assert f"{theirs.url} is busy with run {held.run_id}" in told[0]
    assert f"`swarm run stop --url {theirs.url}`" in told[0]
