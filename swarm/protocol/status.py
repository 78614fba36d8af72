"""How a server and its run are doing."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from swarm.protocol.episodes import IdempotencyKey, WeightsVersion
from swarm.protocol.problem import ClientModel
from swarm.protocol.runspec import ComputeType, RunSpec


class Phase(StrEnum):
    IDLE = "idle"
    BOOTING = "booting"
    ROLLING = "rolling"
    DRAINING = "draining"
    UPDATING = "updating"
    STOPPING = "stopping"
    FAILED = "failed"


class MixStatus(BaseModel):
    """One family of tasks."""

    running: int = 0
    ended: int = 0
    """Episodes waiting for a step, in open or ready groups."""
    trained_groups: int = 0
    """Groups that entered optimiser steps; steps undone by a restore do not count."""
    debt: float = 0.0
    """How many groups it is behind its share (below 0: ahead). Within 1 of 0 while no family's patience has run out."""
    passed: bool = False
    """Its `patience_s` ran out: steps proceed without it until its next group is ready."""


class PoolStatus(BaseModel):
    running: int = 0
    prepared: int = 0
    """Episodes bound to a team's decision."""
    ended: int = 0
    groups_open: int = 0
    groups_ready: int = 0
    groups_needed: int = 0
    by_mix: dict[str, MixStatus] = {}


class Hang(BaseModel):
    """A process of the engine did not answer within its limit. It is ended and restarted, and the step under way runs again."""

    reason: str
    """Which process hung, on which request, and for how long."""
    phase: Phase
    """The server's phase when the hang was detected."""
    since: float
    """Unix time of the last sign of life."""
    found_at: float
    over_at: float | None = None
    """When the engine was ready again; None while it is not."""


class ReplicaStatus(BaseModel):
    """One of the processes that sample. While it is away the others take its calls."""

    device: str
    ready: bool
    failed_for_good: bool = False
    """It crashed too often and stays down until the server restarts."""
    failures: int = 0
    """Crashes in a row."""
    reason: str | None = None
    """Why the replica is not ready."""


class EngineStatus(BaseModel):
    backend: str
    device: str
    dtype: ComputeType | None = None
    """Compute type of sampling, and of training if the spec says `auto`. None: an older server."""
    tokens_per_s: float = 0.0
    warm: bool = False
    failures: int = 0
    hang: Hang | None = None
    """The most recent hang of an engine process; kept after it is over."""
    replicas: list[ReplicaStatus] = []
    """Status of each replica, for engines whose replicas crash and restart independently."""

    @property
    def computes(self) -> str:
        """Device and, if known, number type: `cpu in float32`."""
        return f"{self.device} in {self.dtype}" if self.dtype else self.device


class Failure(BaseModel):
    reason: str
    since: float


class WaitingFor(BaseModel):
    """What blocks a run: the oldest open episode of the groups that its next step needs."""

    task_id: str
    client_id: str | None = None
    """Client that plays the episode; None if nobody has claimed the task's free slots."""
    since: float
    """Unix time when the wait began."""


class ServerStatus(BaseModel):
    server_id: str
    revision: int
    """Grows with every change; pass it as `since` to wait for the next one."""
    phase: Phase
    failed: Failure | None = None
    storage_full: Failure | None = None
    """The newest write failed because storage is full. Until there is room the server grants, acknowledges and trains nothing;
    nothing is lost."""
    run_id: str | None = None
    """The run being served; None if there is none."""
    newest_run_id: str | None = None
    """The run that began last, even if it has stopped or failed; None before the first run."""

    @property
    def latest_run_id(self) -> str | None:
        """The run being served, else the one that began last. Older servers report only a run being served."""
        return self.run_id or self.newest_run_id

    step: int = 0
    weights_version: WeightsVersion | None = None
    model: str
    model_fingerprint: str | None = None
    pool: PoolStatus
    waiting_for: WaitingFor | None = None
    """What blocks the run; None if nothing does."""
    engine: EngineStatus
    limits: dict[str, float | int | None] = {}
    state_dir: str | None = None
    """The server's state directory, on its own machine. Agents may neither read nor write it."""

    @property
    def trouble(self) -> str | None:
        """Why the server is stuck; None if it is not."""
        hang = self.engine.hang
        # The hang is over, or only one replica hangs and the others continue.
        if hang is not None and (hang.over_at is not None or self.engine.warm):
            hang = None
        found = self.failed or self.storage_full or hang
        return None if found is None else found.reason


RunStatus = Literal["running", "complete", "stopped", "failed"]
"""complete: a limit of the spec was reached; its weights are still served and eval episodes still run."""


class ConfigChange(BaseModel):
    config_version: int
    at: float
    by: str
    patch: dict[str, Any]


class StepMetrics(BaseModel):
    """One optimiser step. `values` are the trainer's and the pool's metrics by name (docs/reference/metrics.md)."""

    step: int
    branch: int = 0
    at: float
    config_version: int
    values: dict[str, float]


class VersionReport(BaseModel):
    """The train episodes of one version of a client's code, in one family of tasks."""

    client_version: str
    mix: str | None
    first_at: float
    """Unix time of its first group."""
    episodes: int
    """Episodes that ended with a reward, trained or not."""
    reward_mean: float | None = None
    reward_std: float | None = None
    before: str | None = None
    """The version that had most recently ended episodes of this family when this one ended its first."""
    shift: float | None = None
    """Mean reward of this version's first episodes minus that of `before`'s last ones; at most 64 each."""
    shift_stderr: float | None = None
    quarantined: str | None = None
    """Why its episodes are no longer trained; None if they are."""


class CheckpointReport(BaseModel):
    """A checkpoint that is kept."""

    step: int
    held_out: float | None = None
    """Mean reward of eval episodes played with its weights; None if there are none."""
    held_out_episodes: int = 0
    best: bool = False
    """Whether it has the highest held-out reward; the best checkpoint is always kept."""


class RunReport(BaseModel):
    run_id: str
    branch: int
    spec: RunSpec
    status: RunStatus
    reason: str | None = None
    phase: Phase
    step: int
    config_version: int
    changes: list[ConfigChange]
    steps: list[StepMetrics]
    started_at: float
    ended_at: float | None = None
    versions: list[VersionReport] = []
    """Client versions, in the order of their first groups."""
    checkpoints: list[CheckpointReport] = []
    """The kept checkpoints, by step."""
    notes: list[str] = []
    """Warnings about an accepted spec, with what to do."""


class RunRequest(ClientModel):
    spec: RunSpec
    idempotency_key: IdempotencyKey = None


class RunCreated(BaseModel):
    run_id: str


class RestoreRequest(ClientModel):
    """Go back to a checkpoint of the run, on a new branch of it."""

    step: Annotated[int, Field(ge=0)]
    """Step of a kept checkpoint; 0 is the hosted model."""
    idempotency_key: IdempotencyKey = None


class QuarantineRequest(ClientModel):
    """Keep the episodes of one client version out of training, or let them in again."""

    client_version: str
    quarantined: bool = True
    reason: str = ""


class CheckpointRef(BaseModel):
    step: int
    path: str
