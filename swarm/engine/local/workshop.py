"""What the trainer process works on: one policy, and the run that is open on it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foundation.clock import Clock
from foundation.ids import derived_seed
from foundation.paths import write_atomically
from swarm.engine.local import checkpoints
from swarm.engine.local.adapters import CONFIG_FILE, folder_config, folder_weights
from swarm.engine.local.checkpoints import Checkpoint, TrainerState
from swarm.engine.local.forward import DTYPES, Policy
from swarm.engine.local.learner import Learner
from swarm.engine.local.tensor_file import hash_tensors, wider, write_tensors
from swarm.engine.local.weights_room import new_checksum
from swarm.engine.local.wire import OpenRun
from swarm.engine.seam import EngineError, StepOutcome, TrainBatch, TrainingRefused
from swarm.protocol.runspec import ComputeType, LoraSpec, RunSpec


class RunClosed(EngineError):
    """No run is open: none was opened, or a step left weights behind that belong to no step."""


@dataclass(slots=True)
class _OpenRun:
    run_id: str
    branch: int
    spec: RunSpec
    directory: Path
    step: int


class Workshop:
    """fingerprint: of the hosted model; a checkpoint that began with other weights is refused.

    served_in: what inference multiplies in.
    offload_optimizer: between steps the optimiser's state lies in the machine's memory, whatever the policy lies in.
    """

    def __init__(
        self,
        policy: Policy,
        fingerprint: str,
        clock: Clock,
        *,
        served_in: ComputeType = "bfloat16",
        offload_optimizer: bool = False,
    ) -> None:
        self._learner = Learner(policy, clock)
        self._policy = policy
        self._fingerprint = fingerprint
        self._served_in = DTYPES[served_in]
        self._offload_optimizer = offload_optimizer
        self._run: _OpenRun | None = None

    def open_run(self, wanted: OpenRun) -> int:
        """See `Engine.open_run`; serves nothing."""
        self._run = None
        parameters = wanted.spec.parameters
        self._policy.adapt(
            parameters if isinstance(parameters, LoraSpec) else None, derived_seed(wanted.spec.seed, "adapters")
        )
        self._learner.begin_run()
        wanted.directory.mkdir(parents=True, exist_ok=True)
        checkpoints.put_back(wanted.directory)
        if wanted.at_step is None:
            found = checkpoints.newest(wanted.directory)
        else:
            found = checkpoints.read(wanted.directory, wanted.at_step) if wanted.at_step else None
        if found is None:
            torch.manual_seed(derived_seed(wanted.spec.seed, "trainer"))
        else:
            self._restore(found, wanted.spec)
        if wanted.at_step is not None:  # and this checkpoint could be gone on from
            checkpoints.forget_other_future(wanted.directory, wanted.branch, wanted.at_step)
        step = found.state.step if found else 0
        self._learner.half_way = False
        self._run = _OpenRun(wanted.run_id, wanted.branch, wanted.spec, wanted.directory, step)
        return step

    def train(self, batch: TrainBatch) -> StepOutcome:
        """See `Engine.train`."""
        run = self._open()
        if batch.step != run.step + 1:
            raise TrainingRefused(f"a batch of step {batch.step}, but the weights stand at step {run.step}")
        try:
            outcome = self._learner.learn(batch)
        except TrainingRefused:
            if self._learner.half_way:
                self._run = None
            raise
        finally:
            if self._offload_optimizer:
                self._learner.rest()
        run.step, run.spec = batch.step, batch.spec
        return outcome

    def checkpoint(self, best: int | None = None) -> int:
        """See `Engine.checkpoint`. Step 0 is the hosted model itself and is not written. Raises: OSError."""
        run = self._open()
        if run.step:
            state = TrainerState(
                run_id=run.run_id,
                branch=run.branch,
                step=run.step,
                fingerprint=self._fingerprint,
                spec=run.spec,
                random_state=checkpoints.random_state(),
                device="cuda" if self._policy.device.type == "cuda" else "cpu",
            )
            made = Checkpoint(state=state, weights=self._weights(), moments=self._learner.state())
            checkpoints.write(run.directory, made, keep=run.spec.checkpoint.keep, best=best)
        return run.step

    def export(self, file: Path) -> tuple[int, str]:
        """Write the current weights for serving; returns their step and the file's checksum. Raises: OSError.

        They are written as the hosted ones are stored, or in what inference multiplies in, whichever is wider.
        """
        run = self._open()
        weights = self._weights()
        served_as = self._policy.start
        if (adapters := self._policy.adapters) is not None:
            file.parent.mkdir(exist_ok=True)
            write_atomically(file.parent / CONFIG_FILE, json.dumps(folder_config(adapters.spec, "hosted")).encode())
            weights = served_as = folder_weights(weights)
        dtypes = {name: wider(weight.dtype, self._served_in) for name, weight in served_as.items()}
        return run.step, write_tensors(file, weights, dtypes, new_checksum)

    def fingerprint(self) -> tuple[int, str]:
        """The step that the weights stand at, and the hash that a checkpoint's manifest would have for them."""
        return self._open().step, hash_tensors(self._weights())

    def _restore(self, found: Checkpoint, wanted: RunSpec) -> None:
        if found.state.fingerprint != self._fingerprint:
            raise EngineError(
                f"the checkpoint of step {found.state.step} began with model {found.state.fingerprint[:12]}, but "
                f"{self._fingerprint[:12]} is hosted; serve the model that the run was started with"
            )
        if _trained(found.state.spec) != _trained(wanted):
            raise EngineError(
                f"the checkpoint of step {found.state.step} trained parameters = {found.state.spec.parameters!r}, and this run "
                f"trains {wanted.parameters!r}; open it with those of the checkpoint"
            )
        with torch.no_grad():
            for name, weight in self._policy.trained.items():
                weight.copy_(found.weights[name])
        self._learner.restore(found.moments)
        checkpoints.restore_random_state(found.state.random_state)

    def _weights(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self._policy.trained.items()}

    def _open(self) -> _OpenRun:
        if self._run is None:
            raise RunClosed("no run is open in the trainer; open it (again)")
        return self._run


def _trained(spec: RunSpec) -> tuple[int, frozenset[str]] | None:
    """Rank and targets of the adapters, which name and shape what a checkpoint holds; None: all weights."""
    return (spec.parameters.rank, frozenset(spec.parameters.targets)) if isinstance(spec.parameters, LoraSpec) else None
