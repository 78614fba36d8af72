"""The engine for one GPU node or a cluster of nodes: verl's ranks and replicas on Ray, behind one driver process.

Imports neither torch nor ray nor verl.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.clock import Clock
from foundation.event_loop import take_exception
from swarm.engine.sampling.client import VllmClient
from swarm.engine.sampling.sampler import CallInFlight, Sampler
from swarm.engine.sampling.server import NO_BLOCKS, OUT_OF_MEMORY, VllmSettings, child_environment
from swarm.engine.seam import (
    Dialect,
    EngineDown,
    EngineError,
    EngineHealth,
    EngineInfo,
    RunContext,
    Sampled,
    SampledEvent,
    SampleRequest,
    StepOutcome,
    TrainBatch,
)
from swarm.engine.training.channel import Place, Publish, Reply, Resume
from swarm.engine.training.checkpoints import require_whole
from swarm.engine.training.handle import TrainerHandle
from swarm.engine.training.supervisor import BackOff, ChildCommand, ChildProcess, HungStatus
from swarm.engine.training.targets import adapters_shape, linear_layers, require_layers
from swarm.engine.verl.room import less_memory_at_start
from swarm.engine.verl.settings import (
    HUNG_STATUS,
    LOOK_EVERY_S,
    ON_EVERY_NODE,
    FusedKernels,
    Offloaded,
    VerlSettings,
    adapters_of,
)
from swarm.models.folder import ModelFolder
from swarm.protocol.episodes import WeightsVersion
from swarm.protocol.runspec import ComputeType

_PACKAGES = ("verl", "ray", "tensordict", "hydra", "codetiming", "torchdata", "transfer_queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlLayout:
    """What an operator chooses. The fields are those of `VerlSettings`, whose defaults replace None."""

    max_model_len: int | None = None
    ray_address: str | None = None
    nodes: int | None = None
    ranks_per_node: int | None = None
    tensor_parallel: int | None = None
    dtype: ComputeType | None = None
    max_num_seqs: int | None = None
    sampling_memory: float | None = None
    kv_cache_bytes: int | None = None
    tokens_per_rank: int | None = None
    sleep: bool | None = None
    offload: frozenset[Offloaded] | None = None
    fused_kernels: FusedKernels | None = None

    def settings(self, model: ModelFolder) -> VerlSettings:
        """Return the complete settings. Raises: EngineError if the layout is inconsistent, or the model cannot hold `max_model_len`."""
        served = VllmSettings(
            model_dir=model.path, model_name=model.name, log_path=Path(), max_model_len=self.max_model_len
        )
        chosen = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        fields = chosen | {
            "model_dir": model.path,
            "model_name": model.name,
            "max_model_len": served.model_len,
            "chat_template": served.chat_template,
            "tool_parser": served.tool_parser,
        }
        try:
            return VerlSettings.model_validate(fields)
        except ValueError as error:
            raise EngineError(f"this layout of ranks and replicas is not possible: {error}") from error


class VerlEngine:
    """See `swarm.engine.seam.Engine`. `logs` is a directory for the driver's log.

    Ranks and replicas live and die together: when one is lost, all are restarted, and the run is opened again.
    """

    def __init__(
        self, model: ModelFolder, layout: VerlLayout, *, logs: Path, clock: Clock, back_off: BackOff | None = None
    ) -> None:
        _refuse_without_packages()
        settings = layout.settings(model)
        self._info = EngineInfo(
            backend="verl",
            device=f"{settings.nodes} node(s) x {settings.ranks_per_node}",
            model=model.name,
            fingerprint=model.fingerprint,
            folder=model.path,
            layers=linear_layers(model.path),
            max_model_len=settings.max_model_len,
            dtype=settings.dtype,
            own_functions=True,
            default_seeds=False,
        )
        self._subscribers: list[Callable[[EngineHealth], None]] = []
        self._publishing = asyncio.Lock()
        self.sampling = ReplicaSampling(model.path, model.name, settings.max_model_len)
        self.driver = DriverHandle(
            settings,
            model.fingerprint,
            log_path=logs / "verl.log",
            clock=clock,
            on_health=self._tell,
            on_places=self.sampling.found,
            back_off=back_off,
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    def subscribe(self, on_health: Callable[[EngineHealth], None]) -> None:
        self._subscribers.append(on_health)

    async def boot(self) -> None:
        await self.driver.boot()

    async def shutdown(self) -> None:
        await self.driver.shutdown()
        await self.sampling.lost()

    # -- tokens and sampling --------------------------------------------------------------------------------------

    async def render(self, dialect: Dialect, body: dict[str, Any], *, add_generation_prompt: bool = True) -> list[int]:
        return await self.sampling.render(dialect, body, add_generation_prompt=add_generation_prompt)

    def decode(self, ids: list[int]) -> str:
        return self.sampling.decode(ids)

    async def sample(self, request: SampleRequest) -> Sampled:
        return await self.sampling.sample(request)

    def stream(self, request: SampleRequest) -> AsyncIterator[SampledEvent]:
        return self.sampling.stream(request)

    # -- training -------------------------------------------------------------------------------------------------

    async def open_run(self, run: RunContext, *, at_step: int | None = None) -> int:
        step = await self.driver.open_run(run, at_step)
        await self.serve(WeightsVersion(run_id=run.run_id, branch=run.branch, step=step))
        return step

    async def require_checkpoint(self, directory: Path, step: int) -> None:
        await asyncio.to_thread(require_whole, directory, step)

    async def train(self, batch: TrainBatch) -> StepOutcome:
        return await self.driver.train(batch)

    async def checkpoint(self, *, best: int | None = None) -> int:
        return await self.driver.checkpoint(best)

    async def serve(self, version: WeightsVersion) -> None:
        """See `Engine.serve`. Also raises EngineError if the weights are at another step, or arrive changed."""
        publication = asyncio.ensure_future(self._publish(version))
        publication.add_done_callback(take_exception)
        await asyncio.shield(publication)  # a caller that stops waiting does not leave sampling frozen

    async def _publish(self, version: WeightsVersion) -> None:
        async with self._publishing:
            reply = await self.driver.ask(Publish(step=version.step))
            self.sampling.changed(version, reply.counts)
            await self.driver.ask(Resume())

    def _tell(self, health: EngineHealth) -> None:
        for subscriber in self._subscribers:
            subscriber(health)


def _refuse_without_packages() -> None:
    lacking = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        raise EngineDown(
            f"{', '.join(lacking)} not installed; `make verl` (requirements/verl.txt) installs what verl needs"
        )


_IMPORTS_S = 300.0
"""Time limit, in seconds, for all processes of the cluster to import (one after another on a small machine), and for its groups to
connect."""
_FIRST_STEP_S = 60.0
"""Extra seconds for a first step, in which groups of ranks connect and kernels are compiled."""
_NO_BLOCKS = (NO_BLOCKS, "is larger than the available KV cache memory")
"""vLLM's messages when a replica's share of memory leaves none for keys and values, or too little for one call of maximum length."""
_STOP_GRACE_S = 20.0
"""Seconds that a stop may take: Ray needs a while to end its actors on other nodes."""

Found = Callable[[list[Place]], Awaitable[None]]


class DriverHandle(TrainerHandle):
    """Handle for the driver.

    If the driver does not answer in time, it is ended with its whole cluster, whichever part hangs. `on_places` is called with the
    replicas of a newly started driver, before subscribers learn that it is ready.
    """

    def __init__(
        self,
        settings: VerlSettings,
        fingerprint: str,
        *,
        log_path: Path,
        clock: Clock,
        on_health: Callable[[EngineHealth], None],
        on_places: Found,
        back_off: BackOff | None = None,
    ) -> None:
        self._settings = settings
        self._fingerprint = fingerprint
        self._on_places = on_places
        super().__init__(
            "driver",
            settings.work("cpu", start_s=_FIRST_STEP_S),
            imports_s=_IMPORTS_S,
            log_path=log_path,
            clock=clock,
            on_health=on_health,
            back_off=back_off,
            stop_grace_s=_STOP_GRACE_S,
            on_greeting=self._greeted,
            hung_status=HungStatus(status=HUNG_STATUS, silent_s=self._silent_s),
            hopeless=self._out_of_memory,
        )

    async def open_run(self, run: RunContext, at_step: int | None) -> int:
        """See `Engine.open_run`. Restarts the driver if it was started for parameters of another shape. Raises: EngineDown,
        EngineError."""
        adapters = adapters_of(run.spec)
        if adapters is not None:  # a driver started with unknown targets would fail for good
            require_layers(adapters.targets, linear_layers(self._settings.model_dir))
        if adapters_shape(adapters) != adapters_shape(self._settings.adapters):
            self._settings = self._settings.model_copy(update={"adapters": adapters})
            await self._supervisor.restart(failed=False)  # also if it is still booting
        return await super().open_run(run, at_step)

    async def _greeted(self, greeting: Reply) -> None:
        self._work = self._settings.work(greeting.device, start_s=_FIRST_STEP_S)
        await self._on_places(greeting.places)

    def _out_of_memory(self, child: ChildProcess) -> str | None:
        """Return advice if ranks or replicas ran out of memory, which a restart would repeat; None if the driver ended for another
        reason."""
        no_blocks = child.said(*_NO_BLOCKS)
        if not no_blocks and not child.said(*OUT_OF_MEMORY):
            return None
        return f"ranks or replicas ran out of memory: {less_memory_at_start(self._settings, no_blocks=no_blocks)}"

    def _silent_s(self) -> float:
        """Return how many seconds a rank or replica has been silent when the driver ends because of it."""
        return self._settings.silence_s(self._work.device) + LOOK_EVERY_S

    def _command(self, descriptor: int) -> ChildCommand:
        env = child_environment(os.environ) | ON_EVERY_NODE | {"RAY_USAGE_STATS_ENABLED": "0"}
        del env["VLLM_SERVER_DEV_MODE"]  # replicas listen on the network: no one there may call into their workers
        argv = [
            *(sys.executable, "-m", "swarm.engine.verl.driver_process"),
            *("--settings", self._settings.model_dump_json(), "--fingerprint", self._fingerprint),
            *("--socket", str(descriptor)),
        ]
        return ChildCommand(name="driver (verl)", argv=argv, env=env, log_path=self._log_path, pass_fds=(descriptor,))


@dataclass(slots=True)
class _Replica:
    client: VllmClient
    calls: int = 0


class ReplicaSampling(Sampler):
    """Samples from the replicas. The driver boots them and changes their weights; this class knows where they are and what they serve.

    `known` is whether the served weights are known; after a restart they are not, until a run is opened again.
    """

    def __init__(self, model_dir: Path, model_name: str, max_model_len: int) -> None:
        super().__init__(model_dir, model_name, max_model_len)
        self._replicas: list[_Replica] = []
        self.known = True

    async def found(self, places: list[Place]) -> None:
        """Send all calls to these newly started replicas from now on."""
        again = bool(self._replicas) or not self.known
        await self.lost()
        self._replicas = [_Replica(VllmClient.at(place.address, place.key)) for place in places]
        self.known = not again

    async def lost(self) -> None:
        """Forget the replicas, which are gone."""
        gone, self._replicas = self._replicas, []
        if gone:
            self.known = False
        for replica in gone:
            await replica.client.close()

    def changed(self, version: WeightsVersion, sampled_counts: dict[str, int]) -> None:
        """Record that the replicas serve these weights now. `sampled_counts` is what each request had sampled before, by vLLM's own
        id."""
        self._spans.change(version, sampled_counts)
        self.known = True

    @contextmanager
    def _call(self) -> Iterator[CallInFlight]:
        if not self.known:
            raise EngineDown("the replicas were restarted and do not serve the run's weights yet")
        with super()._call() as call:
            yield call

    @contextmanager
    def _server(self) -> Iterator[VllmClient]:
        if not self._replicas:
            raise EngineDown("there are no replicas; the engine is booting or has crashed")
        replica = min(self._replicas, key=lambda replica: replica.calls)
        replica.calls += 1
        try:
            yield replica.client
        finally:
            replica.calls -= 1
