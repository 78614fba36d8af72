"""Which servers host what a plan trains: by name, by weights, and by what the study's earlier trials had."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serving import ServerProcess
from foundation.commandline import UsageError
from researcher.cli.servers import check_servers, have_models
from researcher.executor.attempts import TrialLimits
from researcher.executor.errors import NoServersLeft
from researcher.executor.servers import ServerPool
from researcher.executor.slots import misfit, weights_seen
from researcher.executor.trials import Executor
from researcher.models import StudyOptions, TrialStatus
from researcher.store.store import Store
from researcher.study.plan import PlanModel, PlanRole
from swarm.models import ModelUnavailable
from swarm.models.folder import ModelFolder
from swarm.protocol.status import EngineStatus, Phase, PoolStatus, ServerStatus
from tests.fakes.example_plan import ARMS
from tests.fakes.repeat_study import repeat_plan, repeat_setup

pytestmark = pytest.mark.anyio

URL = "http://127.0.0.1:8642"
LIMITS = TrialLimits(attempt_s=240, stall_s=120, client_restarts=1, first_backoff_s=0.01, busy_s=60, check_s=0.3)
MINE, OTHER = "a" * 64, "b" * 64
FOLDER = PlanModel(name="tiny", fingerprint=MINE, path="/models/tiny")


def status(model: str, fingerprint: str = OTHER, backend: str = "local") -> ServerStatus:
    return ServerStatus(
        server_id="s",
        revision=1,
        phase=Phase.IDLE,
        model=model if backend == "echo" else f"{model}@{fingerprint[:12]}",
        model_fingerprint=fingerprint,
        pool=PoolStatus(),
        engine=EngineStatus(backend=backend, device="cpu"),
    )


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (PlanModel(name="smollm2-135m"), status("smollm2-135m-instruct-q4_1-dequantised")),
        (PlanModel(name="smollm2-135m"), status("smollm2-135m-instruct")),
        (PlanModel(name="HuggingFaceTB/SmolLM2-135M-Instruct"), status("smollm2-135m-instruct")),
        (PlanModel(name="Qwen/Qwen3-0.6B"), status("qwen--qwen3-0.6b")),
        (FOLDER, status("tiny", MINE)),
        (FOLDER, status("copied-elsewhere", MINE)),
        (FOLDER, status("tiny", backend="echo")),
    ],
)
def test_a_server_of_the_same_model_fits_whatever_it_is_called(model: PlanModel, found: ServerStatus) -> None:
    assert misfit(model, URL, found) is None


@pytest.mark.parametrize(
    ("model", "found", "says"),
    [
        (PlanModel(name="smollm2-81m"), status("smollm2-135m-instruct"), f"{URL} hosts smollm2-135m@bbbbbbbbbbbb"),
        (PlanModel(name="Qwen/Qwen3-0.6B"), status("qwen--qwen3-1.7b"), "`swarm serve --model Qwen/Qwen3-0.6B`"),
        (FOLDER, status("tiny", OTHER), "the plan trains tiny@aaaaaaaaaaaa"),
        (FOLDER, status("tiny", OTHER), "`swarm serve --model /models/tiny`"),
        (FOLDER, status("other", backend="echo"), "`swarm serve --model tiny --engine echo`"),
    ],
)
def test_a_server_of_another_model_is_refused_with_both_names(model: PlanModel, found: ServerStatus, says: str) -> None:
    assert says in str(misfit(model, URL, found))


def test_weights_that_changed_under_one_name_are_refused() -> None:
    model, found = PlanModel(name="smollm2-81m"), status("smollm2-81m-distilled")
    assert misfit(model, URL, found, seen=OTHER) is None
    assert "hosts other weights than this study trains as smollm2-81m" in str(misfit(model, URL, found, seen=MINE))


def test_every_given_server_has_to_host_the_plans_model(tmp_path: Path) -> None:
    plan = repeat_plan()
    with ServerProcess(tmp_path / "a") as right, ServerProcess(tmp_path / "b", "--model", "else") as wrong:
        check_servers(plan, [right.url])
        check_servers(plan, [right.url, "http://127.0.0.1:1"])  # one that is away is checked when it is first used
        with pytest.raises(UsageError, match=rf"the plan trains echo \({wrong.url} hosts else\)"):
            check_servers(plan, [right.url, wrong.url])
        with pytest.raises(UsageError, match=f"{right.url} hosts other weights than this study trains as echo"):
            check_servers(plan, [right.url], {"echo": MINE})


def test_servers_of_further_models_are_checked_in_their_order(tmp_path: Path) -> None:
    plan = repeat_plan(roles={"second": PlanRole(model="else")})
    with ServerProcess(tmp_path / "a") as own, ServerProcess(tmp_path / "b", "--model", "else") as second:
        check_servers(plan, [own.url, second.url])
        with pytest.raises(UsageError, match=rf"the plan trains echo \({second.url} hosts else\)"):
            check_servers(plan, [second.url, own.url])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(f"sqlite:///{tmp_path}/r.db")
    yield store
    store.close()


async def test_a_server_that_hosts_another_model_now_gets_no_more_trials(store: Store, tmp_path: Path) -> None:
    plan = repeat_plan(steps=2, heldout_tasks=2)
    study = store.studies.create("a topic", {})
    store.plans.save(study, plan)
    first, second = store.trials.ensure(study, "compare", [(ARMS[0], 0), (ARMS[0], 1)])
    server = ServerProcess(tmp_path / "a")
    port = server.url.rpartition(":")[2]
    try:
        async with ServerPool(store, f"study {study}", urls=[server.url]) as pool:
            executor = Executor(store, pool, repeat_setup(tmp_path / "studies"), limits=LIMITS, attempts=1)
            (done,) = await executor.run_trials(study, plan, [first])
            server.stop()
            server = ServerProcess(tmp_path / "b", "--model", "else", "--port", port)
            with pytest.raises(NoServersLeft, match=rf"the plan trains echo \({server.url} hosts else\)"):
                await executor.run_trials(study, plan, [second])
    finally:
        server.stop()
    assert done.status is TrialStatus.DONE
    assert list(weights_seen(store, study)) == ["echo"]
    assert runs_of(tmp_path / "b") == []


def runs_of(state: Path) -> list[Path]:
    """Runs that a server has begun."""
    return list((state / "runs").glob("*"))


async def test_the_progress_of_fetching_a_model_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sources, told = logging.getLogger("swarm.models.sources"), list[str]()

    def fetched(source: str) -> ModelFolder:
        sources.info("downloading %s ...", source)
        return ModelFolder(path=Path("/models/tiny"), name="tiny", fingerprint=MINE)

    monkeypatch.setattr("researcher.cli.servers.resolve", fetched)
    await have_models(repeat_plan(model=PlanModel(name="tiny")), StudyOptions(), told.append)
    assert told == ["downloading tiny ..."]
    assert caplog.messages == []
    sources.warning("later lines go to the log again")
    assert (told, len(caplog.messages)) == (["downloading tiny ..."], 1)


async def test_a_folder_that_changed_or_went_since_it_was_planned_is_not_hosted(
    tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    model = PlanModel(name="tiny-llama", fingerprint=tiny_llama.fingerprint, path=str(tiny_llama.path))
    options = StudyOptions()
    await have_models(repeat_plan(model=model), options, print)
    changed = model.model_copy(update={"fingerprint": MINE})
    with pytest.raises(ModelUnavailable, match=r"holds different weights \(.*\) than when the study was planned"):
        await have_models(repeat_plan(model=changed), options, print)
    gone = model.model_copy(update={"path": str(tmp_path / "gone")})
    with pytest.raises(ModelUnavailable, match=f"from the folder {tmp_path}/gone, which is not on this machine"):
        await have_models(repeat_plan(model=gone), options, print)
