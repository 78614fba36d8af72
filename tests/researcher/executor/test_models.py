"""Arms that differ by their model: which servers take which trials, turns on one machine, and weights that changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.serving import ServerProcess
from foundation.commandline import UsageError
from researcher.analysis.sentinels import inspect
from researcher.cli.servers import check_servers
from researcher.executor.attempts import TrialLimits
from researcher.executor.errors import NoServersLeft
from researcher.executor.local_server import LocalServer
from researcher.executor.servers import ServerPool
from researcher.executor.trials import Executor
from researcher.instruments.instrument import Factor
from researcher.models import TrialRecord, TrialStatus
from researcher.store.sink import tags_of
from researcher.store.store import Store
from researcher.study.plan import Arm, Plan, PlanModel
from tests.fakes.example_plan import ARMS
from tests.fakes.repeat_study import repeat_plan, repeat_setup

pytestmark = pytest.mark.anyio

LIMITS = TrialLimits(attempt_s=240, stall_s=120, client_restarts=1, first_backoff_s=0.01, busy_s=60, check_s=0.3)
SMALL, LARGE = "echo-1m", "echo-2m"
SIZE = Factor(name="model_size", target="study.model", type="choice", default=LARGE, choices=(SMALL, LARGE))


def sizes_plan(**changes: object) -> Plan:
    """The first arm trains the small model, the second the large one."""
    arms = (Arm(name=ARMS[0], levels={"model_size": SMALL}), Arm(name=ARMS[1], levels={"model_size": LARGE}))
    run = {"batch": {"tasks": 2, "group_size": 4}, "sampling": {"max_tokens": 8}}
    models = (PlanModel(name=SMALL), PlanModel(name=LARGE))
    fields = {"arms": arms, "factors": (SIZE,), "models": models, "run": run, "steps": 2, "heldout_tasks": 2}
    return repeat_plan(**{**fields, **changes})


class Lab:
    def __init__(self, home: Path, store: Store, plan: Plan) -> None:
        self.home, self.store, self.plan = home, store, plan
        self.study = store.studies.create("a topic", {})
        store.plans.save(self.study, plan)
        self.told: list[str] = []

    def pool(self, *urls: str, **options: Any) -> ServerPool:
        starts = [LocalServer(model=model, engine="echo", folder=self.home / model) for model in (SMALL, LARGE)]
        return ServerPool(
            self.store,
            f"study {self.study}",
            urls=urls,
            local=[] if urls else starts,
            by_turns=not urls,
            models=2,
            tell=self.told.append,
            **options,
        )

    async def run(self, pool: ServerPool, seeds: int) -> list[TrialRecord]:
        pairs = [(arm, seed) for seed in range(seeds) for arm in ARMS]
        trials = self.store.trials.ensure(self.study, "compare", pairs)
        executor = Executor(self.store, pool, repeat_setup(self.home / "studies"), limits=LIMITS, attempts=1)
        return await executor.run_trials(self.study, self.plan, trials)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    store = Store.open(f"sqlite:///{tmp_path}/r.db")
    yield Lab(tmp_path, store, sizes_plan())
    store.close()


def model_of(trial: TrialRecord) -> str:
    assert trial.status is TrialStatus.DONE, trial.reason
    assert trial.evidence is not None
    assert trial.evidence.model is not None
    return trial.evidence.model.name


async def test_on_one_machine_servers_take_turns_a_boot_for_each_seed(lab: Lab) -> None:
    async with lab.pool() as pool:
        trials = await lab.run(pool, seeds=2)
        assert len(pool.servers) == 1, "one at a time"
    assert [model_of(trial) for trial in trials] == [SMALL, LARGE] * 2
    by_start = sorted(trials, key=lambda trial: trial.started_at or 0.0)
    assert [(trial.seed, model_of(trial)) for trial in by_start] == [(0, SMALL), (0, LARGE), (1, LARGE), (1, SMALL)]
    assert lab.told == [f"starting a server of {model} ..." for model in (SMALL, LARGE, SMALL)]
    plan = lab.plan.model_copy(update={"sentinels": ("factor_not_applied",)})
    assert inspect(plan, trials) == []
    wrong = [trial.model_copy(update={"arm": ARMS[0]}) for trial in trials]
    assert [(found.severity, found.text) for found in inspect(plan, wrong)] == [
        ("invalid", "never reached the engine: study.model")
    ]
    assert {tags_of(plan, trial, {})["swarm.model"].partition("@")[0] for trial in trials} == {SMALL, LARGE}


async def test_given_servers_take_the_arms_of_the_models_that_they_host(lab: Lab, tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "a", "--model", LARGE) as large,
        ServerProcess(tmp_path / "b", "--model", SMALL) as small,
    ):
        async with lab.pool(large.url, small.url, at_most=1) as pool:
            trials = await lab.run(pool, seeds=1)
        assert [model_of(trial) for trial in trials] == [SMALL, LARGE]
        urls = [lab.store.trials.attempts(lab.study, trial.key)[0].server_url for trial in trials]
        assert urls == [small.url, large.url]


async def test_a_trial_whose_server_now_hosts_another_model_starts_again_where_its_own_is_hosted(
    lab: Lab, tmp_path: Path
) -> None:
    with (
        ServerProcess(tmp_path / "a", "--model", LARGE) as large,
        ServerProcess(tmp_path / "b", "--model", SMALL) as small,
    ):
        [trial, _] = lab.store.trials.ensure(lab.study, "compare", [(arm, 0) for arm in ARMS])
        lab.store.trials.record_intent(lab.study, trial.key, 1, large.url, f"{trial.key}#1", {})
        async with asyncio.timeout(120), lab.pool(large.url, small.url) as pool:
            trials = await lab.run(pool, seeds=1)
        assert [model_of(trial) for trial in trials] == [SMALL, LARGE]
    first, second = lab.store.trials.attempts(lab.study, trial.key)
    assert (first.outcome, first.reason) == ("withdrawn", f"its server {large.url} no longer hosts {SMALL}")
    assert (second.outcome, second.server_url) == ("done", small.url)


async def test_a_trial_whose_model_is_hosted_nowhere_at_the_moment_keeps_its_run(lab: Lab, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "a", "--model", LARGE) as large:
        [trial, _] = lab.store.trials.ensure(lab.study, "compare", [(arm, 0) for arm in ARMS])
        lab.store.trials.record_intent(lab.study, trial.key, 1, large.url, f"{trial.key}#1", {})
        async with lab.pool(large.url) as pool:
            with pytest.raises(NoServersLeft, match=f"hosts {SMALL}"):
                await lab.run(pool, seeds=1)
    assert [each.outcome for each in lab.store.trials.attempts(lab.study, trial.key)] == ["open"]


async def test_a_study_with_an_arm_that_no_server_hosts_is_refused(lab: Lab, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "a", "--model", LARGE) as large:
        async with lab.pool(large.url) as pool:
            with pytest.raises(NoServersLeft, match=f"hosts {SMALL}"):
                await lab.run(pool, seeds=1)


def test_before_there_is_a_study_the_models_of_given_servers_are_asked_for(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "a", "--model", LARGE) as large:
        says = rf"no given server hosts {SMALL} \({large.url} hosts {LARGE}\): start one with `swarm serve --model {SMALL}`"
        with pytest.raises(UsageError, match=says):
            check_servers(sizes_plan(), [large.url])
    with ServerProcess(tmp_path / "b", "--model", "smollm2-135m") as other:
        one = repeat_plan(model=PlanModel(name="smollm2-81m"))
        with pytest.raises(UsageError, match=r"the plan trains smollm2-81m \(.* hosts smollm2-135m\)"):
            check_servers(one, [other.url])
        check_servers(repeat_plan(model=PlanModel(name="smollm2-135m")), [other.url])


def test_one_server_under_two_addresses_is_refused_before_there_is_a_study(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "a") as server:
        alias = server.url.replace("127.0.0.1", "localhost")
        check_servers(repeat_plan(), [server.url, f"{server.url}/"])
        with pytest.raises(UsageError, match=f"{server.url} and {alias} are the same server"):
            check_servers(repeat_plan(), [server.url, alias])


async def test_one_server_under_two_addresses_is_used_as_one(lab: Lab, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "a") as server:
        alias = server.url.replace("127.0.0.1", "localhost")
        async with lab.pool(server.url, alias) as pool:
            assert [each.url for each in pool.servers] == [server.url]
            assert pool.reasons() == f"{alias}: {server.url} and {alias} are the same server: give one of them"


async def test_an_address_of_something_else_is_named(lab: Lab) -> None:
    page = httpx.MockTransport(lambda _: httpx.Response(200, html="<h1>Welcome</h1>"))
    with pytest.raises(NoServersLeft, match=r"http://elsewhere: .*is this a swarm server"):
        await lab.pool("http://elsewhere", transport=page).open()


def test_an_address_of_something_else_is_refused_before_there_is_a_study() -> None:
    with _page() as url, pytest.raises(UsageError, match=f"{url}: .*is this a swarm server"):
        check_servers(repeat_plan(), [url])


@contextmanager
def _page() -> Iterator[str]:
    """The address of something that answers every request with a web page."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<h1>Welcome</h1>")

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_other_weights_than_the_study_saw_first_are_not_trained(lab: Lab, tmp_path: Path) -> None:
    lab.store.journal.record(lab.study, "weights", {"model": SMALL, "fingerprint": "0" * 64, "hosted": SMALL})
    async with lab.pool() as pool:
        with pytest.raises(NoServersLeft, match=f"hosts other weights than this study trains as {SMALL}"):
            await lab.run(pool, seeds=1)


def test_a_plan_whose_arms_train_models_that_it_does_not_name_is_refused() -> None:
    with pytest.raises(ValueError, match="arms train"):
        sizes_plan(models=(PlanModel(name=SMALL),))
