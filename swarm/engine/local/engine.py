"""The engine of one machine: vLLM's own servers and a torch trainer as child processes, joined into one `Engine`.

Weights go from the trainer to vLLM as safetensors in memory. Imports neither torch nor vllm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from foundation.clock import Clock
from foundation.event_loop import take_exception
from foundation.machine import available_memory
from foundation.paths import memory_dir
from swarm.engine.devices import Layout
from swarm.engine.local.inference import DeviceTransfer, Published, VllmInference, WeightsRefused
from swarm.engine.local.replicas import Replicas
from swarm.engine.local.trainer import LocalTrainer
from swarm.engine.local.weight_slots import WeightSlots, checksum_of
from swarm.engine.machine import slow_type
from swarm.engine.memory.host import HostMemory, check, check_slots, trainer_host_memory
from swarm.engine.memory.model import GIB, ModelShape
from swarm.engine.memory.plan import Plans, Wishes, planned
from swarm.engine.memory.training import TrainerMemory, Training
from swarm.engine.sampling.client import NotShared
from swarm.engine.sampling.server import ServedAdapter, VllmSettings
from swarm.engine.seam import (
    Dialect,
    EngineError,
    EngineHealth,
    EngineInfo,
    RunContext,
    Sampled,
    SampledEvent,
    SampleRequest,
    StepOutcome,
    TrainBatch,
    TrainerCrashed,
)
from swarm.engine.training.checkpoints import require_whole
from swarm.engine.training.supervisor import BackOff
from swarm.engine.training.targets import linear_layers
from swarm.models.folder import ModelFolder
from swarm.protocol.episodes import WeightsVersion
from swarm.protocol.runspec import ComputeType, LoraSpec

_LOG = logging.getLogger(__name__)
ONE_CPU = Layout.one("cpu")
_SOCKET = "weights.sock"


class LocalEngine:
    """See `swarm.engine.seam.Engine`.

    logs: directory with one log file per child.
    devices: of the trainer and of each replica.
    card: bytes of GPU memory, for the plan that divides it (`swarm.engine.memory.plan`). None: unknown, so there is no plan.
    sleep_mode: whether both children take turns on one GPU. Then inference sleeps during a step, whatever max_staleness allows, and
        between steps the optimizer's state is in host memory. None: only if both do not fit together.
    offload: whether to keep moments and initial weights in host memory. None: only if nothing else fits and enough host memory is free.
    memory: bytes of host memory for that decision. None: unknown.
    over_device: whether full weights go to inference within the device that both children compute on, if it can be shared. None: on a
        GPU, unless they take turns on it. Between steps the trainer has the memory that this needs.

    Raises: EngineError if the model does not fit on the card; the message says what would fit.
    """

    def __init__(
        self,
        model: ModelFolder,
        *,
        logs: Path,
        clock: Clock,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        devices: Layout = ONE_CPU,
        dtype: ComputeType | None = None,
        card: int | None = None,
        memory: int | None = None,
        sleep_mode: bool | None = None,
        offload: bool | None = None,
        over_device: bool | None = None,
        kv_cache_bytes: int | None = None,
        gpu_memory_utilization: float | None = None,
        back_off: BackOff | None = None,
    ) -> None:
        settings = VllmSettings(
            model_dir=model.path,
            model_name=model.name,
            log_path=logs / "inference.log",
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            device=devices.kind,
            index=devices.inference[0].index,
            replicas=len(devices.inference),
            dtype=dtype,
            sleep_mode=bool(sleep_mode),
            kv_cache_bytes=kv_cache_bytes,
        )
        self.plans: Plans | None = None
        self.offload = bool(offload)
        if devices.kind == "cuda" and card is not None:
            inference = len(devices.inference) * replace(settings, sleep_mode=False).memory_needed()
            wishes = Wishes(
                model_len=settings.model_len,
                dtype=settings.compute_dtype,
                sleep=sleep_mode if devices.shared else False,
                offload=offload,
                sequences=max_num_seqs,
                kv_bytes=kv_cache_bytes,
                utilization=gpu_memory_utilization,
                apart=devices.trainer not in devices.inference,
                memory=None if memory is None else max(0, memory - inference),
            )
            self.plans = _divided(model.name, card, settings.shape, wishes, beside=inference)
            plan = self.plans.chosen
            self.offload = plan.training.offload
            settings = replace(settings, max_num_seqs=plan.sequences, kv_cache_bytes=plan.kv, sleep_mode=plan.turns)
        replicas = [settings]
        if len(devices.inference) > 1:
            replicas = [
                replace(settings, index=device.index, log_path=logs / f"inference-{device.kind}-{device.index}.log")
                for device in devices.inference
            ]
        self._info = EngineInfo(
            backend="local",
            device=str(devices),
            model=model.name,
            fingerprint=model.fingerprint,
            folder=model.path,
            layers=linear_layers(model.path),
            max_model_len=settings.model_len,
            dtype=settings.compute_dtype,
            masks=True,
            own_functions=True,
            default_seeds=settings.device == "cpu",
        )
        self._subscribers: list[Callable[[EngineHealth], None]] = []
        self._health = EngineHealth(ready=False)
        self._slots = WeightSlots(model.path)
        self._lora: LoraSpec | None = None
        self._kept: asyncio.Future[None] | None = None
        """Task that writes the weights sent over the device to a file too. A step waits for this task, because it changes the trainer's
        only copy."""
        self.sleep_mode = settings.sleep_mode
        by_itself = devices.kind == "cuda" and not self.sleep_mode
        self.over_device = devices.shared and (by_itself if over_device is None else over_device)
        self.inference = Replicas([VllmInference(each, clock=clock, back_off=back_off) for each in replicas])
        self.inference.subscribe(self._tell)
        self.trainer = LocalTrainer(
            model,
            log_path=logs / "trainer.log",
            device=devices.trainer.kind,
            index=devices.trainer.index,
            dtype=settings.compute_dtype,
            context=settings.model_len,
            room=self.plans.chosen.trainer_room if self.plans is not None else None,
            turns=settings.sleep_mode,
            offload=self.offload,
            clock=clock,
            on_health=self._tell,
            back_off=back_off,
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    def subscribe(self, on_health: Callable[[EngineHealth], None]) -> None:
        self._subscribers.append(on_health)

    async def boot(self) -> None:
        """See `Engine.boot`. Raises: EngineDown, including when both children together do not fit into memory."""
        if self.trainer.process_id is None:
            await asyncio.to_thread(self._check_memory)
        await asyncio.to_thread(self._slots.open)
        settings = self.inference.settings
        reserved = asyncio.to_thread(self._slots.reserve, settings.shape.served(settings.compute_dtype))
        await asyncio.gather(self.inference.boot(), self.trainer.boot(), reserved)

    def memory_needed(self) -> tuple[int, int]:
        """Return the approximate bytes of host memory for inference, and for the trainer with the weights in transfer."""
        return self.inference.memory_needed(), self._trainer_memory().peak

    def estimate(self) -> str:
        """Describe the estimated memory and boot time on an idle machine."""
        inference, trainer = self.memory_needed()
        settings = self.inference.settings
        beside = " besides GPU memory" if settings.device == "cuda" else ""
        return (
            f"about {(inference + trainer) / GIB:.1f} GiB of memory{beside} (inference {inference / GIB:.1f}, trainer "
            f"{trainer / GIB:.1f}) and {settings.boot_s():.0f} s on an idle machine"
        )

    def _check_memory(self) -> None:
        """Refuse a model that does not fit even before the first step; warn if memory may run out during a step."""
        settings = self.inference.settings
        least = self.inference.least_memory() + self._trainer_memory().standing
        check(self._info.model, least, offloaded=self.offload)
        if self.plans is None or self.plans.whole is not None:
            check_slots(memory_dir(), settings.shape.served(settings.compute_dtype))
        _LOG.info("%s needs %s", self._info.model, self.estimate())
        if self.plans is not None:
            _LOG.info("GPU memory: %s", self.plans)
        slow = slow_type(settings.device, settings.compute_dtype)
        if slow is not None:
            _LOG.warning("%s", slow)
        available = available_memory()
        if available is not None and sum(self.memory_needed()) > available:
            name, free = self._info.model, available / GIB
            _LOG.warning("memory may run out: %s needs %s; %.1f GiB are free", name, self.estimate(), free)

    def _trainer_memory(self) -> HostMemory:
        settings = self.inference.settings
        training = Training(dtype=settings.compute_dtype, offload=self.offload, on_gpu=settings.device == "cuda")
        if self.plans is not None:
            training = self.plans.chosen.training
        return trainer_host_memory(TrainerMemory(settings.shape, training), turns=self.sleep_mode)

    async def shutdown(self) -> None:
        await asyncio.gather(self.inference.shutdown(), self.trainer.shutdown())
        await asyncio.to_thread(self._slots.close)

    # -- tokens and sampling --------------------------------------------------------------------------------------

    async def render(self, dialect: Dialect, body: dict[str, Any], *, add_generation_prompt: bool = True) -> list[int]:
        return await self.inference.render(dialect, body, add_generation_prompt=add_generation_prompt)

    def decode(self, ids: list[int]) -> str:
        return self.inference.decode(ids)

    async def sample(self, request: SampleRequest) -> Sampled:
        return await self.inference.sample(request)

    def stream(self, request: SampleRequest) -> AsyncIterator[SampledEvent]:
        return self.inference.stream(request)

    # -- training -------------------------------------------------------------------------------------------------

    async def open_run(self, run: RunContext, *, at_step: int | None = None) -> int:
        if run.spec.parameters == "full" and self.plans is not None and (reason := self.plans.why_not_whole()):
            raise EngineError(reason)
        self._kept = None
        step = await self.trainer.open_run(run, at_step)
        version = WeightsVersion(run_id=run.run_id, branch=run.branch, step=step)
        self._lora = run.spec.parameters if isinstance(run.spec.parameters, LoraSpec) else None
        if step == 0 and self._lora is None:
            await self.inference.publish(None, version)
        else:
            await self.serve(version)
        return step

    async def require_checkpoint(self, directory: Path, step: int) -> None:
        await asyncio.to_thread(require_whole, directory, step)

    async def train(self, batch: TrainBatch) -> StepOutcome:
        if self._kept is not None:
            await asyncio.shield(self._kept)
        async with self.inference.asleep() if self.sleep_mode else nullcontext():
            return await self.trainer.train(batch)

    async def checkpoint(self, *, best: int | None = None) -> int:
        return await self.trainer.checkpoint(best)

    async def serve(self, version: WeightsVersion) -> None:
        """See `Engine.serve`. Also raises EngineError if the written weights differ from the trained ones."""
        try:
            await asyncio.to_thread(self._slots.restore)
        except OSError as error:
            raise EngineError(f"cannot make a place for weights: {error}; make room in {memory_dir()}") from error
        slot, adapter = self._slots.free_slot(), None
        file = slot / WeightSlots.FILE
        if self._lora is not None:
            adapter = ServedAdapter(folder=slot / WeightSlots.ADAPTER, rank=self._lora.rank)
            file = adapter.folder / WeightSlots.ADAPTER_FILE
        self._kept = None
        if self.over_device and adapter is None and await self._serve_over_device(slot, version):
            return
        trained = await self._export(file, version)
        approval = asyncio.ensure_future(_approve(file, trained))
        await self.inference.publish(None if adapter else slot, version, approval=approval, adapter=adapter)
        self._slots.serves(slot)

    async def _export(self, file: Path, version: WeightsVersion) -> str:
        """Write the weights of this version; return their checksum. Raises: EngineError."""
        try:
            step, checksum = await self.trainer.export(file)
        except OSError as error:
            raise EngineError(f"cannot write weights to {file.parent}: {error}; make room there") from error
        _require_step(step, version)
        return checksum

    async def _serve_over_device(self, slot: Path, version: WeightsVersion) -> bool:
        """Serve the trainer's weights over the device, and write them to the slot while calls continue. Returns False if that is not
        possible; then use `publish`."""
        file = slot / WeightSlots.FILE

        async def send() -> str:
            step, digest = await self.trainer.send(transfer.socket)
            _require_step(step, version)
            return digest

        async def written() -> None:
            await _approve(file, await self._export(file, version))

        def keep() -> Published:
            self._kept = asyncio.ensure_future(written())
            self._kept.add_done_callback(take_exception)
            return Published(weights_dir=slot, approval=self._kept)

        def failed(error: BaseException) -> None:
            """Stop using device transfers, because they would fail again; after a crash of the trainer, keep using them."""
            if not isinstance(error, TrainerCrashed):
                self.over_device = False
                _LOG.warning("a transfer over the device failed; from now on weights go through host memory")

        transfer = DeviceTransfer(socket=slot / _SOCKET, send=send, keep=keep, failed=failed)
        try:
            published = await self.inference.publish_over_device(transfer, version)
        except NotShared as error:
            _LOG.warning("%s", error)
            return False
        if published:
            self._slots.serves(slot)
        return published

    # -- health ---------------------------------------------------------------------------------------------------

    def _tell(self, _: EngineHealth) -> None:
        """Publish the engine's health: the worse of inference's and the trainer's."""
        both = (self.inference.health, self.trainer.health)
        reasons = [health.reason for health in both if health.reason is not None and not health.ready]
        health = EngineHealth(
            ready=all(health.ready for health in both),
            booting=any(health.booting for health in both),
            failed_for_good=any(health.failed_for_good for health in both),
            reason="; ".join(reasons) or None,
            failures=sum(health.failures for health in both),
            inference_ready=self.inference.health.ready,
            replicas=self.inference.health.replicas,
            hung_since=min((health.hung_since for health in both if health.hung_since is not None), default=None),
        )
        if health != self._health:
            self._health = health
            for subscriber in self._subscribers:
                subscriber(health)


