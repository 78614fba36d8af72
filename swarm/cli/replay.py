"""`swarm replay`: trains a run's recorded steps again, using only the trainer, and shows the results."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.clock import SystemClock
from foundation.commandline import UsageError
from foundation.machine import available_memory
from foundation.streams import read_or_not
from swarm.cli import stored_runs
from swarm.cli.stored_runs import NoSuchRun, StoredRun
from swarm.engine.local.trainer import LocalTrainer
from swarm.engine.machine import Device, device_for, thread_count
from swarm.engine.memory.host import trainer_host_memory
from swarm.engine.memory.training import TrainerMemory, Training
from swarm.engine.sampling.server import VllmSettings
from swarm.engine.seam import RunContext, TrainBatch, TrainingRefused
from swarm.engine.training import checkpoints
from swarm.engine.training.checkpoints import ranks_of, state_of
from swarm.engine.training.supervisor import BackOff
from swarm.protocol.runspec import LoraSpec
from swarm.server.storage.replay import recorded_batch


def replay_run(args: argparse.Namespace) -> int:
    """Replay steps. With --check, return exit code 1 if the weights of a checkpoint were not reproduced."""
    if args.steps is not None and args.steps < 1:
        raise UsageError(f"--steps must be at least 1, got {args.steps}")
    run = stored_runs.find(args, args.run_id)
    run.step_called(str(args.from_step))
    batches = _batches(run, args.from_step, args.steps)
    if not args.allow_algorithms and any(batch.spec.algorithm.own_functions for batch in batches):
        raise UsageError(
            f"run {run.row.run_id} uses its own algorithm functions, which a replay executes: pass --allow-algorithms to permit that"
        )
    processor = _processor(run, args.device)
    if args.check:
        _refuse_other_processors(run, [batch.step for batch in batches], processor)
    differs = asyncio.run(_train_again(run, args.from_step, batches, processor))
    return 1 if differs and args.check else 0


@dataclass(frozen=True, slots=True)
class _Processor:
    """The processor that computed some weights.

    `threads` is the number of CPU threads; 0 if unknown, or for a GPU. `older` means that an older version computed them, which let MKL
    add numbers in any order on the CPU.
    """

    device: Device
    threads: int = 0
    older: bool = False

    def __str__(self) -> str:
        threads = f" with {self.threads} threads" if self.threads else ""
        return self.device + threads + (" by an older version" if self.older else "")

    def adds_as(self, other: _Processor) -> bool:
        """True if both processors add numbers in the same order, as far as is known."""
        threads_alike = not self.threads or not other.threads or self.threads == other.threads
        return self.device == other.device and threads_alike and not self.older and not other.older


def _processor(run: StoredRun, wanted: Device | None) -> _Processor:
    """Return the processor to replay on: the newest checkpoint's, unless `wanted` names another device.

    Raises: EngineError if `cuda` is wanted but not available.
    """
    # A replay from the hosted model needs no checkpoint.
    newest = max(checkpoints.steps(run.checkpoints_dir), default=0)
    recorded = _recorded_on(run, newest) or _Processor("cpu")
    if wanted is not None:
        device = device_for(wanted)
    else:
        any_device = ranks_of(run.checkpoints_dir, newest) or recorded.device == "cuda"
        device = device_for(None) if any_device else "cpu"
    if device != "cpu":
        return _Processor(device)
    return _Processor("cpu", recorded.threads or thread_count(os.environ))


def _recorded_on(run: StoredRun, step: int) -> _Processor | None:
    """Return the processor that computed this step's checkpoint, or None if there is no checkpoint."""
    state = state_of(run.checkpoints_dir, step)
    if state is None:
        return None
    device = state.device or "cpu"  # older checkpoints do not say
    return _Processor(device, state.threads or 0, older=device == "cpu" and not state.reproducible_sums)


def _refuse_other_processors(run: StoredRun, steps: list[int], processor: _Processor) -> None:
    """Raise UsageError if a checkpoint was made on another processor or by an older version.

    Those add numbers in another order, so different weights would prove nothing.
    """
    for step in steps:
        if ranks := ranks_of(run.checkpoints_dir, step):
            raise UsageError(
                f"--check: {ranks} verl rank(s) made the checkpoint of step {step}, and they add numbers in another order than this "
                "replay: omit --check, and compare the values yourself"
            )
        made_on = _recorded_on(run, step) or processor
        if not made_on.adds_as(processor):
            other = f"use --device {made_on.device}, or " if made_on.device != processor.device else ""
            raise UsageError(
                f"--check: the checkpoint of step {step} was made on {made_on}, but this replay trains on {processor}: "
                f"{other}omit --check"
            )


