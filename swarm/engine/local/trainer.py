"""The trainer as the control process sees it: a supervised child that is asked over a socket pair. Imports no torch."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from foundation.clock import Clock
from foundation.futures import take_exception
from swarm.engine.limits import Expected, Work
from swarm.engine.local.connection import ChildHung, Connection, raised
from swarm.engine.local.device import Device
from swarm.engine.local.supervisor import BackOff, ChildCommand, ChildProcess, Supervisor
from swarm.engine.local.threads import thread_count, yielding_threads
from swarm.engine.local.vllm_server import REUSE_MEMORY, child_environment
from swarm.engine.local.wire import (
    Export,
    Fingerprint,
    OpenRun,
    Reply,
    Request,
    Train,
    WriteCheckpoint,
)
from swarm.engine.local.workload import ModelWork
from swarm.engine.seam import (
    EngineError,
    EngineHealth,
    RunContext,
    StepOutcome,
    TrainBatch,
    TrainerCrashed,
)
from swarm.models.folder import ModelFolder
from swarm.protocol.runspec import ComputeType, RunSpec

_IMPORTS_S = 60.0
"""At worst; an idle machine takes a tenth of it."""
_FIRST_STEP_S: dict[Device, float] = {"cpu": 10.0, "cuda": 60.0}
_SAME_BITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What CUDA's matrix products need to give the same bits again."""

Command = OpenRun | Train | WriteCheckpoint | Export | Fingerprint


