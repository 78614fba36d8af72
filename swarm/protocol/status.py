"""Messages about the state of a server and its runs."""

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
    """The state of one family of tasks."""

    running: int = 0
    ended: int = 0
    """Number of ended episodes that wait for a step, in open or ready groups."""
    trained_groups: int = 0
    """Number of groups that have been part of optimizer steps. Steps undone by a restore do not count."""
    debt: float = 0.0
    """Number of groups that the family is behind its share; negative if ahead. Between -1 and 1 unless a family's patience ran out."""
    passed: bool = False
    """True if the family's `patience_s` ran out, so that steps proceed without it until its next group is ready."""


class PoolStatus(BaseModel):
    running: int = 0
    prepared: int = 0
    """Number of episodes bound to a team's decision."""
    ended: int = 0
    groups_open: int = 0
    groups_ready: int = 0
    groups_needed: int = 0
    by_mix: dict[str, MixStatus] = {}


class Hang(BaseModel):
    """An engine process that did not respond in time. It is ended and restarted, and the current step runs again."""

    reason: str
    """Which process hung, on which request, and for how long."""
    phase: Phase
    """The server's phase when the hang was detected."""
    since: float
    """Unix time at which the process last showed a sign of life."""
    found_at: float
    over_at: float | None = None
    """Unix time at which the engine was ready again; None until then."""


class ReplicaStatus(BaseModel):
    """One of the processes that sample. While it is down, the others handle its calls."""

    device: str
    ready: bool
    failed_for_good: bool = False
    """True if the replica crashed too often and stays down until the server restarts."""
    failures: int = 0
    """Number of consecutive crashes."""
    reason: str | None = None
    """Why the replica is not ready."""


class EngineStatus(BaseModel):
    backend: str
    device: str
    dtype: ComputeType | None = None
    """Compute type of sampling, and of training if the spec says `auto`. None if the server is older and does not report it."""
    tokens_per_s: float = 0.0
    warm: bool = False
    failures: int = 0
    hang: Hang | None = None
    """The most recent hang of an engine process, even if it is over."""
    replicas: list[ReplicaStatus] = []
    """Status of each replica, for engines whose replicas crash and restart independently."""

    @property
    def computes(self) -> str:
        """The device and, if known, the compute type, for example `cpu in float32`."""
        return f"{self.device} in {self.dtype}" if self.dtype else self.device


class Failure(BaseModel):
    reason: str
    since: float


class WaitingFor(BaseModel):
    """What a run is waiting for: the oldest open episode in the groups that its next step needs."""

    task_id: str
    client_id: str | None = None
    """Client that plays the episode. None if nobody has claimed the task's free slots."""
    since: float
    """Unix time at which the wait began."""


class ServerStatus(BaseModel):
    server_id: str
    revision: int
    """Increases with every change. Pass it as `since` to wait for the next change."""
    phase: Phase
    failed: Failure | None = None
    storage_full: Failure | None = None
    """Set if the last write failed because storage is full. Until there is space, the server grants, acknowledges and trains nothing,
    but loses nothing either."""
    run_id: str | None = None
    """The run being served; None if there is none."""
    newest_run_id: str | None = None
    """The run that was started last, even if it has stopped or failed; None before the first run."""

    @property
    def latest_run_id(self) -> str | None:
        """The run being served, or else the one started last. Older servers report only the former."""
        return self.run_id or self.newest_run_id

    step: int = 0
    weights_version: WeightsVersion | None = None
    model: str
    model_fingerprint: str | None = None
    pool: PoolStatus
    waiting_for: WaitingFor | None = None
    """What the run is waiting for; None if it is not waiting."""
    engine: EngineStatus
    limits: dict[str, float | int | None] = {}
    state_dir: str | None = None
    """The server's state directory, on its own machine. Agents may neither read nor write it."""

    @property
    def trouble(self) -> str | None:
        """Why the server is stuck, or None if it is not."""
        hang = self.engine.hang
        # Ignore a hang that is over, or that affects only one replica while the others continue.
        if hang is not None and (hang.over_at is not None or self.engine.warm):
            hang = None
        found = self.failed or self.storage_full or hang
        return None if found is None else found.reason


RunStatus = Literal["running", "complete", "stopped", "failed"]
"""complete: the run has reached a limit in its spec; its weights are still served and evaluation episodes can still be played."""


class ConfigChange(BaseModel):
    config_version: int
    at: float
    by: str
    patch: dict[str, Any]


class StepMetrics(BaseModel):
    """One optimizer step. `values` holds the metrics of the trainer and the sample pool by name (docs/reference/metrics.md)."""

    step: int
    branch: int = 0
    at: float
    config_version: int
    values: dict[str, float]


class VersionReport(BaseModel):
    """Statistics on the training episodes of one version of a client's code, in one family of tasks."""

    client_version: str
    mix: str | None
    first_at: float
    """Unix time of this version's first group."""
    episodes: int
    """Number of episodes that ended with a reward, whether they were trained on or not."""
    reward_mean: float | None = None
    reward_std: float | None = None
    before: str | None = None
    """The version that most recently ended episodes of this family before this version ended its first one."""
    shift: float | None = None
    """Mean reward of this version's first episodes minus that of the last episodes of `before`; at most 64 episodes each."""
    shift_stderr: float | None = None
    quarantined: str | None = None
    """Why this version's episodes are excluded from training; None if they are not."""


class CheckpointReport(BaseModel):
    """A checkpoint that still exists."""

    step: int
    held_out: float | None = None
    """Mean reward of evaluation episodes played with these weights; None if there are none."""
    held_out_episodes: int = 0
    best: bool = False
    """Whether this checkpoint has the highest held-out reward. The best checkpoint is always kept."""


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
    """Statistics by client version, in the order of their first groups."""
    checkpoints: list[CheckpointReport] = []
    """The existing checkpoints, ordered by step."""
    notes: list[str] = []
    """Warnings about the accepted spec that say what to do."""


class RunRequest(ClientModel):
    spec: RunSpec
    idempotency_key: IdempotencyKey = None


class RunCreated(BaseModel):
    run_id: str


class RestoreRequest(ClientModel):
    """Asks to restore a checkpoint of the run, on a new branch of the run."""

    step: Annotated[int, Field(ge=0)]
    """Step of an existing checkpoint; 0 is the original model."""
    idempotency_key: IdempotencyKey = None


class QuarantineRequest(ClientModel):
    """Asks to exclude the episodes of one client version from training, or to admit them again."""

    client_version: str
    quarantined: bool = True
    reason: str = ""


class CheckpointRef(BaseModel):
    step: int
    path: str
