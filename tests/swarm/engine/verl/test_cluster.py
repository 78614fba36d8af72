"""What the driver asks of Ray, with Ray left out."""

from __future__ import annotations

import errno
import importlib.util
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.clock import ManualClock
from swarm.engine.seam import EngineError, TrainingRefused
from swarm.engine.training.channel import OpenRun, Request, Train
from swarm.engine.verl.room import Room
from swarm.engine.verl.settings import VerlSettings
from swarm.models.folder import ModelFolder
from tests.swarm.engine.batches import branching_batch

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


class Ranks:
    """A group of one, whose every method fails once it has been made."""

    def __init__(self, cause: Exception) -> None:
        self._cause = cause

    @property
    def workers(self) -> list[Any]:
        return [Remote(self._error)]

    def room(self) -> list[Any]:
        return [Room(node="a", shared_bytes=8 << 30, device_bytes=0, device_total_bytes=0)]

    def send_weights(self, *_: Any) -> list[Any]:
        return [self._error("send_weights")]

    def _error(self, method: str) -> Any:
        from ray.exceptions import RayTaskError

        return RayTaskError(method, "its traceback", self._cause)

    def __getattr__(self, method: str) -> Any:
        def fail(*_: Any) -> Any:
            raise self._error(method)

        return fail


class Remote:
    """An actor that answers with what this makes of the method's name."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self._answer = answer

    def __getattr__(self, method: str) -> Any:
        return types.SimpleNamespace(remote=lambda *_: self._answer(method))


@pytest.fixture
def failing(cpu_platform: None, monkeypatch: pytest.MonkeyPatch, tiny_llama: ModelFolder) -> Any:
    """A cluster of one rank whose methods fail with this. Its `asked` is what the replica was asked."""
    from swarm.engine.verl import cluster

    def get(references: list[Any], timeout: float | None) -> list[Any]:
        for each in references:
            if isinstance(each, Exception):
                raise each
        return references

    def made(cause: Exception, **fields: Any) -> Any:
        wanted: dict[str, Any] = {"model_dir": tiny_llama.path, "model_name": "m", "max_model_len": 64}
        one: Any = cluster.Cluster(VerlSettings(**wanted | fields))
        one._ranks, one.asked = Ranks(cause), []
        one._servers = [Remote(one.asked.append)]
        monkeypatch.setattr(cluster, "RayWorkerGroup", lambda **_: one._ranks)
        return one

    monkeypatch.setattr(cluster.ray, "get", get)
    monkeypatch.setattr(cluster.Cluster, "_connect", lambda self: None)
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


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"),
]


@pytest.mark.parametrize("cause", OUT_OF_MEMORY)
def test_a_rank_that_runs_out_of_memory_says_so_whatever_it_was_doing(failing: Any, cause: Exception) -> None:
    from swarm.engine.verl.cluster import OutOfMemory

    one = failing(cause)
    for use in (
        one.start,
        lambda: one.all_ranks("take_optimizer_step", 0.1, 0.0, 1.0),
        lambda: one.over_rows("forward_backward", None),
        lambda: one.take_over(Path("/state")),
        lambda: one.send_weights(1),
    ):
        with pytest.raises(OutOfMemory) as lost:
            use()
        assert str(lost.value) == str(cause)


def test_a_start_that_fails_otherwise_loses_the_cluster(failing: Any) -> None:
    from swarm.engine.verl.cluster import ClusterLost, OutOfMemory

    with pytest.raises(ClusterLost, match="the start failed") as lost:
        failing(ValueError("a shape")).start()
    assert not isinstance(lost.value, OutOfMemory)


@pytest.mark.parametrize("cause", OUT_OF_MEMORY)
def test_a_run_whose_ranks_run_out_of_memory_is_refused_with_what_needs_less(
    failing: Any, cause: Exception, tmp_path: Path
) -> None:
    from swarm.engine.verl.session import VerlSession

    one = failing(cause, sleep=True)
    session = VerlSession(one, "0" * 64, ManualClock(), pad_token=0)
    batch = branching_batch(dtype="bfloat16")
    wanted = OpenRun(run_id="r", branch=0, spec=batch.spec, directory=tmp_path, at_step=None)
    opened = session.answer(Request(number=7, command=wanted))
    session._run = wanted
    trained = session.answer(Request(number=8, command=Train(batch=batch)))
    assert one.asked == ["fall_asleep"]  # the ranks may hang: nothing is asked of anybody any more
    for reply, number, what in ((opened, 7, "open_run"), (trained, 8, "step 1")):
        assert reply.number == number
        assert reply.failure is not None
        assert reply.failure.kind == "unusable"
        with pytest.raises(TrainingRefused, match=rf"{what} ran out of memory: .*--verl-sampling-memory .*{cause}"):
            raise reply.failure.error()


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
    one = cluster.Cluster(VerlSettings(model_dir=Path("/m"), model_name="m", max_model_len=64))
    one._servers, one._ranks = [Remote(asked.append)], types.SimpleNamespace(workers=[Remote(asked.append)])
    monkeypatch.setattr(cluster.ray, "get", lambda references, timeout: references)
    with pytest.raises(EngineError), one.replicas_asleep():
        raise EngineError("refused")
    assert asked == ["fall_asleep", "give_back", "wake_up"]
