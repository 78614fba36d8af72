"""The socket between the control process and a child that trains: numbered commands, and replies as they come.

A frame is a length of eight bytes, then JSON. Floats are sent exactly (the shortest form that reads back equal). That includes
not-a-number, so that the check which refuses it can see it. Imports neither torch nor ray.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from foundation.clock import Clock
from swarm.engine.seam import EngineError, StepOutcome, TrainBatch, TrainerCrashed, TrainingRefused
from swarm.engine.training.limits import Expected, Silence, Unanswered, Work
from swarm.engine.training.supervisor import ChildCommand, ChildProcess
from swarm.protocol.runspec import AS_STORED, RunSpec

HEADER_BYTES = 8
_READ_BYTES = 1 << 20
READY = -1
"""Number of the unsolicited reply with which the child says that it is ready."""


class RunClosed(EngineError):
    """No run is open: none was opened, or a failed step left weights that belong to no step."""


# -- messages -------------------------------------------------------------------------------------------------------------


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class OpenRun(Message):
    command: Literal["open_run"] = "open_run"
    run_id: str
    branch: int
    spec: RunSpec
    directory: Path
    at_step: int | None


class Train(Message):
    command: Literal["train"] = "train"
    batch: TrainBatch


class WriteCheckpoint(Message):
    """Write a checkpoint. `best` is the step of one to keep besides the newest."""

    command: Literal["checkpoint"] = "checkpoint"
    best: int | None = None


class Export(Message):
    """Local: write the current weights to `file`, under the names of the hosted checkpoint.

    Adapters are written without the weights they adapt, under peft's names, with their configuration next to them.
    """

    command: Literal["export"] = "export"
    file: Path


class Send(Message):
    """Local: send the current weights over the device to the process that connects to `socket`. `checksum` is their digest."""

    command: Literal["send"] = "send"
    socket: Path


class Fingerprint(Message):
    """Local: compute the SHA-256 of the trained weights, as a checkpoint written now would record it."""

    command: Literal["fingerprint"] = "fingerprint"


class Publish(Message):
    """verl: freeze sampling and load the ranks' weights of this step into the replicas. Nothing is sampled before `Resume`."""

    command: Literal["publish"] = "publish"
    step: int


class Resume(Message):
    """verl: continue sampling."""

    command: Literal["resume"] = "resume"


Command = OpenRun | Train | WriteCheckpoint | Export | Send | Fingerprint | Publish | Resume


class Request(Message):
    number: int
    command: Annotated[Command, Field(discriminator="command")]


class Failure(Message):
    """An error in the child.

    refused: a TrainingRefused.
    run_closed: no run is open, or no longer.
    storage: an OSError; `errno` is its number.
    unusable: a TrainingRefused after which the child must be restarted.
    engine: any other EngineError.
    """

    kind: Literal["refused", "engine", "run_closed", "storage", "unusable"]
    text: str
    errno: int = 0

    @classmethod
    def of(cls, error: EngineError | OSError) -> Self:
        if isinstance(error, OSError):
            where = f": {error.filename}" if error.filename else ""
            return cls(kind="storage", text=f"{error.strerror or error}{where}", errno=error.errno or 0)
        kinds: dict[type[EngineError], Literal["refused", "run_closed"]] = {
            TrainingRefused: "refused",
            RunClosed: "run_closed",
        }
        return cls(kind=kinds.get(type(error), "engine"), text=str(error))

    def error(self) -> Exception:
        """Return the exception that the control process raises for this failure."""
        match self.kind:
            case "refused" | "unusable":
                return TrainingRefused(self.text)
            case "run_closed":
                return TrainerCrashed(self.text)
            case "storage":
                return OSError(self.errno, self.text)
            case "engine":
                return EngineError(self.text)


class Place(Message):
    """verl: address and key of a replica. Sent only over the driver's own socket."""

    address: str
    key: str


