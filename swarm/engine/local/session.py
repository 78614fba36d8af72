"""The open run of the trainer process, and its policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from foundation.clock import Clock
from foundation.ids import derived_seed
from foundation.paths import write_atomically
from swarm.engine.local import checkpoints, device_transfer
from swarm.engine.local.adapters import CONFIG_FILE, folder_config, folder_weights
from swarm.engine.local.checkpoints import Checkpoint, hash_tensors, wider, write_tensors
from swarm.engine.local.forward import DTYPES, Policy
from swarm.engine.local.learner import Learner
from swarm.engine.local.weight_slots import new_checksum
from swarm.engine.training.channel import Command, Export, Fingerprint, OpenRun, Reply, Send
from swarm.engine.training.checkpoints import TrainerState
from swarm.engine.training.session import TrainingSession
from swarm.protocol.runspec import ComputeType, LoraSpec, RunSpec


class LocalSession(TrainingSession[Checkpoint]):
    """The open run and its policy.

    served_in: inference's compute dtype.
    turns: whether the device holds only weights between steps, with moments in host memory.
    """

    def __init__(
        self,
        policy: Policy,
        fingerprint: str,
        clock: Clock,
        *,
        served_in: ComputeType = "bfloat16",
        turns: bool = False,
    ) -> None:
        self._model = Learner(policy, clock)
        self._policy = policy
        self._served_in = DTYPES[served_in]
        self._turns = turns
        super().__init__(self._model, fingerprint, device="cuda" if policy.device.type == "cuda" else "cpu")

    def carry_out(self, command: Command) -> Reply:
        match command:
            case Export():
                step, checksum = self.export(command.file)
                return Reply(step=step, checksum=checksum)
            case Send():
                step, digest = self.send(command.socket)
                return Reply(step=step, checksum=digest)
            case Fingerprint():
                step, sha256 = self.fingerprint()
                return Reply(step=step, sha256=sha256)
        return super().carry_out(command)

    def export(self, file: Path) -> tuple[int, str]:
        """Write the current weights for serving; return their step and the file's checksum. Raises: OSError.

        Each weight is written in the hosted weight's dtype or inference's compute dtype, whichever is wider.
        """
        self._open()
        weights = self._weights()
        served_as = self._policy.start
        if (adapters := self._policy.adapters) is not None:
            file.parent.mkdir(exist_ok=True)
            write_atomically(file.parent / CONFIG_FILE, json.dumps(folder_config(adapters.spec, "hosted")).encode())
            weights = served_as = folder_weights(weights)
        return self._step, write_tensors(file, weights, self._types_of(served_as), new_checksum)

    def send(self, socket: Path) -> tuple[int, str]:
        """Send all weights over the device, in the dtypes of `export`; return their step and digest. Raises: EngineError."""
        self._open()
        return self._step, device_transfer.send(socket, self._weights(), self._types_of(self._policy.start))

    def fingerprint(self) -> tuple[int, str]:
        """Return the weights' step, and the hash that a checkpoint's manifest would have for them."""
        self._open()
        return self._step, hash_tensors(self._weights())

    def _types_of(self, served_as: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
        return {name: wider(weight.dtype, self._served_in) for name, weight in served_as.items()}

    def _rest(self) -> None:
        if self._turns:
            self._model.rest()

    def _read(self, directory: Path, step: int) -> Checkpoint:
        return checkpoints.read(directory, step)

    def _reset(self, spec: RunSpec, seed: int) -> None:
        lora = spec.parameters if isinstance(spec.parameters, LoraSpec) else None
        if spec.dtype != "auto":
            self._policy.use_dtype(spec.dtype)  # first, because `adapt` stores frozen weights in this dtype
        self._policy.adapt(lora, derived_seed(spec.seed, "adapters"))
        self._model.begin_run()
        torch.manual_seed(seed)

    def _restore(self, found: Checkpoint, wanted: OpenRun) -> None:
        with torch.no_grad():
            for name, weight in self._policy.trained.items():
                weight.copy_(found.weights[name])
        self._model.restore(found.moments)
        state = bytes.fromhex(found.state.random_state)
        torch.set_rng_state(torch.tensor(list(state), dtype=torch.uint8))

    def _write(self, directory: Path, state: TrainerState, best: int | None) -> None:
        made = Checkpoint(state=state, weights=self._weights(), moments=self._model.state())
        checkpoints.write(directory, made, keep=state.spec.checkpoint.keep, best=best)

    def _weights(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self._policy.trained.items()}
