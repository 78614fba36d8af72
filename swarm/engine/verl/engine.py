"""The engine of a GPU node or a cluster of them: verl's ranks and replicas on Ray, behind one driver process.

Imports neither torch nor ray nor verl.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.clock import Clock
from foundation.futures import take_exception
from swarm.engine.local.vllm_server import VllmSettings
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
from swarm.engine.training.channel import Publish, Resume
from swarm.engine.training.checkpoints import require_whole
from swarm.engine.training.supervisor import BackOff
from swarm.engine.verl.driver import DriverHandle
from swarm.engine.verl.sampling import ReplicaSampling
from swarm.engine.verl.settings import VerlSettings
from swarm.models.folder import ModelFolder
from swarm.protocol.episodes import WeightsVersion
from swarm.protocol.runspec import ComputeType

_PACKAGES = ("verl", "ray", "tensordict", "hydra", "codetiming", "torchdata", "transfer_queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlLayout:
    """What an operator chooses; the fields are those of `VerlSettings`, whose defaults apply to what is None."""

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

    def settings(self, model: ModelFolder) -> VerlSettings:
        """Raises: EngineError when the layout does not add up, or the model cannot hold `max_model_len`."""
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
    """See `swarm.engine.seam.Engine`. logs: a directory for the driver's log.

    Ranks and replicas live and die together: when one is lost, all are started anew, and the run is opened again.
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
            max_model_len=settings.max_model_len,
            dtype=settings.dtype,
        )
        self._subscribers: list[Callable[[EngineHealth], None]] = []
        self._publishing = asyncio.Lock()
        self.sampling = ReplicaSampling(model.path, model.name)
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
        """Raises also: EngineError when the weights stand at another step, or did not arrive as they were trained."""
        publication = asyncio.ensure_future(self._publish(version))
        publication.add_done_callback(take_exception)
        await asyncio.shield(publication)  # who no longer waits for it does not leave sampling frozen

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
            f"{', '.join(lacking)} not installed; `make verl` (requirements/verl.txt) brings what verl needs"
        )
