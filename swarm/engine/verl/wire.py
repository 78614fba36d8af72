"""What the control process asks of the driver, beside what every trainer is asked; frames are the local engine's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from swarm.engine.local.wire import Answer, Message, OpenRun, Train, WriteCheckpoint


class Publish(Message):
    """Freeze sampling and bring the ranks' weights of this step into the replicas. Nothing samples before `Resume`."""

    command: Literal["publish"] = "publish"
    step: int


class Resume(Message):
    """Sampling goes on."""

    command: Literal["resume"] = "resume"


Command = OpenRun | Train | WriteCheckpoint | Publish | Resume


class Request(Message):
    number: int
    command: Annotated[Command, Field(discriminator="command")]


class Place(Message):
    """Where a replica answers, and the key that it asks for. Sent over the driver's own socket alone."""

    address: str
    key: str


class Reply(Answer):
    """READY comes with `places` and `device`, the kind that ranks compute on. counts: sampled tokens by vLLM's request id, of a Publish."""

    places: list[Place] = []
    device: Literal["cpu", "cuda"] = "cpu"
    counts: dict[str, int] = {}
