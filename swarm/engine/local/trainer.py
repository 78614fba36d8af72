"""The trainer as the control process sees it: a supervised child process with torch. Imports no torch itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from foundation.clock import Clock
from foundation.machine import REPRODUCIBLE_SUMS
from swarm.engine.devices import DeviceName
from swarm.engine.machine import Device, thread_count, yielding_threads
from swarm.engine.sampling.server import OUT_OF_MEMORY, REUSE_MEMORY, child_environment
from swarm.engine.seam import EngineError, EngineHealth
from swarm.engine.training.channel import Export, Fingerprint, Send
from swarm.engine.training.handle import TrainerHandle
from swarm.engine.training.limits import ModelWork
from swarm.engine.training.supervisor import BackOff, ChildCommand, ChildProcess
from swarm.models.folder import ModelFolder
from swarm.protocol.runspec import ComputeType

_IMPORTS_S = 60.0
"""Time limit for imports, in seconds; an idle machine needs a tenth of it."""
_FIRST_STEP_S: dict[Device, float] = {"cpu": 10.0, "cuda": 60.0}
_SAME_BITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | REPRODUCIBLE_SUMS
"""Settings for reproducible matrix products: by default, CUDA and MKL may add in a different order in each run."""


class LocalTrainer(TrainerHandle):
    """Starts the trainer process and sends it requests.

    index: number of the device within its kind, from 0.
    dtype: inference's compute dtype; exported weights are never narrower.
    threads: CPU threads; None: OMP_NUM_THREADS, else one per core.
    context: tokens of the longest call.
    room: maximum bytes of GPU memory; None: all.
    turns: whether the device holds only weights between steps.
    offload: whether to keep moments and initial weights in host memory.
    """

    def __init__(
        self,
        model: ModelFolder,
        *,
        log_path: Path,
        clock: Clock,
        on_health: Callable[[EngineHealth], None],
        device: Device = "cpu",
        index: int = 0,
        threads: int | None = None,
        dtype: ComputeType = "bfloat16",
        context: int = 0,
        room: int | None = None,
        turns: bool = False,
        offload: bool = False,
        back_off: BackOff | None = None,
    ) -> None:
        self._model = model
        self._device = DeviceName(device, index)
        self._threads = threads
        self._dtype = dtype
        self._context = context
        self._room = room
        self._turns = turns
        self._offload = offload
        super().__init__(
            "trainer",
            ModelWork(model_dir=model.path, device=device, start_s=_FIRST_STEP_S[device]),
            imports_s=_IMPORTS_S,
            log_path=log_path,
            clock=clock,
            on_health=on_health,
            back_off=back_off,
            hopeless=self._out_of_memory,
        )

    async def export(self, file: Path) -> tuple[int, str]:
        """Write the weights to `file`; return their step and checksum. Raises: TrainerCrashed, OSError."""
        reply = await self.ask(Export(file=file))
        if reply.checksum is None:
            raise EngineError("the trainer wrote weights but returned no checksum")
        return reply.step, reply.checksum

    async def send(self, socket: Path) -> tuple[int, str]:
        """Send the weights to the process that connects to this socket; return their step and digest. Raises: TrainerCrashed,
        EngineError."""
        reply = await self.ask(Send(socket=socket))
        if reply.checksum is None:
            raise EngineError("the trainer sent weights but returned no digest")
        return reply.step, reply.checksum

    async def fingerprint(self) -> str:
        """Return the SHA-256 of the current trained weights, in full precision. Raises: TrainerCrashed."""
        reply = await self.ask(Fingerprint())
        if reply.sha256 is None:
            raise EngineError("the trainer returned no hash of its weights")
        return reply.sha256

    def _out_of_memory(self, child: ChildProcess) -> str | None:
        """Return advice if the child ran out of GPU memory, which a restart would repeat; None if it ended for another reason."""
        if self._device.kind == "cpu" or not child.said(*OUT_OF_MEMORY):
            return None
        return (
            "the trainer ran out of GPU memory: end other programs on the GPU, or host a smaller model; `swarm serve --plan` shows "
            "what needs how much"
        )

    def _command(self, descriptor: int) -> ChildCommand:
        env = child_environment(os.environ) | REUSE_MEMORY | _SAME_BITS | self._device.environment(os.environ)
        if self._device.kind == "cpu":
            env |= yielding_threads(os.environ)
        argv = [
            *(sys.executable, "-m", "swarm.engine.local.trainer_process"),
            *("--model", str(self._model.path), "--fingerprint", self._model.fingerprint),
            *("--socket", str(descriptor), "--threads", str(self._threads or thread_count(env))),
            *("--device", self._device.kind, "--dtype", self._dtype),
            *("--context", str(self._context)),
            *([] if self._room is None else ["--room", str(self._room)]),
            *(["--turns"] if self._turns else []),
            *(["--offload"] if self._offload else []),
        ]
        return ChildCommand(name="trainer", argv=argv, env=env, log_path=self._log_path, pass_fds=(descriptor,))
