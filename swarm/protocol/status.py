"""How a server and its run are doing."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel

from foundation.strict import StrictModel
from swarm.protocol.episodes import WeightsVersion
from swarm.protocol.runspec import RunSpec


class Phase(StrEnum):
    IDLE = "idle"
    BOOTING = "booting"
    ROLLING = "rolling"
    DRAINING = "draining"
    UPDATING = "updating"
    STOPPING = "stopping"
    FAILED = "failed"


class MixStatus(BaseModel):
    running: int = 0
    ended: int = 0
    trained_groups: int = 0
    debt: float = 0.0


class PoolStatus(BaseModel):
    running: int = 0
    prepared: int = 0
    """Bound to the decision of a team."""
    ended: int = 0
    groups_open: int = 0
    groups_ready: int = 0
    groups_needed: int = 0
    by_mix: dict[str, MixStatus] = {}


class EngineStatus(BaseModel):
    backend: str
    device: str
    tokens_per_s: float = 0.0
    warm: bool = False
    failures: int = 0


class Failure(BaseModel):
    reason: str
    since: float


class ServerStatus(BaseModel):
    server_id: str
    revision: int
    """Rises with every change; pass it as `since` to wait for the next one."""
    phase: Phase
    failed: Failure | None = None
    run_id: str | None = None
    step: int = 0
    weights_version: WeightsVersion | None = None
    model: str
    model_fingerprint: str | None = None
    pool: PoolStatus
    engine: EngineStatus
    limits: dict[str, float | int | None] = {}


RunStatus = Literal["running", "complete", "stopped", "failed"]
"""complete: a limit of the spec was reached; its weights are still served and eval episodes still run."""


class ConfigChange(BaseModel):
    config_version: int
    at: float
    by: str
    patch: dict[str, Any]


class StepMetrics(BaseModel):
    """One optimiser step. `values` are the trainer's and the pool's metrics by name (docs/metrics.md)."""

    step: int
    at: float
    config_version: int
    values: dict[str, float]


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


class RunRequest(StrictModel):
    spec: RunSpec
    idempotency_key: str | None = None


class RunCreated(BaseModel):
    run_id: str


class CheckpointRef(BaseModel):
    step: int
    path: str
