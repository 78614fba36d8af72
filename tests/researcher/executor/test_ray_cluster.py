"""What a cluster may do to clients that live on it, on a job server in memory."""

from __future__ import annotations

import asyncio
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from foundation.clock import SystemClock
from researcher.executor import ray_cluster
from researcher.executor.blueprint import Code
from researcher.executor.diagnosis import Cause, Symptoms, diagnose
from researcher.executor.errors import ClusterUnreachable
from researcher.executor.jobs import ClientJob, Order
from researcher.executor.ray_cluster import ClusterRefused, RayCluster, check_address
from researcher.executor.ray_jobs import RayPlace
from swarm.protocol.blueprint import TrialBlueprint
from swarm.protocol.status import Phase
from tests.contracts.client_job_contract import order_of
from tests.fakes.job_server import FakeJobServer

pytestmark = pytest.mark.anyio


def cluster_of(server: FakeJobServer, patience_s: float = 0.0) -> RayCluster:
    return RayCluster("http://ray.test:8265", SystemClock(), patience_s=patience_s, connect=lambda _: server)


def job_on(server: FakeJobServer, tmp_path: Path, patience_s: float = 0.0) -> ClientJob:
    place = RayPlace(
        cluster_of(server, patience_s), environ={"SWARM_ADMIN_TOKEN": "swt_a", "SWARM_CLIENT_TOKEN": "swt_c"}
    )
    return place.job(tmp_path / "attempt1", "st-1/plan/arm/0#1")


async def test_a_client_takes_its_code_and_the_library_along_and_a_clients_token(tmp_path: Path) -> None:
    server, order = FakeJobServer(), order_of(tmp_path, "tasks = rollout = None")
    begun = await job_on(server, tmp_path).start(order)
    [job] = server.jobs.values()
    assert job.submission_id in begun.name
    names = zipfile.ZipFile(BytesIO(job.archive)).namelist()
    assert {"swarm/client/trial.py", "foundation/clock.py", "instrument/workflow.py", "blueprint.json"} <= set(names)
    assert not [name for name in names if "server" in name.split("/")]
    sent = TrialBlueprint.model_validate_json(zipfile.ZipFile(BytesIO(job.archive)).read("blueprint.json"))
    assert sent == order.blueprint.model_copy(update={"instrument_dir": "instrument"})
    assert zipfile.ZipFile(BytesIO(job.archive)).read("token") == b"swt_c\n"
    assert "swt_" not in f"{job.runtime_env} {job.metadata}"  # these are in Ray's logs
    assert not (tmp_path / "attempt1" / "client.zip").exists()


async def test_a_submission_whose_answer_was_lost_is_taken_over_and_one_of_other_code_is_replaced(
    tmp_path: Path,
) -> None:
    server, old = FakeJobServer(), order_of(tmp_path, "old = 1")
    await job_on(server, tmp_path).start(old)
    server.late.update(server.jobs)
    again = job_on(server, tmp_path)
    assert not await again.alive()
    await again.start(old)
    assert [job.status for job in server.jobs.values()] == ["RUNNING"]
    server.late.update(server.jobs)
    await job_on(server, tmp_path).start(order_of(tmp_path, "new = 1"))
    assert [job.status for job in server.jobs.values()] == ["STOPPED", "RUNNING"]


async def test_a_cluster_that_is_away_is_asked_again_and_never_taken_for_a_dead_client(tmp_path: Path) -> None:
    server, order = FakeJobServer(), order_of(tmp_path, "")
    job = job_on(server, tmp_path, patience_s=30)
    await job.start(order)
    server.away = True
    seen = asyncio.create_task(job.alive())
    while server.asked < 4:  # noqa: ASYNC110 - it is asked in another thread
        await asyncio.sleep(0.01)
    server.away = False
    assert await seen
    server.away = True
    with pytest.raises(ClusterUnreachable, match=r"http://ray\.test:8265 cannot be used"):
        await job_on(server, tmp_path).alive()


async def test_what_the_cluster_lost_is_infrastructure_and_its_client_is_started_again(tmp_path: Path) -> None:
    server, order = FakeJobServer(), order_of(tmp_path, "")
    job = job_on(server, tmp_path)
    await job.start(order)
    [name] = server.jobs
    server.end(name, status="FAILED", error_type="JOB_SUPERVISOR_ACTOR_DIED", message="its node died")
    await job.ended()
    assert job.said() == f"{name} spoke"
    ending = await job.ending()
    found = diagnose(Symptoms(folder=tmp_path, lost=ending.lost, said=job.said(), phase=Phase.ROLLING))
    assert (found.cause, "its node died" in str(found)) == (Cause.INFRASTRUCTURE, True)
    await job.start(order)
    assert [each[-2:] for each in server.jobs] == ["-1", "-2"]
    second = list(server.jobs)[1]
    server.unheard.add(second)
    server.end(
        second, status="FAILED", error_type="JOB_ENTRYPOINT_COMMAND_ERROR", driver_exit_code=1, message="its tail"
    )
    await job.ended()
    assert (job.said(), (await job.ending()).exit_code, (await job.ending()).lost) == ("its tail", 1, "")
    server.jobs.clear()  # the cluster was started anew
    assert not await job.alive()
    assert "no longer knows" in (await job.ending()).lost
    await job.start(order)
    assert await job.alive()


async def test_one_that_waits_for_room_is_let_go_when_it_is_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("researcher.executor.ray_jobs._SLACK_S", 0.1)
    server, order = FakeJobServer(full=True), order_of(tmp_path, "")
    place = RayPlace(cluster_of(server), stop_s=0, environ={})
    job = place.job(tmp_path / "attempt1", "st-1/plan/arm/0#1")
    await job.start(order)
    assert await job.alive()
    await job.end(0.0)
    assert not await job.alive()
    assert not await place.job(job.folder, "st-1/plan/arm/0#1").alive()


async def test_code_that_no_person_wrote_is_refused(tmp_path: Path) -> None:
    order = order_of(tmp_path, "")
    code = Code(folder=order.code.folder, version=order.code.version, sandboxed=True)
    with pytest.raises(ValueError, match="--clients local"):
        await job_on(FakeJobServer(), tmp_path).start(Order(blueprint=order.blueprint, code=code))


async def test_servers_on_loopback_are_refused_where_the_cluster_has_other_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = cluster_of(FakeJobServer())
    monkeypatch.setattr(ray_cluster, "_node_addresses", lambda _: ["127.0.0.1"])
    await cluster.check_reach([])
    monkeypatch.setattr(ray_cluster, "_node_addresses", lambda _: ["127.0.0.1", "203.0.113.9"])
    await cluster.check_reach(["http://192.0.2.7:8642"])
    for urls in ([], ["http://192.0.2.7:8642", "http://localhost:8642"]):
        with pytest.raises(ClusterRefused, match=r"203\.0\.113\.9.*--server http://THIS-HOST:8642"):
            await cluster.check_reach(urls)


def test_an_address_is_a_job_servers_and_the_one_that_ray_would_take() -> None:
    check_address("http://head:8265/", {"RAY_ADDRESS": "http://head:8265"})
    for given, environ, said in (
        ("head:8265", {}, "http://HOST:8265"),
        ("http://me:secret@head:8265", {}, "password"),
        ("http://head:8265", {"RAY_ADDRESS": "http://other:8265"}, "unset it"),
    ):
        with pytest.raises(ClusterRefused, match=said) as refused:
            check_address(given, environ)
        assert "secret" not in str(refused.value)