def _divided(name: str, card: int, shape: ModelShape, wishes: Wishes, *, beside: int) -> Plans:
    """Return the plans for a card. If offloading needs more host memory than is free now, plan again with the free memory, unless
    offloading was requested.

    `beside` is the host memory of inference's processes, in bytes.
    """
    plans = planned(name, card, shape, wishes)
    available = None if wishes.memory is None or wishes.offload else available_memory()
    if available is None or not plans.chosen.training.offload or plans.chosen.host + beside <= available:
        return plans
    _LOG.warning(
        "offloading needs %.1f GiB of host memory, but %.1f are free: planning with the free memory; to offload, end other programs "
        "and start again",
        (plans.chosen.host + beside) / GIB,
        available / GIB,
    )
    return planned(name, card, shape, replace(wishes, memory=max(0, available - beside)))


def _require_step(step: int, version: WeightsVersion) -> None:
    if step != version.step:
        raise EngineError(f"cannot serve the weights of step {version.step}: the trainer is at step {step}")


async def _approve(file: Path, trained: str) -> None:
    """Check the file's hash. Raises: WeightsRefused if it differs from that of the trained weights; EngineError if the file cannot be
    read."""
    try:
        found = await asyncio.to_thread(checksum_of, file)
    except OSError as error:
        raise EngineError(f"cannot read the weights in {file}: {error}") from error
    if found != trained:
        raise WeightsRefused(
            f"the weights in {file} differ from the trained weights; is the memory that holds them full, or used by another program?"
        )