def _batches(run: StoredRun, from_step: int, count: int | None) -> list[TrainBatch]:
    """Return the recorded steps after `from_step`, at most `count` of them. Raises: NoSuchRun if any are missing."""
    reader = run.reader()
    try:
        rows = reader.steps(run.row.run_id, from_step)[:count]
        if not rows:
            raise NoSuchRun(f"{run.row.run_id} has no recorded step after step {from_step}")
        try:
            return [recorded_batch(reader, row, run.specs) for row in rows]
        except TrainingRefused as error:
            kept = ", ".join(map(str, run.row.checkpoints)) or "none"
            raise NoSuchRun(f"{error}: start from a checkpoint with --from-step (existing: {kept})") from error
    finally:
        reader.close()


async def _train_again(run: StoredRun, from_step: int, batches: list[TrainBatch], processor: _Processor) -> bool:
    """Train the batches again. Returns True if an existing checkpoint has different weights than the replay."""
    from swarm.engine.local.checkpoints import fingerprint

    differs = False
    with tempfile.TemporaryDirectory(prefix="swarm-replay-") as scratch:
        async with _opened(run, from_step, Path(scratch), processor) as trainer:
            for batch in batches:
                outcome = await trainer.train(batch)
                weights = await trainer.fingerprint()
                line: dict[str, Any] = {"step": batch.step, "weights": weights}
                recorded = fingerprint(run.checkpoints_dir, batch.step)
                if recorded is not None:
                    line["as_recorded"] = weights == recorded
                    differs = differs or weights != recorded
                    line |= _made_elsewhere(run, batch.step, processor)
                with read_or_not():
                    print(json.dumps(line | {"untrained": outcome.untrained, "values": outcome.metrics}))
    return differs


def _made_elsewhere(run: StoredRun, step: int, processor: _Processor) -> dict[str, str]:
    """Return where this step's checkpoint was made, as an output field, if it adds numbers in another order; else an empty dict."""
    if ranks_of(run.checkpoints_dir, step):
        return {"recorded_on": "verl"}
    made_on = _recorded_on(run, step) or processor
    return {} if made_on.adds_as(processor) else {"recorded_on": str(made_on)}


def _offloads(run: StoredRun, processor: _Processor) -> bool:
    """True if a GPU replay should keep the optimizer moments and initial weights in host memory.

    It should if there is room, because the run itself may have had to. This affects how many tokens fit on the GPU together, but it
    does not change a step as long as the same tokens are computed together.
    """
    if processor.device != "cuda":
        return False
    shape = VllmSettings(model_dir=run.model.path, model_name=run.model.name, log_path=Path()).shape
    parameters, available = run.spec.parameters, available_memory()
    lora = parameters if isinstance(parameters, LoraSpec) else None
    training = Training(dtype="bfloat16", lora=lora, offload=True, on_gpu=True)
    return available is None or trainer_host_memory(TrainerMemory(shape, training)).standing <= available


@asynccontextmanager
async def _opened(run: StoredRun, from_step: int, scratch: Path, processor: _Processor) -> AsyncIterator[LocalTrainer]:
    """Open a trainer in the run's state at this step. It reads the run's checkpoint but writes none."""
    trainer = LocalTrainer(
        run.model,
        log_path=scratch / "trainer.log",
        clock=SystemClock(),
        on_health=lambda health: None,
        device=processor.device,
        threads=processor.threads or None,
        offload=_offloads(run, processor),
        back_off=BackOff(failures=1),
    )
    directory = scratch / "run"
    directory.mkdir()
    if from_step:
        name = f"step-{from_step:08d}"
        (directory / name).symlink_to(run.checkpoints_dir / name)
    context = RunContext(
        run_id=run.row.run_id, branch=run.row.branch, spec=run.specs[min(run.specs)], directory=directory
    )
    try:
        await trainer.boot()
        await trainer.open_run(context, from_step or None)
        yield trainer
    finally:
        await trainer.shutdown()
