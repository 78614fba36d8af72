"""What the control process asks of the driver, beside what every trainer is asked; frames are the local engine's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from swarm.engine.local.wire import Failure, OpenRun, Train, WriteCheckpoint
from swarm.engine.seam import StepOutcome


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class Publish(_Message):
    """Freeze sampling and bring the ranks' weights of this step into the replicas. Nothing samples before `Resume`."""

    command: Literal["publish"] = "publish"
    step: int


class Resume(_Message):
    """Sampling goes on."""

    command: Literal["resume"] = "resume"


Command = OpenRun | Train | WriteCheckpoint | Publish | Resume


class Request(_Message):
    number: int
    command: Annotated[Command, Field(discriminator="command")]


class Place(_Message):
    """Where a replica answers, and the key that it asks for. Sent over the driver's own socket alone."""

    address: str
    key: str


class Reply(_Message):
    """number: the request's, or READY with `places`. counts: sampled tokens by vLLM's request id, of a Publish."""

    number: int
    step: int = 0
    outcome: StepOutcome | None = None
    places: list[Place] = []
    counts: dict[str, int] = {}
    failure: Failure | None = None
