"""Frames between the control process and the trainer: a length of eight bytes, then JSON.

Floats travel exactly (shortest form that reads back equal), not-a-number included, so that it is refused where it
belongs and not lost on the way.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from swarm.engine.seam import StepOutcome, TrainBatch
from swarm.protocol.runspec import RunSpec

HEADER_BYTES = 8
_READ_BYTES = 1 << 20
READY = -1
"""Number of the reply that nobody asked for: the trainer is ready."""


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
    """best: step of a checkpoint that is kept besides the newest ones."""

    command: Literal["checkpoint"] = "checkpoint"
    best: int | None = None


class Export(Message):
    """Write the current weights to `file`, in the type and under the names of the hosted checkpoint.

    Adapters are written alone, with peft's names, and their configuration beside them.
    """

    command: Literal["export"] = "export"
    file: Path


class Fingerprint(Message):
    """The SHA-256 of the trained weights, as a checkpoint written now would name it."""

    command: Literal["fingerprint"] = "fingerprint"


class Request(Message):
    number: int
    command: Annotated[OpenRun | Train | WriteCheckpoint | Export | Fingerprint, Field(discriminator="command")]


class Failure(Message):
    """refused: TrainingRefused. run_closed: no run is open (any more). storage: an OSError with its number."""

    kind: Literal["refused", "engine", "run_closed", "storage"]
    text: str
    errno: int = 0


class Answer(Message):
    """number: the request's, or READY. step: where the weights stand now."""

    number: int
    step: int = 0
    outcome: StepOutcome | None = None
    failure: Failure | None = None


class Reply(Answer):
    """sha256: of the weights in full precision. checksum: of what was written for inference."""

    sha256: str | None = None
    checksum: str | None = None


def frame(message: BaseModel) -> bytes:
    data = message.model_dump_json().encode()
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def length(header: bytes) -> int:
    return int.from_bytes(header, "big")


def received(connection: socket.socket) -> bytes | None:
    """The content of the next frame, however the system cuts it; None when the other side is gone."""
    header = _exactly(connection, HEADER_BYTES)
    return None if header is None else _exactly(connection, length(header))


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), _READ_BYTES))
        if not part:
            return None
        parts += part
    return bytes(parts)
