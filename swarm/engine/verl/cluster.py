"""The driver's view of ranks and replicas on Ray. Knows nothing of runs or losses."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from tensordict import TensorDict
from verl.plugin.platform import get_platform
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from foundation.paths import packages_root
from swarm.engine.seam import EngineError
from swarm.engine.training.limits import GRACE_S
from swarm.engine.training.session import is_out_of_memory
from swarm.engine.verl.config import verl_config
from swarm.engine.verl.replica import Replicas
from swarm.engine.verl.room import Devices, lacking_devices, require_room
from swarm.engine.verl.settings import ON_EVERY_NODE, VerlSettings
from swarm.engine.verl.worker import RankWorker

_LOG = logging.getLogger(__name__)
_OBJECT_STORE_BYTES = 512 << 20
"""Size of Ray's object store, in bytes. Only batches pass through it, no weights."""
_NODE_ENVIRONMENT = ON_EVERY_NODE | {"PYTHONPATH": f"{packages_root()}{os.pathsep}${{PYTHONPATH}}"}
"""Environment for workers. On a cluster that is already running, they have the environment of their node, not the driver's. Ray appends
the node's own PYTHONPATH to ours, which has no effect on nodes without our folder."""
_ROLE = "actor_rollout"


_LOOKS, _LOOK_EVERY_S = 16, 2.0
"""Number of checks for free devices on a running cluster, and seconds between them."""


class ClusterLost(Exception):
    """A rank or a replica died or hangs. The driver cannot continue: it ends and is restarted."""


class ClusterHung(ClusterLost):
    """A rank or a replica hangs: it has not answered within its time limit."""


class OutOfMemory(ClusterLost):
    """A rank ran out of memory. The other ranks may be waiting for it in the middle of an exchange, so no rank can be used any more."""


