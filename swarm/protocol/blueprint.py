"""A trial's blueprint: a file that tells a client process what to do, and that people can read, run and share.

It contains no secrets. If the server needs a client token, set it in the environment (`SWARM_TOKEN`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from foundation.strict import StrictModel

Scalar = bool | int | float | str


class Interim(StrictModel):
    """Evaluations during training: a few of the held-out tasks, played once each. They are shown but decide nothing."""

    every: Annotated[int, Field(ge=1)]
    """Number of optimizer steps between two evaluations."""
    tasks: Annotated[int, Field(ge=1)]


class HeldOut(StrictModel):
    """Evaluation before and after training, on tasks that training never sees."""

    tasks: Annotated[int, Field(ge=1)]
    first: Annotated[int, Field(ge=0, exclude_if=lambda first: first == 0)] = 0
    """Number of the workflow's held-out tasks to skip before the first scored one."""
    episodes: Annotated[int, Field(ge=1)]
    """Number of episodes per task."""
    temperature: float
    interim: Annotated[Interim | None, Field(exclude_if=lambda interim: interim is None)] = None
    """Evaluations during training; None means only before and after."""

    @property
    def upto(self) -> int:
        """Number of held-out tasks to request from the workflow, including the skipped ones."""
        return self.first + self.tasks


class Elsewhere(StrictModel):
    """Held-out tasks of another instrument, which the trained model plays after the trial's own evaluations."""

    instrument: str
    instrument_dir: str
    workflow: str
    code_version: str
    parameters: dict[str, Scalar] = {}
    heldout: HeldOut


class PartnerRun(StrictModel):
    """The run, on its own server, of another model that the same trial trains."""

    server_url: str
    run_id: str


class TrialBlueprint(StrictModel):
    """What `python -m swarm.client.trial BLUEPRINT.json` carries out.

    It evaluates, trains to the run's limit, evaluates again, and then evaluates on the instruments in `elsewhere`.
    """

    trial_key: str
    server_url: str
    run_id: str
    partners: dict[str, PartnerRun] = {}
    """Partner runs by role. They are passed to the workflow's `meet` before the first episode."""
    instrument_dir: str
    workflow: str
    """Name of the file in `instrument_dir` that defines `tasks(split, seed, count, **parameters)` and `rollout(episode, task)`."""
    code_version: str
    """SHA-256 over the instrument's folder; sent as client_version."""
    parameters: dict[str, Scalar] = {}
    seed: int
    group_size: Annotated[int, Field(ge=1)]
    concurrency: Annotated[int, Field(ge=1)]
    retries: Annotated[int, Field(ge=0)] = 2
    idle_limit_s: float = 240.0
    heldout: HeldOut
    elsewhere: Annotated[tuple[Elsewhere, ...], Field(exclude_if=lambda elsewhere: not elsewhere)] = ()
