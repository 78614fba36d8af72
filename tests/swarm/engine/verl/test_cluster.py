"""What the driver asks of Ray, with Ray left out."""

from __future__ import annotations

import errno
import importlib.util
import os
import types
from pathlib import Path
from typing import Any

import pytest

from swarm.engine.seam import EngineError
from swarm.engine.verl.settings import VerlSettings

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: `make verl`"),
    pytest.mark.filterwarnings("default"),  # verl's own
]


def connected(patch: pytest.MonkeyPatch, **fields: Any) -> dict[str, Any]:
    """What ray.init was given."""
    from swarm.engine.verl import cluster

    given: dict[str, Any] = {}
    patch.setattr(cluster.ray, "init", given.update)
    patch.setattr(cluster.Cluster, "_await_devices", lambda self: None)
    cluster.Cluster(VerlSettings(model_dir=Path("/m"), model_name="m", max_model_len=64, **fields))._connect()
    return given


def test_the_nodes_of_a_cluster_that_runs_already_hear_what_vllm_is_told_here(
    cpu_platform: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    told = connected(monkeypatch, ray_address="head:6379")["runtime_env"]["env_vars"]
    assert told["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert told["HF_HUB_OFFLINE"] == "1"
    first, own = told["PYTHONPATH"].split(os.pathsep)
    assert Path(first, "swarm", "engine", "verl").is_dir()
    assert own == "${PYTHONPATH}"  # Ray puts the node's own in its place
    assert not {"OPENAI_API_KEY", "PATH", "OMP_NUM_THREADS", "VLLM_SERVER_DEV_MODE"} & told.keys()


def test_a_cluster_of_this_machines_own_inherits_it(cpu_platform: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "runtime_env" not in connected(monkeypatch)


def test_a_cluster_of_its_own_is_no_other_that_the_machine_knows(
    cpu_platform: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert connected(monkeypatch)["address"] == "local"


class Rank:
    """One whose every method fails."""

    def __init__(self, cause: Exception) -> None:
        self._cause = cause

    def __getattr__(self, method: str) -> Any:
        from ray.exceptions import RayTaskError

        return types.SimpleNamespace(remote=lambda *_: RayTaskError(method, "its traceback", self._cause))


@pytest.fixture
def failing(cpu_platform: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cluster of one rank whose methods fail with this."""
    from swarm.engine.verl import cluster

    def get(references: list[Exception], timeout: float) -> None:
        raise references[0]

    def made(cause: Exception) -> cluster.Cluster:
        one = cluster.Cluster(VerlSettings(model_dir=Path("/m"), model_name="m", max_model_len=64))
        one._ranks = types.SimpleNamespace(workers=[Rank(cause)])
        return one

    monkeypatch.setattr(cluster.ray, "get", get)
    return made


def test_a_file_that_a_rank_cannot_write_is_told_as_such(failing: Any) -> None:
    one = failing(OSError(errno.ENOSPC, "No space left on device", "/state/x.pt"))
    for use in (one.save_checkpoint, one.load_checkpoint):
        with pytest.raises(OSError, match="No space left") as refused:
            use(Path("/state"))
        assert (refused.value.errno, refused.value.filename) == (errno.ENOSPC, "/state/x.pt")


def test_a_rank_that_fails_otherwise_is_lost_whatever_its_error_is(failing: Any) -> None:
    from swarm.engine.verl.cluster import ClusterLost

    with pytest.raises(ClusterLost, match="a part of the cluster failed"):
        failing(ConnectionError("reset by peer")).all_ranks("descend", 0.1, 0.0, 1.0)
    with pytest.raises(ClusterLost, match="a part of the cluster failed"):
        failing(ValueError("a shape")).load_checkpoint(Path("/state"))


def test_an_answer_that_lies_there_when_the_limit_is_over_counts(
    cpu_platform: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import GetTimeoutError

    from swarm.engine.verl import cluster

    waits: list[float] = []
    answers: list[list[bool] | None] = [None, [True], None, None]

    def get(references: list[Any], timeout: float) -> list[bool]:
        waits.append(timeout)
        answer = answers.pop(0)
        if answer is None:
            raise GetTimeoutError("late")
        return answer

    monkeypatch.setattr(cluster.ray, "get", get)
    one = cluster.Cluster(VerlSettings(model_dir=Path("/m"), model_name="m", max_model_len=64))
    assert one._got([None], 30.0) == [True]  # this process was suspended, and the part was not
    with pytest.raises(cluster.ClusterHung, match=r"30\.0 s"):
        one._got([None], 30.0)
    assert waits == [30.0, 1.0, 30.0, 1.0]


def test_devices_of_a_driver_that_has_just_ended_are_waited_for(
    cpu_platform: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swarm.engine.verl import cluster

    looks: list[float] = []
    node = {"Alive": True, "NodeID": "n", "NodeManagerHostname": "a", "Resources": {"GPU": 2.0}}
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [node, node | {"Alive": False, "NodeID": "gone"}])
    monkeypatch.setattr(cluster, "available_resources_per_node", lambda: {"n": {"GPU": 2.0} if looks else {"CPU": 4.0}})
    monkeypatch.setattr(cluster.time, "sleep", looks.append)
    wanted = {"model_dir": Path("/m"), "model_name": "m", "max_model_len": 64}
    cluster.Cluster(VerlSettings(**wanted, ranks_per_node=2))._await_devices()
    assert len(looks) == 1
    with pytest.raises(EngineError, match=r"has 0 \(free: a 2 of 2\)"):
        cluster.Cluster(VerlSettings(**wanted, ranks_per_node=4))._await_devices()


def test_kernels_of_gpus_are_refused_where_there_is_none(cpu_platform: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="choose torch"):
        connected(monkeypatch, fused_kernels="triton")


def test_replicas_wake_up_whatever_became_of_the_step(cpu_platform: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from swarm.engine.verl import cluster

    asked: list[str] = []

    class Server:
        def __getattr__(self, method: str) -> Any:
            return types.SimpleNamespace(remote=lambda *_: asked.append(method))

    one = cluster.Cluster(VerlSettings(model_dir=Path("/m"), model_name="m", max_model_len=64))
    one._servers, one._ranks = [Server()], types.SimpleNamespace(workers=[Server()])
    monkeypatch.setattr(cluster.ray, "get", lambda references, timeout: references)
    with pytest.raises(EngineError), one.replicas_asleep():
        raise EngineError("refused")
    assert asked == ["fall_asleep", "give_back", "wake_up"]
