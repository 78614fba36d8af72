"""The driver as the control process sees it: a supervised child that is asked over a socket pair. Imports neither torch nor ray."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from foundation.clock import Clock
from swarm.engine.local.connection import Connection, raised
from swarm.engine.local.supervisor import BackOff, ChildCommand, ChildProcess, Supervisor
from swarm.engine.local.vllm_server import child_environment
from swarm.engine.seam import EngineHealth, TrainerCrashed
from swarm.engine.verl.settings import ON_EVERY_NODE, VerlSettings
from swarm.engine.verl.wire import Command, Place, Reply, Request

_BOOT_LIMIT_S = 1800.0
_STOP_GRACE_S = 20.0
"""Ray takes a while to end its actors on other nodes."""

Found = Callable[[list[Place]], Awaitable[None]]


class DriverHandle:
    """Asks one thing at a time. A crash fails the question under way; the driver is started again by itself.

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
        self._supervisor = Supervisor(
            start=self._start,
            ready=self._ready,
            on_health=on_health,
            clock=clock,
            ready_limit_s=_BOOT_LIMIT_S,
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
        async with self._asking:
            connection = self._connection
            if connection is None or not self.health.ready:
                raise TrainerCrashed(self.health.reason or "the driver is not there; open the run again")
            try:
                reply = await connection.ask(lambda number: Request(number=number, command=command))
            except ConnectionError as error:
                await self._drop_connection()
                if self._supervisor.child is connection.child:
                    await self._supervisor.restart()  # from here on nobody takes the engine for ready
                raise TrainerCrashed(f"the driver ended during {command.command}; see {self._log_path}") from error
        if reply.failure is not None:
            raise raised(reply.failure)
        return reply

    # -- the child ------------------------------------------------------------------------------------------------

    async def _start(self) -> ChildProcess:
        await self._drop_connection()
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
        await self._on_places(greeting.places)

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
