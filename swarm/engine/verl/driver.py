"""The driver as the control process sees it: a supervised child that is asked over a socket pair. Imports neither torch nor ray."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from foundation.clock import Clock
from swarm.engine.local.supervisor import BackOff, ChildCommand, ChildProcess, Supervisor
from swarm.engine.local.vllm_server import child_environment
from swarm.engine.local.wire import HEADER_BYTES, READY, Failure, frame, length
from swarm.engine.seam import EngineError, EngineHealth, TrainerCrashed, TrainingRefused
from swarm.engine.verl.settings import VerlSettings
from swarm.engine.verl.wire import Command, Place, Reply, Request

_BOOT_LIMIT_S = 1800.0
_STOP_GRACE_S = 20.0
"""Ray takes a while to end its actors on other nodes."""

Found = Callable[[list[Place]], Awaitable[None]]


class _Connection:
    """The socket to one driver. It ends with the driver, and every question under way with it."""

    def __init__(self, child: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.child = child
        self._writer = writer
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Reply]] = {READY: asyncio.get_running_loop().create_future()}
        self._reading = asyncio.create_task(self._read(reader))

    async def greeting(self) -> Reply:
        """What the driver says when all ranks and replicas are there. Raises: ConnectionError."""
        return await self._waiting[READY]

    async def ask(self, command: Command) -> Reply:
        """Raises: ConnectionError when the driver ends before it answers."""
        self._number += 1
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = answer
        if self._reading.done():
            raise ConnectionResetError("the driver has closed its socket")
        self._writer.write(frame(Request(number=self._number, command=command)))
        await self._writer.drain()
        return await answer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = length(await reader.readexactly(HEADER_BYTES))
                reply = Reply.model_validate_json(await reader.readexactly(size))
                waiting = self._waiting.pop(reply.number, None)
                if waiting is not None and not waiting.done():  # who asked may have been cancelled
                    waiting.set_result(reply)
                if reply.number == READY and waiting is not None:
                    self._waiting[READY] = waiting
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionResetError(f"the driver has closed its socket: {error}"))
                    waiting.exception()  # seen, even when nobody waits any more

    async def close(self) -> None:
        self._reading.cancel()
        self._writer.close()
        await asyncio.gather(self._reading, self._writer.wait_closed(), return_exceptions=True)


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
        self._connection: _Connection | None = None
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

    async def ask(self, command: Command) -> Reply:
        """Raises: TrainerCrashed, TrainingRefused, EngineError, OSError; what the driver answered."""
        async with self._asking:
            connection = self._connection
            if connection is None or not self.health.ready:
                raise TrainerCrashed(self.health.reason or "the driver is not there; open the run again")
            try:
                reply = await connection.ask(command)
            except ConnectionError as error:
                await self._drop_connection()
                if self._supervisor.child is connection.child:
                    await self._supervisor.restart()  # from here on nobody takes the engine for ready
                raise TrainerCrashed(f"the driver ended during {command.command}; see {self._log_path}") from error
        if reply.failure is not None:
            raise _raised(reply.failure)
        return reply

    # -- the child ------------------------------------------------------------------------------------------------

    async def _start(self) -> ChildProcess:
        await self._drop_connection()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                child = await ChildProcess.start(self._command(theirs.fileno()))
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        self._connection = _Connection(child, *await asyncio.open_connection(sock=ours))
        return child

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
        env = child_environment(os.environ) | {"RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"}
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


def _raised(failure: Failure) -> Exception:
    match failure.kind:
        case "refused":
            return TrainingRefused(failure.text)
        case "run_closed":
            return TrainerCrashed(failure.text)
        case "storage":
            return OSError(failure.errno, failure.text)
        case "engine":
            return EngineError(failure.text)
