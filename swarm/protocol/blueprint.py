"""One trial as a file for a client process, which a person can read, run and share.

Holds no secret: a client token, where one is needed, is in the environment (`SWARM_TOKEN`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from foundation.strict import StrictModel

Scalar = bool | int | float | str


class Interim(StrictModel):
    """Evaluations while training goes on: a few of the held-out tasks, once each. They are shown, and decide nothing."""

    every: Annotated[int, Field(ge=1)]
    """Optimiser steps between two evaluations."""
    tasks: Annotated[int, Field(ge=1)]


class HeldOut(StrictModel):
    """Evaluation before and after training, on tasks that training never sees."""

    tasks: Annotated[int, Field(ge=1)]
    first: Annotated[int, Field(ge=0, exclude_if=lambda first: first == 0)] = 0
    """How many of the workflow's held-out tasks to skip before the first scored one."""
    episodes: Annotated[int, Field(ge=1)]
    """Episodes per task."""
    temperature: float
    interim: Annotated[Interim | None, Field(exclude_if=lambda interim: interim is None)] = None
    """Evaluations during training; None: only those before and after."""

    @property
    def upto(self) -> int:
        """How many held-out tasks to request from the workflow: the skipped ones and the scored ones."""
        return self.first + self.tasks


class Elsewhere(StrictModel):
    """Held-out tasks of another instrument, which the trained model plays when the trial's own evaluations are done."""

    instrument: str
    instrument_dir: str
    workflow: str
    code_version: str
    parameters: dict[str, Scalar] = {}
    heldout: HeldOut


class PartnerRun(StrictModel):
    """Another model that the same trial trains: the run that it has on its own server."""

    server_url: str
    run_id: str


class TrialBlueprint(StrictModel):
    """`python -m swarm.client.trial BLUEPRINT.json` carries this out: evaluate, train to the run's limit, evaluate, here and elsewhere."""

    trial_key: str
    server_url: str
    run_id: str
    partners: dict[str, PartnerRun] = {}
    """Partner runs by role. The workflow's `meet` gets them before the first episode."""
    instrument_dir: str
    workflow: str
    """File in `instrument_dir` that defines `tasks(split, seed, count, **parameters)` and `rollout(episode, task)`."""
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
