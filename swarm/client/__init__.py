"""The client library: claim an episode, run any agent against it, report a reward. httpx and pydantic alone.

Start at `SwarmClient`; `swarm.client.sync` has its twin for plain scripts.
"""

from swarm.client.causes import grading
from swarm.client.client import SwarmClient
from swarm.client.crew import CrewReport
from swarm.client.episode import Episode
from swarm.client.errors import (
    ConfigConflict,
    Draining,
    EngineFailed,
    EpisodeUnfinished,
    Forbidden,
    GraderFailed,
    IdempotencyConflict,
    InvalidSpec,
    LeaseLost,
    MixFull,
    NotASwarmServer,
    NotFound,
    NotRolling,
    OverLimit,
    RolloutsFailing,
    ServerBusy,
    ServerFault,
    ServerUnreachable,
    StorageFull,
    TeamAborted,
    TeamOver,
    TeamUndecided,
    TryLater,
    Unauthorized,
    WorkflowFault,
)
from swarm.client.partners import Partner
from swarm.client.tasks import Outcome, Rollout, Task, TaskStream
from swarm.client.team import Team, team
from swarm.client.wire import Patience
from swarm.protocol.episodes import Cause
from swarm.protocol.errors import ErrorCode, Refusal, SwarmError
from swarm.protocol.runspec import RunSpec

__all__ = [
    "Cause",
    "ConfigConflict",
    "CrewReport",
    "Draining",
    "EngineFailed",
    "Episode",
    "EpisodeUnfinished",
    "ErrorCode",
    "Forbidden",
    "GraderFailed",
    "IdempotencyConflict",
    "InvalidSpec",
    "LeaseLost",
    "MixFull",
    "NotASwarmServer",
    "NotFound",
    "NotRolling",
    "Outcome",
    "OverLimit",
    "Partner",
    "Patience",
    "Refusal",
    "Rollout",
    "RolloutsFailing",
    "RunSpec",
    "ServerBusy",
    "ServerFault",
    "ServerUnreachable",
    "StorageFull",
    "SwarmClient",
    "SwarmError",
    "Task",
    "TaskStream",
    "Team",
    "TeamAborted",
    "TeamOver",
    "TeamUndecided",
    "TryLater",
    "Unauthorized",
    "WorkflowFault",
    "grading",
    "team",
]
