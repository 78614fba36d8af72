"""The socket between the control process and a child that trains: questions by number, answers as they come."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from pydantic import BaseModel

from foundation.clock import Clock
from swarm.engine.limits import Expected, Silence, Unanswered, Work
from swarm.engine.local.supervisor import ChildCommand, ChildProcess
from swarm.engine.local.wire import HEADER_BYTES, READY, Answer, Failure, frame, length
from swarm.engine.seam import EngineError, TrainerCrashed, TrainingRefused

Reply = TypeVar("Reply", bound=Answer)


class ChildHung(Exception):
    """A child did not answer a question within its limit."""

    def __init__(self, silence: Silence) -> None:
        super().__init__(silence.reason)
        self.silence = silence


class Connection(Generic[Reply]):
    """The socket to one child. It ends with the child, and every question under way with it.

    reply: what its answers are read as. name: what errors call the child.
    """

    def __init__(
        self,
        child: ChildProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        reply: type[Reply],
        name: str,
    ) -> None:
        self.child = child
        self._writer = writer
        self._reply = reply
        self._name = name
        self._number = 0
        self._ready: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting: dict[int, asyncio.Future[Reply]] = {READY: self._ready}
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def start(cls, command: Callable[[int], ChildCommand], reply: type[Reply], name: str) -> Self:
        """Start the child that `command` makes of its end's descriptor. Raises: OSError."""
        ours, theirs = socket.socketpair()
        child: ChildProcess | None = None
        try:
            with theirs:
                child = await ChildProcess.start(command(theirs.fileno()))
            ours.setblocking(False)
            return cls(child, *await asyncio.open_connection(sock=ours), reply, name)
        except BaseException:  # cancelled, above all: nobody else knows of the child yet
            ours.close()
            if child is not None:
                await child.stop(grace_s=0)
            raise

    async def greeting(self) -> Reply:
        """What the child says when it is ready. Raises: ConnectionError."""
        return await self._ready

    async def ask(self, request: Callable[[int], BaseModel]) -> Reply:
        """The answer to what `request` makes of a number. Raises: ConnectionError when the child ends before it answers."""
        self._number += 1
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = answer
        if self._reading.done():
            raise ConnectionResetError(f"the {self._name} has closed its socket")
        self._writer.write(frame(request(self._number)))
        await self._writer.drain()
        return await answer

    async def answer(
        self, request: Callable[[int], BaseModel], work: Work, *, expected: Expected, clock: Clock
    ) -> Reply:
        """The same, within the limit of this work. Raises: ConnectionError, ChildHung."""
        began = clock.now()
        asked = asyncio.ensure_future(self.ask(request))
        try:
            return await expected.answer(clock, work, asked, done=lambda reply: reply.failure is None)
        except Unanswered as error:
            reason = f"the {self._name} has not answered for {error.limit_s:.0f} s: {work.kind}"
            raise ChildHung(Silence(reason=reason, since=began)) from error

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = length(await reader.readexactly(HEADER_BYTES))
                reply = self._reply.model_validate_json(await reader.readexactly(size))
                waiting = self._waiting.pop(reply.number, None)
                if waiting is not None and not waiting.done():  # who asked may have been cancelled
                    waiting.set_result(reply)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            self._break_off(f"the {self._name} has closed its socket: {error}")

    def _break_off(self, why: str) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionResetError(why))
                waiting.exception()  # seen, even when nobody waits any more

    async def close(self) -> None:
        self._reading.cancel()
        self._break_off(f"the {self._name} is not asked any more")
        self._writer.transport.abort()  # what was not read yet is of no use: a child that hangs would never read it
        await asyncio.gather(self._reading, self._writer.wait_closed(), return_exceptions=True)


def raised(failure: Failure) -> Exception:
    """What a failed answer means on this side."""
    match failure.kind:
        case "refused":
            return TrainingRefused(failure.text)
        case "run_closed":
            return TrainerCrashed(failure.text)
        case "storage":
            return OSError(failure.errno, failure.text)
        case "engine":
            return EngineError(failure.text)
