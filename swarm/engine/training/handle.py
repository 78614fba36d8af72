"""The control process's handle for a training child: supervised, one command at a time. Imports neither torch nor ray."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path

from foundation.clock import Clock
from foundation.event_loop import take_exception
from swarm.engine.seam import EngineError, EngineHealth, RunContext, StepOutcome, TrainBatch, TrainerCrashed
from swarm.engine.training.channel import (
    Channel,
    ChildHung,
    Command,
    Export,
    Fingerprint,
    OpenRun,
    Publish,
    Reply,
    Send,
    Train,
    WriteCheckpoint,
)
from swarm.engine.training.limits import Expected, ModelWork, Work
from swarm.engine.training.supervisor import BackOff, ChildCommand, ChildProcess, HungStatus, Supervisor
from swarm.protocol.runspec import RunSpec


class TrainerHandle(ABC):
    """Handle for a training child.

    A crash fails the open command; the child restarts, and the run must be opened again. A child that does not answer within its limit
    (`training.limits`) is killed, which counts as a crash. Consecutive crashes are counted; a completed step or another run resets the
    count. Subclasses define the child's command.
    """

    def __init__(
        self,
        name: str,
        work: ModelWork,
        *,
        imports_s: float,
        log_path: Path,
        clock: Clock,
        on_health: Callable[[EngineHealth], None],
        back_off: BackOff | None = None,
        stop_grace_s: float = 5.0,
        hung_status: HungStatus | None = None,
        hopeless: Callable[[ChildProcess], str | None] | None = None,
        on_greeting: Callable[[Reply], Awaitable[None]] | None = None,
    ) -> None:
        """Prepare the handle; `boot` starts the child.

        name: the child's name in errors.
        imports_s: longest start-up time in seconds, without reading the model.
        on_greeting: gets the ready message of a newly started child, before subscribers learn that it is ready.
        """
        self._name = name
        self._on_greeting = on_greeting
        self._work = work
        self._log_path = log_path
        self._clock = clock
        self._expected = Expected()
        self._spec = RunSpec()
        self._has_trained = False
        self._channel: Channel | None = None
        self._asking = asyncio.Lock()
        self._run_id = ""
        self._run_is_open = False
        self._supervisor = Supervisor(
            start=self._start,
            ready=self._ready,
            on_health=on_health,
            clock=clock,
            boot_s=work.boot_s(imports_s),
            hung_status=hung_status,
            hopeless=hopeless,
            stop_grace_s=stop_grace_s,
            back_off=back_off,
        )

    @property
    def health(self) -> EngineHealth:
        return self._supervisor.health

    @property
    def process_id(self) -> int | None:
        """Process id of the child's reaper, for operators and tests."""
        return None if self._supervisor.child is None else self._supervisor.child.reaper_pid

    async def boot(self) -> None:
        """Start the child and wait until it is ready. Does nothing if called again. Raises: EngineDown with the reason."""
        await self._supervisor.boot()

    async def shutdown(self) -> None:
        await self._supervisor.shutdown()
        await self._drop_channel()

    async def open_run(self, run: RunContext, at_step: int | None) -> int:
        """See `Engine.open_run`. Waits for a restarting child. Raises: EngineDown, EngineError."""
        await self._supervisor.settled()
        if run.run_id != self._run_id:
            self._run_id = run.run_id
            self._supervisor.forget()
        self._run_is_open = True
        command = OpenRun(run_id=run.run_id, branch=run.branch, spec=run.spec, directory=run.directory, at_step=at_step)
        return (await self.ask(command)).step

    async def train(self, batch: TrainBatch) -> StepOutcome:
        """See `Engine.train`. Raises: TrainerCrashed, TrainingRefused."""
        outcome = (await self.ask(Train(batch=batch))).outcome
        if outcome is None:
            raise EngineError(f"the {self._name} answered a step but sent no outcome")
        self._supervisor.forget()
        return outcome

    async def checkpoint(self, best: int | None = None) -> int:
        """See `Engine.checkpoint`. Raises: TrainerCrashed, OSError."""
        return (await self.ask(WriteCheckpoint(best=best))).step

    async def ask(self, command: Command) -> Reply:
        """Send a command and wait for the reply. Raises: TrainerCrashed; TrainingRefused, EngineError, OSError from the child."""
        work = await asyncio.to_thread(self._work_of, command)
        asked = asyncio.ensure_future(self._exchange(command, work))
        asked.add_done_callback(take_exception)
        reply = await asyncio.shield(asked)  # the child stays busy with it even if the caller stops waiting
        if reply.failure is not None:
            if reply.failure.kind in ("run_closed", "unusable"):
                self._run_is_open = False
            if reply.failure.kind == "unusable":
                await self._supervisor.restart(failed=False)
            raise reply.failure.error()
        self._has_trained = self._has_trained or isinstance(command, Train)
        return reply

    async def _exchange(self, command: Command, work: Work) -> Reply:
        """Send the command as soon as the child is free. Raises: TrainerCrashed."""
        async with self._asking:
            channel = self._channel
            if channel is None or not self._run_is_open:
                raise TrainerCrashed(self.health.reason or f"no run is open in the {self._name}; open the run first")
            try:
                return await channel.answer(command, work, expected=self._expected, clock=self._clock)
            except (ChildHung, ConnectionError) as error:
                hung = error if isinstance(error, ChildHung) else None
                if self._channel is channel:
                    self._channel, self._run_is_open = None, False
                if self._supervisor.child is channel.child:  # from now on the engine no longer counts as ready
                    await self._supervisor.restart(silence=None if hung is None else hung.silence)
                await channel.close()
                what = f"the {self._name} ended during {command.command}" if hung is None else str(hung)
                raise TrainerCrashed(f"{what}; see {self._log_path}") from error

    def _work_of(self, command: Command) -> Work:
        match command:
            case OpenRun():
                self._spec = command.spec
                return self._work.open_run(command.spec, command.directory, command.at_step)
            case Train():
                self._spec = command.batch.spec
                return self._work.train(command.batch, first=not self._has_trained)
            case WriteCheckpoint():
                return self._work.checkpoint(self._spec)
            case Export() | Send() | Publish():
                return self._work.export(self._spec)
            case Fingerprint():
                return self._work.fingerprint(self._spec)
        return Work(kind=command.command, prior_s=self._work.start_s)

    # -- the child ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _command(self, descriptor: int) -> ChildCommand:
        """Return the child's command. `descriptor` is its end of the socket."""

    async def _start(self) -> ChildProcess:
        await self._drop_channel()
        self._has_trained = False
        self._channel = await Channel.start(self._command, self._name)
        return self._channel.child

    async def _ready(self, child: ChildProcess) -> None:
        channel = self._channel
        if channel is None:
            raise child.failed("has no connection")
        try:
            greeting = await channel.greeting()
        except ConnectionError:
            await self._drop_channel()
            await child.wait()
            raise child.failed("ended while it was starting") from None
        if self._on_greeting is not None:
            await self._on_greeting(greeting)

    async def _drop_channel(self) -> None:
        channel, self._channel = self._channel, None
        self._run_is_open = False
        if channel is not None:
            await channel.close()