class Cluster:
    """The ranks and replicas. Call `start` first. Every other method raises ClusterLost when a rank or replica is gone, and OutOfMemory
    when a rank ran out of memory. `check` and `check_replicas` raise ClusterHung when one does not answer."""

    def __init__(self, settings: VerlSettings) -> None:
        self.settings = settings

    def start(self) -> None:
        """Start ranks and replicas. Raises: EngineError if there are too few devices or too little free memory; ClusterLost,
        OutOfMemory."""
        self._connect()
        config = verl_config(self.settings)
        pool = RayResourcePool([self.settings.ranks_per_node] * self.settings.nodes, max_colocate_count=1)
        made = RayClassWithInitArgs(cls=ray.remote(RankWorker), config=config.actor_rollout_ref, role=_ROLE)
        device = get_platform().device_name
        self._ranks = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name=device)
        over_devices = get_platform().is_ipc_supported()
        require_room(self.settings, self._got(self._ranks.room()), over_devices=over_devices)
        with _naming("the start"):
            self._ranks.init_model()
            self._replicas = Replicas.create(config=config, worker_group=self._ranks)
        self._servers = [replica.server_handle for replica in self._replicas.get_replicas()]

    def _connect(self) -> None:
        """Connect to a running cluster, or start one on this machine that ends with this process."""
        settings, platform = self.settings, get_platform()
        if settings.fused_kernels == "triton" and self.device == "cpu":
            raise EngineError(
                "--verl-fused-kernels triton needs a GPU, and there is none: choose torch, or leave it out"
            )
        if settings.ray_address is not None:
            ray.init(
                address=settings.ray_address,
                runtime_env={"env_vars": _NODE_ENVIRONMENT},
                logging_level=logging.WARNING,
                log_to_driver=True,
            )
            self._await_devices()
            return
        if settings.nodes > 1:
            raise EngineError(f"{settings.nodes} nodes need a Ray cluster: start one and name it with --ray-address")
        there = platform.device_count()
        if settings.ranks_per_node > there:
            raise EngineError(f"{settings.ranks_per_node} ranks were requested, but this machine has {there} device(s)")
        ray.init(
            address="local",  # ignore any other cluster in the environment or on this machine
            num_cpus=2 * settings.ranks_per_node + 2,
            num_gpus=settings.ranks_per_node,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            logging_level=logging.WARNING,
        )

    def _await_devices(self) -> None:
        """Wait for free devices: an earlier driver's devices become free some time after it ends. Raises: EngineError if there are too
        few."""
        resource = get_platform().ray_resource_name()
        for _ in range(_LOOKS):
            free = available_resources_per_node()
            found = [
                Devices(
                    node=str(node["NodeManagerHostname"]),
                    free=int(free.get(node["NodeID"], {}).get(resource, 0)),
                    there=int(node["Resources"].get(resource, 0)),
                )
                for node in ray.nodes()
                if node["Alive"]
            ]
            if (lacking := lacking_devices(self.settings, found)) is None:
                return
            time.sleep(_LOOK_EVERY_S)
        raise EngineError(lacking)

    @property
    def addresses(self) -> list[str]:
        """HOST:PORT of each replica."""
        return [str(address) for address in self._replicas.get_addresses()]

    def keys(self) -> list[str]:
        """Return the API key of each replica."""
        return self._got([server.key.remote() for server in self._servers], self._silence_s)

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The kind of device that the ranks compute on."""
        return "cpu" if get_platform().device_name == "cpu" else "cuda"

    def check(self) -> None:
        """Check that every rank and replica answers. Call it only while the ranks are idle."""
        self.check_replicas()
        self._got(self._ranks.alive(), self._silence_s)

    def check_replicas(self) -> None:
        """Check that every replica answers, including its sampling processes. Do not call it during a change of weights."""
        self._got([server.alive.remote() for server in self._servers], self._silence_s)

    @cached_property
    def _silence_s(self) -> float:
        return self.settings.silence_s(self.device)

    # -- training -------------------------------------------------------------------------------------------------

    def all_ranks(self, method: str, *values: Any) -> list[Any]:
        """Call a method on every rank and wait for all of them."""
        workers = self._ranks.workers
        return self._got([getattr(worker, method).remote(*values) for worker in workers])

    def save_checkpoint(self, folder: Path) -> None:
        """Make every rank write its part into the folder. Also raises the OSError of a rank."""
        self._over_files("save_checkpoint", folder)

    def load_checkpoint(self, folder: Path) -> None:
        """Make every rank read its part. Also raises the OSError of a rank."""
        self._over_files("load_checkpoint", folder)

    def take_over(self, folder: Path) -> None:
        """Make every rank read its share of a checkpoint from the local engine or another number of ranks. Also raises the OSError of a
        rank."""
        self._over_files("take_over", folder)

    def _over_files(self, method: str, folder: Path) -> None:
        try:
            self.all_ranks(method, str(folder))
        except ClusterLost as error:
            cause = error.__cause__.cause if isinstance(error.__cause__, RayTaskError) else None
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror, cause.filename) from error
            raise

    def over_rows(self, method: str, rows: TensorDict) -> TensorDict:
        """Call a method on all ranks, each with its share of the rows. Returns the answers in row order."""
        with _naming(method):
            answer = getattr(self._ranks, method)(rows)
            return answer if isinstance(answer, TensorDict) else answer.get()

    # -- weights --------------------------------------------------------------------------------------------------

    def freeze(self) -> dict[str, int]:
        """Stop sampling everywhere; return each request's number of tokens, by vLLM's own id."""
        counts = self._got([server.freeze.remote() for server in self._servers])
        return {name: count for part in counts for name, count in part.items()}

    @contextmanager
    def replicas_asleep(self) -> Iterator[None]:
        """Within the block, only the ranks use the devices' memory. Calls wait, and continue where they stopped.

        If the cluster is lost, its replicas stay asleep until they are ended, because its ranks may no longer answer.
        """
        self._got([server.fall_asleep.remote() for server in self._servers])
        lost = False
        try:
            yield
        except ClusterLost:
            lost = True
            raise
        finally:
            if not lost:
                self.all_ranks("give_back")
                self._got([server.wake_up.remote() for server in self._servers])

    def send_weights(self, step: int) -> str:
        """Send the ranks' weights to the replicas; return their digest. Raises: ClusterLost if they arrived changed; then nothing
        samples from them."""
        sent = self._got(self._ranks.send_weights(step, secrets.token_hex(8)))
        received = self._got([server.forget.remote() for server in self._servers])
        if len({*sent, *received}) != 1:
            raise ClusterLost(f"the weights of step {step} changed on their way to the replicas")
        return str(sent[0])

    def go_on(self) -> None:
        self._got([server.go_on.remote() for server in self._servers])

    def _got(self, references: Sequence[Any], limit_s: float | None = None) -> list[Any]:
        """Wait for Ray's answers. `limit_s` None: no limit here, because the control process ends the driver if its request takes too
        long."""
        with _naming("a part of the cluster"):
            try:
                return list(ray.get(list(references), timeout=limit_s))
            except GetTimeoutError:
                pass
            try:
                return list(ray.get(list(references), timeout=GRACE_S))
            except GetTimeoutError as error:
                raise ClusterHung(f"a part of the cluster has not answered for {limit_s} s") from error


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn Ray's errors into ours. Raises: OutOfMemory with the rank's own message, else ClusterLost."""
    try:
        yield
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) else None
        if is_out_of_memory(cause):
            _LOG.error("%s failed: %s", what, error)
            raise OutOfMemory(str(cause)) from error
        raise ClusterLost(f"{what} failed: {error}") from error