class Reply(Message):
    """The child's answer to a request.

    number: the request's number, or READY.
    step: step of the current weights.
    sha256: hash of the weights in full precision.
    checksum: checksum of the weights that were written for inference.
    places, device: only from verl, with READY: the replicas, and the kind of device that ranks compute on.
    counts: only from verl, for a Publish: sampled tokens by vLLM's request id.
    """

    number: int = 0
    step: int = 0
    outcome: StepOutcome | None = None
    failure: Failure | None = None
    sha256: str | None = None
    checksum: str | None = None
    places: list[Place] = []
    device: Literal["cpu", "cuda"] = "cpu"
    counts: dict[str, int] = {}


# -- the child's end ------------------------------------------------------------------------------------------------------


def frame(message: BaseModel) -> bytes:
    data = message.model_dump_json().encode()
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def received(connection: socket.socket) -> Request | None:
    """Read the next request, even if it arrives in parts; return None if the other side is gone."""
    header = _exactly(connection, HEADER_BYTES)
    data = None if header is None else _exactly(connection, int.from_bytes(header, "big"))
    return None if data is None else Request.model_validate_json(data, context=AS_STORED)


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), _READ_BYTES))
        if not part:
            return None
        parts += part
    return bytes(parts)


# -- the control process's end --------------------------------------------------------------------------------------------


class ChildHung(Exception):
    """A child did not answer within its time limit."""

    def __init__(self, silence: Silence) -> None:
        super().__init__(silence.reason)
        self.silence = silence


class Channel:
    """The socket to one child. When the child ends, the socket closes and open commands fail. `name` is the child's name in errors."""

    def __init__(
        self, child: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str
    ) -> None:
        self.child = child
        self._writer = writer
        self._name = name
        self._number = 0
        self._ready: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting: dict[int, asyncio.Future[Reply]] = {READY: self._ready}
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def start(cls, command: Callable[[int], ChildCommand], name: str) -> Self:
        """Start the child. `command` makes the child's command from its socket descriptor. Raises: OSError."""
        ours, theirs = socket.socketpair()
        child: ChildProcess | None = None
        try:
            with theirs:
                child = await ChildProcess.start(command(theirs.fileno()))
            ours.setblocking(False)
            return cls(child, *await asyncio.open_connection(sock=ours), name)
        except BaseException:  # mainly cancellation: no one else knows of the child yet
            ours.close()
            if child is not None:
                await child.stop(grace_s=0)
            raise

    async def greeting(self) -> Reply:
        """Wait for the child's ready message. Raises: ConnectionError."""
        return await self._ready

    async def ask(self, command: Command) -> Reply:
        """Send a command and wait for the reply. Raises: ConnectionError if the child ends first."""
        self._number += 1
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = reply
        if self._reading.done():
            raise ConnectionResetError(f"the {self._name} has closed its socket")
        self._writer.write(frame(Request(number=self._number, command=command)))
        await self._writer.drain()
        return await reply

    async def answer(self, command: Command, work: Work, *, expected: Expected, clock: Clock) -> Reply:
        """Like `ask`, but within the time limit that `expected` sets for `work`. Raises: ConnectionError, ChildHung."""
        began = clock.now()
        asked = asyncio.ensure_future(self.ask(command))
        try:
            return await expected.answer(clock, work, asked, done=lambda reply: reply.failure is None)
        except Unanswered as error:
            reason = f"the {self._name} has not answered for {error.limit_s:.0f} s: {work.kind}"
            raise ChildHung(Silence(reason=reason, since=began)) from error

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
                reply = Reply.model_validate_json(await reader.readexactly(size))
                waiting = self._waiting.pop(reply.number, None)
                if waiting is not None and not waiting.done():  # the caller may have been cancelled
                    waiting.set_result(reply)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            self._break_off(f"the {self._name} has closed its socket: {error}")

    def _break_off(self, why: str) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionResetError(why))
                waiting.exception()  # mark as retrieved, even if no caller waits any more

    async def close(self) -> None:
        self._reading.cancel()
        self._break_off(f"the connection to the {self._name} was closed")
        self._writer.transport.abort()  # discard unsent data: a hanging child would never read it
        await asyncio.gather(self._reading, self._writer.wait_closed(), return_exceptions=True)
