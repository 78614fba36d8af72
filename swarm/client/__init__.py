"""The client library: claim an episode, run any agent against it, report a reward. Needs httpx, pydantic and anyio.

Start with `SwarmClient`. `swarm.client.sync` has a blocking version for plain scripts.
"""

from foundation.programs import ProgramEnd
from swarm.client.agent import run_agent, run_confined
from swarm.client.client import SwarmClient
from swarm.client.episode import Episode
from swarm.client.errors import (
    AgentFailed,
    AgentTooSlow,
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
from swarm.client.losses import grading
from swarm.client.own_algorithms import SourceFault, with_sources
from swarm.client.rollouts import RolloutReport
from swarm.client.tasks import Outcome, Rollout, Task, TaskStream
from swarm.client.team import Partner, Team, team
from swarm.client.wire import Patience
from swarm.protocol.episodes import Cause
from swarm.protocol.errors import ErrorCode, Refusal, SwarmError
from swarm.protocol.runspec import RunSpec

__all__ = [
    "AgentFailed",
    "AgentTooSlow",
    "Cause",
    "ConfigConflict",
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
    "ProgramEnd",
    "Refusal",
    "Rollout",
    "RolloutReport",
    "RolloutsFailing",
    "RunSpec",
    "ServerBusy",
    "ServerFault",
    "ServerUnreachable",
    "SourceFault",
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
    "run_agent",
    "run_confined",
    "team",
    "with_sources",
]
