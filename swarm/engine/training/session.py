"""The open run of a training child, with its weights and checkpoints. Runs in the child."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from foundation.ids import derived_seed
from foundation.machine import REPRODUCIBLE_SUMS
from swarm.engine.machine import Device
from swarm.engine.seam import EngineError, StepOutcome, TrainBatch, TrainingRefused
from swarm.engine.training import checkpoints
from swarm.engine.training.channel import Command, Failure, OpenRun, Reply, Request, RunClosed, Train, WriteCheckpoint
from swarm.engine.training.checkpoints import Checkpoint, TrainerState
from swarm.engine.training.targets import adapters_shape
from swarm.protocol.runspec import RunSpec

Found = TypeVar("Found", bound=Checkpoint)


class Learner(Protocol):
    """Makes optimizer steps. `half_way` is True if a refused step has already moved the weights: these belong to no step and must be
    restored."""

    half_way: bool

    def learn(self, batch: TrainBatch) -> StepOutcome: ...


_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Messages when host memory runs out, or GPU memory outside of torch's allocator, which has its own error class."""
_DOING = {"open_run": "opening the run", "checkpoint": "writing a checkpoint", "fingerprint": "hashing the weights"}
"""What a command does, for errors. Except for steps, commands that are not listed bring the weights to inference."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the error says that torch ran out of host or GPU memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def _short_of_memory(spec: RunSpec, *, in_step: bool) -> str:
    """Return advice on how a run of this spec can use less memory."""
    options = []
    if in_step and not spec.activation_checkpointing:
        options.append("set activation_checkpointing")
    if spec.parameters == "full":
        options.append('train adapters (parameters = {"rank": 16})')
    options += [
        "serve with a smaller --max-model-len, or on a GPU with --enable-sleep-mode or --offload",
        "host a smaller model",
    ]
    return "; or ".join(options)


class TrainingSession(ABC, Generic[Found]):
    """One engine's weights across runs: the engine's `open_run`, `train` and `checkpoint`, without serving.

    fingerprint: of the hosted model; a checkpoint that began with other weights is refused.
    device: the device that computes the weights, for engines whose checkpoints record it.
    """

    def __init__(self, learner: Learner, fingerprint: str, *, device: Device | None = None) -> None:
        self._learner = learner
        self._fingerprint = fingerprint
        self._device = device
        self._run: OpenRun | None = None
        self._step = 0

    def answer(self, request: Request) -> Reply:
        """Carry out a request. Unexpected errors end the child; running out of memory does not, because it would happen again."""
        try:
            reply = self.carry_out(request.command)
        except (EngineError, OSError) as error:
            reply = Reply(failure=Failure.of(error))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reply = Reply(failure=Failure.of(self._out_of_memory(request.command)))
        return reply.model_copy(update={"number": request.number})

    def carry_out(self, command: Command) -> Reply:
        """Carry out a command. Raises: EngineError, OSError."""
        match command:
            case OpenRun():
                return Reply(step=self.open_run(command))
            case Train():
                outcome = self.train(command.batch)
                return Reply(step=outcome.step, outcome=outcome)
            case WriteCheckpoint():
                return Reply(step=self.checkpoint(command.best))
        raise EngineError(f"this engine does not know the command {command.command}")

    def open_run(self, wanted: OpenRun) -> int:
        """See `Engine.open_run`; serves nothing."""
        self._run = None
        self._require_supported(wanted.spec)
        directory, at_step = wanted.directory, wanted.at_step
        directory.mkdir(parents=True, exist_ok=True)
        checkpoints.put_back(directory)
        found = None
        if at_step is None:
            found = checkpoints.newest(directory, self._read)
        elif at_step:
            found = self._read(directory, at_step)
        self._reset(wanted.spec, derived_seed(wanted.spec.seed, "trainer"))
        if found is not None:
            self._require_ours(found.state, wanted.spec)
            self._restore(found, wanted)
        if at_step is not None:  # only now that the checkpoint has been restored
            checkpoints.forget_other_future(directory, wanted.branch, at_step)
        self._learner.half_way = False
        self._run, self._step = wanted, found.state.step if found is not None else 0
        return self._step

    def train(self, batch: TrainBatch) -> StepOutcome:
        """See `Engine.train`."""
        run = self._open()
        if batch.step != self._step + 1:
            raise TrainingRefused(f"the batch is for step {batch.step}, but the weights are at step {self._step}")
        self._require_supported(batch.spec)
        self._run, left = None, None  # an error in the step may leave some weights moved
        try:
            outcome = self._learner.learn(batch)
            self._step, left = batch.step, run.model_copy(update={"spec": batch.spec})
        except TrainingRefused:
            left = None if self._learner.half_way else run
            raise
        finally:
            self._rest()
            self._run = left
        return outcome

    def checkpoint(self, best: int | None = None) -> int:
        """See `Engine.checkpoint`. Step 0 is the hosted model itself and is not written. Raises: OSError."""
        run = self._open()
        if self._step:
            state = TrainerState(
                run_id=run.run_id,
                branch=run.branch,
                step=self._step,
                fingerprint=self._fingerprint,
                spec=run.spec,
                random_state=bytes(torch.get_rng_state().tolist()).hex(),
                device=self._device,
                threads=torch.get_num_threads() if self._device == "cpu" else None,
                reproducible_sums=self._device == "cpu" and REPRODUCIBLE_SUMS.items() <= os.environ.items(),
            )
            self._write(run.directory, state, best)
        return self._step

    def _open(self) -> OpenRun:
        if self._run is None:
            raise RunClosed("no run is open in the trainer; open the run first")
        return self._run

    def _out_of_memory(self, command: Command) -> EngineError:
        if isinstance(command, Train):
            advice = _short_of_memory(command.batch.spec, in_step=True)
            return TrainingRefused(f"step {command.batch.step} ran out of memory: {advice}")
        run = command if isinstance(command, OpenRun) else self._open()
        doing = _DOING.get(command.command, "bringing the weights to inference")
        return EngineError(f"{doing} ran out of memory: {_short_of_memory(run.spec, in_step=False)}")

    def _require_ours(self, state: TrainerState, wanted: RunSpec) -> None:
        if state.fingerprint != self._fingerprint:
            raise EngineError(
                f"the checkpoint of step {state.step} began with model {state.fingerprint[:12]}, but "
                f"{self._fingerprint[:12]} is hosted; serve the model that the run was started with"
            )
        if adapters_shape(state.spec.parameters) != adapters_shape(wanted.parameters):
            raise EngineError(
                f"the checkpoint of step {state.step} trained parameters = {state.spec.parameters!r}, but this run "
                f"trains {wanted.parameters!r}; open it with the checkpoint's parameters"
            )

    # -- differs between engines ----------------------------------------------------------------------------------

    def _require_supported(self, spec: RunSpec) -> None:
        """Check that this engine supports the spec. Raises: EngineError."""

    def _rest(self) -> None:
        """Called after each step, for engines that free memory between steps."""

    @abstractmethod
    def _read(self, directory: Path, step: int) -> Found:
        """Read a checkpoint. Raises: EngineError if the step has none, BrokenCheckpoint if its files have changed."""

    @abstractmethod
    def _reset(self, spec: RunSpec, seed: int) -> None:
        """Reset to the hosted weights, without moments and with a fresh random generator."""

    @abstractmethod
    def _restore(self, found: Found, wanted: OpenRun) -> None:
        """Continue from a checkpoint, after `_reset`. Raises: EngineError."""

    @abstractmethod
    def _write(self, directory: Path, state: TrainerState, best: int | None) -> None:
        """Write the current weights, as `checkpoints.write` does."""
