"""The driver as the control process sees it: a supervised child that is asked over a socket pair. Imports neither torch nor ray."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from foundation.clock import Clock
from foundation.futures import take_exception
from swarm.engine.limits import Expected, Work
from swarm.engine.local.connection import ChildHung, Connection, raised
from swarm.engine.local.supervisor import BackOff, ChildCommand, ChildProcess, HungStatus, Supervisor
from swarm.engine.local.vllm_server import child_environment
from swarm.engine.local.wire import OpenRun, Train, WriteCheckpoint
from swarm.engine.seam import EngineHealth, TrainerCrashed
from swarm.engine.verl.settings import HUNG_STATUS, LOOK_EVERY_S, ON_EVERY_NODE, VerlSettings
from swarm.engine.verl.wire import Command, Place, Publish, Reply, Request
from swarm.protocol.runspec import RunSpec

_IMPORTS_S = 300.0
"""Of every process of the cluster, one after the other on a small machine; and until its groups have found each other."""
_FIRST_STEP_S = 60.0
"""Groups of ranks meet, kernels are compiled."""
_STOP_GRACE_S = 20.0
"""Ray takes a while to end its actors on other nodes."""

Found = Callable[[list[Place]], Awaitable[None]]


class DriverHandle:
    """Asks one thing at a time. A crash fails the question under way; the driver is started again by itself. One that does not answer
    within the limit of `swarm.engine.limits`, whichever part of its cluster hangs, is ended with all of it, which is a crash too.

    on_places: hears where the replicas of a newly started driver are, before anyone is told that it is ready.
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
        self._log_path = log_path
        self._on_places = on_places
        self._connection: Connection[Reply] | None = None
        self._asking = asyncio.Lock()
        self._clock = clock
        self._work = settings.work("cpu", start_s=_FIRST_STEP_S)
        self._expected = Expected()
        self._spec = RunSpec()
        self._has_trained = False
        self._supervisor = Supervisor(
            start=self._start,
            ready=self._ready,
            on_health=on_health,
            clock=clock,
            boot_s=self._work.boot_s(_IMPORTS_S),
            hung_status=HungStatus(status=HUNG_STATUS, silent_s=self._silent_s),
            stop_grace_s=_STOP_GRACE_S,
            back_off=back_off,
        )

    @property
    def health(self) -> EngineHealth:
        return self._supervisor.health

    @property
    def process_id(self) -> int | None:
        """Guardian of the driver, for operators and tests."""
        return None if self._supervisor.child is None else self._supervisor.child.guardian_pid

    async def boot(self) -> None:
        """Start the driver and wait until its cluster is whole. Again: nothing. Raises: EngineDown with the reason."""
        await self._supervisor.boot()

    async def settled(self) -> None:
        """Wait for a driver that is being restarted. Raises: EngineDown when there will be none."""
        await self._supervisor.settled()

    async def shutdown(self) -> None:
        await self._supervisor.shutdown()
        await self._drop_connection()

    async def restart(self) -> None:
        """Start everything anew, and wait until it is there."""
        await self._supervisor.restart()
        await self._supervisor.settled()

    def forget_failures(self) -> None:
        """Count them anew: a step was made, or another run is opened."""
        self._supervisor.forget()

    async def ask(self, command: Command) -> Reply:
        """Raises: TrainerCrashed, TrainingRefused, EngineError, OSError; what the driver answered."""
        work = await asyncio.to_thread(self._work_of, command)
        asked = asyncio.ensure_future(self._exchange(command, work))
        asked.add_done_callback(take_exception)
        reply = await asyncio.shield(asked)  # when nobody waits for it any more the driver is busy with it all the same
        if reply.failure is not None:
            raise raised(reply.failure)
        self._has_trained = self._has_trained or isinstance(command, Train)
        return reply

    async def _exchange(self, command: Command, work: Work) -> Reply:
        """Raises: TrainerCrashed."""
        async with self._asking:
            connection = self._connection
            if connection is None or not self.health.ready:
                raise TrainerCrashed(self.health.reason or "the driver is not there; open the run again")
            try:
                return await connection.answer(
                    lambda number: Request(number=number, command=command),
                    work,
                    expected=self._expected,
                    clock=self._clock,
                )
            except (ChildHung, ConnectionError) as error:
                hung = error if isinstance(error, ChildHung) else None
                if self._connection is connection:
                    self._connection = None
                if self._supervisor.child is connection.child:  # from here on nobody takes the engine for ready
                    await self._supervisor.restart(silence=None if hung is None else hung.silence)
                await connection.close()
                what = f"the driver ended during {command.command}" if hung is None else str(hung)
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
            case Publish():
                return self._work.export(self._spec)
        return Work(kind=command.command, prior_s=_FIRST_STEP_S)

    # -- the child ------------------------------------------------------------------------------------------------

    async def _start(self) -> ChildProcess:
        await self._drop_connection()
        self._has_trained = False
        self._connection = await Connection.start(self._command, Reply, "driver")
        return self._connection.child

    async def _ready(self, child: ChildProcess) -> None:
        connection = self._connection
        if connection is None:
            raise child.failed("has no connection")
        try:
            greeting = await connection.greeting()
        except ConnectionError:
            await self._drop_connection()
            await child.wait()
            raise child.failed("ended while it was starting") from None
        self._work = self._settings.work(greeting.device, start_s=_FIRST_STEP_S)
        await self._on_places(greeting.places)

    def _silent_s(self) -> float:
        """How long a part of the cluster has given no sign of life when the driver ends for it."""
        return self._settings.silence_s(self._work.device) + LOOK_EVERY_S

    def _command(self, descriptor: int) -> ChildCommand:
        env = child_environment(os.environ) | ON_EVERY_NODE | {"RAY_USAGE_STATS_ENABLED": "0"}
        del env["VLLM_SERVER_DEV_MODE"]  # replicas listen on the network: nobody there may call into their workers
        argv = [
            *(sys.executable, "-m", "swarm.engine.verl.driver_process"),
            *("--settings", self._settings.model_dump_json(), "--fingerprint", self._fingerprint),
            *("--socket", str(descriptor)),
        ]
        return ChildCommand(name="driver (verl)", argv=argv, env=env, log_path=self._log_path, pass_fds=(descriptor,))

    async def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