class TrainerHandle:
    """Asks one thing at a time. A crash fails the question under way; the child is started again by itself. One that does not answer
    within the limit of `swarm.engine.limits` is ended, which is a crash too.

    Crashes count in a row: a step that was made ends the row, and so does another run.

    dtype: what inference multiplies in; weights on their way there are not narrowed below it.
    offload_optimizer: between steps the optimiser's state lies in the machine's memory instead of the device's.
    """

    def __init__(
        self,
        model: ModelFolder,
        *,
        log_path: Path,
        clock: Clock,
        on_health: Callable[[EngineHealth], None],
        device: Device = "cpu",
        dtype: ComputeType = "bfloat16",
        offload_optimizer: bool = False,
        back_off: BackOff | None = None,
    ) -> None:
        self._model = model
        self._log_path = log_path
        self._device = device
        self._dtype: ComputeType = dtype
        self._offload_optimizer = offload_optimizer
        self._connection: Connection[Reply] | None = None
        self._run_id = ""
        self._run_is_open = False
        self._spec = RunSpec()
        self._clock = clock
        self._work = ModelWork(model_dir=model.path, device=device, start_s=_FIRST_STEP_S[device])
        self._expected = Expected()
        self._has_trained = False
        self._asking = asyncio.Lock()
        self._changed = asyncio.Event()
        self._on_health = on_health
        self._supervisor = Supervisor(
            start=self._start,
            ready=self._ready,
            on_health=self._heard,
            clock=clock,
            boot_s=self._work.boot_s(_IMPORTS_S),
            back_off=back_off,
        )

    @property
    def health(self) -> EngineHealth:
        return self._supervisor.health

    @property
    def process_id(self) -> int | None:
        """Guardian of the child, for operators and tests."""
        return None if self._supervisor.child is None else self._supervisor.child.guardian_pid

    async def boot(self) -> None:
        """Start the child and wait until it is ready. Again: nothing. Raises: EngineDown with the reason."""
        await self._supervisor.boot()

    async def shutdown(self) -> None:
        await self._supervisor.shutdown()
        await self._drop_connection()

    async def open_run(self, run: RunContext, at_step: int | None) -> int:
        """Waits for a child that is being restarted. Raises: EngineDown, EngineError."""
        await self._connected()
        if run.run_id != self._run_id:
            self._run_id = run.run_id
            self._supervisor.forget()
        command = OpenRun(run_id=run.run_id, branch=run.branch, spec=run.spec, directory=run.directory, at_step=at_step)
        self._run_is_open, self._spec = True, run.spec
        work = await asyncio.to_thread(self._work.open_run, run.spec, run.directory, at_step)
        return (await self._ask(command, work)).step

    async def train(self, batch: TrainBatch) -> StepOutcome:
        """Raises: TrainerCrashed, TrainingRefused."""
        self._spec = batch.spec
        work = await asyncio.to_thread(self._work.train, batch, first=not self._has_trained)
        outcome = (await self._ask(Train(batch=batch), work)).outcome
        if outcome is None:
            raise EngineError("the trainer answered a step without its outcome")
        self._has_trained = True
        self._supervisor.forget()
        return outcome

    async def checkpoint(self, best: int | None = None) -> int:
        """See `Engine.checkpoint`. Raises: TrainerCrashed, OSError."""
        return (await self._ask(WriteCheckpoint(best=best), self._work.checkpoint(self._spec))).step

    async def export(self, file: Path) -> tuple[int, str]:
        """Step and checksum of the weights that were written to `file`. Raises: TrainerCrashed, OSError."""
        reply = await self._ask(Export(file=file), self._work.export(self._spec))
        if reply.checksum is None:
            raise EngineError("the trainer wrote weights without telling their checksum")
        return reply.step, reply.checksum

    async def fingerprint(self) -> str:
        """SHA-256 of the trained weights as they stand, in full precision. Raises: TrainerCrashed."""
        reply = await self._ask(Fingerprint(), self._work.fingerprint(self._spec))
        if reply.sha256 is None:
            raise EngineError("the trainer did not tell the hash of its weights")
        return reply.sha256

    async def _ask(self, command: Command, work: Work) -> Reply:
        asked = asyncio.ensure_future(self._exchange(command, work))
        asked.add_done_callback(take_exception)
        reply = await asyncio.shield(asked)  # when nobody waits for it any more the child is busy with it all the same
        if reply.failure is not None:
            if reply.failure.kind == "run_closed":
                self._run_is_open = False
            raise raised(reply.failure)
        return reply

    async def _exchange(self, command: Command, work: Work) -> Reply:
        """Raises: TrainerCrashed."""
        async with self._asking:
            connection = self._connection
            if connection is None or not self._run_is_open:
                raise TrainerCrashed(self.health.reason or "no run is open in the trainer; open it (again)")
            try:
                return await connection.answer(
                    lambda number: Request(number=number, command=command),
                    work,
                    expected=self._expected,
                    clock=self._clock,
                )
            except ChildHung as hung:
                self._connection, self._run_is_open = None, False
                if self._supervisor.child is connection.child:
                    await self._supervisor.restart(silence=hung.silence)
                await connection.close()
                raise TrainerCrashed(f"{hung}; its log is {self._log_path}") from hung
            except ConnectionError as error:
                if self._connection is connection:
                    self._connection, self._run_is_open = None, False
                await connection.child.stop(grace_s=0)
                await connection.close()
                raise TrainerCrashed(
                    f"the trainer ended during {command.command}; its log is {self._log_path}"
                ) from error

    async def _connected(self) -> None:
        """Wait for a child that is ready. Raises: EngineDown when there will be none."""
        while True:
            await self._supervisor.settled()
            if self._connection is not None:
                return
            await self._changed.wait()  # the supervisor has yet to see that the child is gone

    def _heard(self, health: EngineHealth) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._on_health(health)

    # -- the child ------------------------------------------------------------------------------------------------

    async def _start(self) -> ChildProcess:
        await self._drop_connection()
        self._has_trained = False
        self._connection = await Connection.start(self._command, Reply, "trainer")
        return self._connection.child

    async def _ready(self, child: ChildProcess) -> None:
        connection = self._connection
        if connection is None:
            raise child.failed("has no connection")
        try:
            await connection.greeting()
        except ConnectionError:
            await self._drop_connection()
            await child.wait()
            raise child.failed("ended while it was starting") from None

    def _command(self, descriptor: int) -> ChildCommand:
        env = child_environment(os.environ) | REUSE_MEMORY | _SAME_BITS
        if self._device == "cpu":
            env |= yielding_threads(os.environ)
        argv = [
            *(sys.executable, "-m", "swarm.engine.local.trainer_process"),
            *("--model", str(self._model.path), "--fingerprint", self._model.fingerprint),
            *("--socket", str(descriptor), "--threads", str(thread_count(env))),
            *("--device", self._device, "--dtype", self._dtype),
            *(["--offload-optimizer"] if self._offload_optimizer else []),
        ]
        return ChildCommand(name="trainer", argv=argv, env=env, log_path=self._log_path, pass_fds=(descriptor,))

    async def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        self._run_is_open = False
        if connection is not None:
            await connection.close()
