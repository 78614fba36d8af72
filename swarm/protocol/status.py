"""How a server and its run are doing."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from foundation.strict import StrictModel
from swarm.protocol.episodes import IdempotencyKey, WeightsVersion
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
    """Episodes that wait for a step, in groups that are open or ready."""
    trained_groups: int = 0
    """Groups that entered optimiser steps, in the history that stands."""
    debt: float = 0.0
    """Groups by which it is behind its share (below 0: ahead). Within 1 of 0 while nobody's patience ran out."""
    passed: bool = False
    """Its `patience_s` ran out: steps are made without it until its next group is ready."""


class PoolStatus(BaseModel):
    running: int = 0
    prepared: int = 0
    """Bound to the decision of a team."""
    ended: int = 0
    groups_open: int = 0
    groups_ready: int = 0
    groups_needed: int = 0
    by_mix: dict[str, MixStatus] = {}


class Hang(BaseModel):
    """A process of the engine did not answer within its limit. It is ended and restarted, and the step under way runs again."""

    reason: str
    """Which process, what it was asked, and for how long."""
    phase: Phase
    """The server's phase when it was found."""
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
    """It crashed too often, and stays away until the server is started again."""
    failures: int = 0
    """Crashes in a row."""
    reason: str | None = None
    """Why it is not ready."""


class EngineStatus(BaseModel):
    backend: str
    device: str
    dtype: ComputeType | None = None
    """What is sampled in, and what a run is trained in whose spec leaves it open. None: an older server."""
    tokens_per_s: float = 0.0
    warm: bool = False
    failures: int = 0
    hang: Hang | None = None
    """The most recent hang of an engine process; kept after it is over."""
    replicas: list[ReplicaStatus] = []
    """Of an engine whose replicas crash and come back one by one."""

    @property
    def computes(self) -> str:
        """On what, and in which number type where that is known: `cpu in float32`."""
        return f"{self.device} in {self.dtype}" if self.dtype else self.device


class Failure(BaseModel):
    reason: str
    since: float


class WaitingFor(BaseModel):
    """What blocks a run: the oldest open episode of the groups that its next step needs."""

    task_id: str
    client_id: str | None = None
    """Who plays it; None if nobody has claimed the task's free slots."""
    since: float
    """Unix time when the wait began."""


class ServerStatus(BaseModel):
    server_id: str
    revision: int
    """Grows with every change; pass it as `since` to wait for the next one."""
    phase: Phase
    failed: Failure | None = None
    storage_full: Failure | None = None
    """The newest write found no room. Until there is room nothing is granted, acknowledged or trained, and nothing is lost."""
    run_id: str | None = None
    """The run that is served; None when none is."""
    newest_run_id: str | None = None
    """The run that began last, also when it was stopped or has failed and is not served any more; None before the first."""

    @property
    def latest_run_id(self) -> str | None:
        """The run that is served, else the one that began last. A server of an earlier version names only the first."""
        return self.run_id or self.newest_run_id

    step: int = 0
    weights_version: WeightsVersion | None = None
    model: str
    model_fingerprint: str | None = None
    pool: PoolStatus
    waiting_for: WaitingFor | None = None
    """Set while the run is blocked by it."""
    engine: EngineStatus
    limits: dict[str, float | int | None] = {}
    state_dir: str | None = None
    """Where the server keeps its state, on its own machine. Agents may neither read nor write it."""

    @property
    def trouble(self) -> str | None:
        """Why the server is stuck; None if it is not."""
        hang = self.engine.hang
        if hang is not None and (hang.over_at is not None or self.engine.warm):  # of one replica: the others go on
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
    """The version that ended episodes of this family last, when this one ended its first."""
    shift: float | None = None
    """Mean reward of the first episodes of this version less that of the last ones of `before`, at most 64 each."""
    shift_stderr: float | None = None
    quarantined: str | None = None
    """Why its episodes are no longer trained; None if they are."""


class CheckpointReport(BaseModel):
    """A checkpoint that is kept."""

    step: int
    held_out: float | None = None
    """Mean reward of the eval episodes played with its weights; None if there were none."""
    held_out_episodes: int = 0
    best: bool = False
    """The one with the highest held-out reward: kept whatever comes after it."""


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
    """In the order of their first groups."""
    checkpoints: list[CheckpointReport] = []
    """Those that are kept, by step."""
    notes: list[str] = []
    """Warnings about an accepted spec, with what to do."""


class RunRequest(StrictModel):
    spec: RunSpec
    idempotency_key: IdempotencyKey = None


class RunCreated(BaseModel):
    run_id: str


class RestoreRequest(StrictModel):
    """Go back to a checkpoint of the run, on a new branch of it."""

    step: Annotated[int, Field(ge=0)]
    """Of a checkpoint that is kept; 0 is the hosted model."""
    idempotency_key: IdempotencyKey = None


class QuarantineRequest(StrictModel):
    """Keep the episodes of one client version out of training, or let them in again."""

    client_version: str
    quarantined: bool = True
    reason: str = ""


class CheckpointRef(BaseModel):
    step: int
    path: str
