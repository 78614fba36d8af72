"""The errors that a client raises.

SwarmError
├── ServerUnreachable            nothing answers at the url until patience runs out
├── NotASwarmServer              something answers, but not with this protocol
├── EpisodeUnfinished            an episode's block ended without a reward
├── GraderFailed                 the grader failed or gave no number; the agent is not to blame
│   └── NoReward                 no episode can end with this result
├── AgentFailed                  a black-box agent ended with an error
│   └── AgentTooSlow             it ran longer than it may
├── TeamAborted                  the team was aborted on every server
├── TeamUndecided                the decider cannot be reached; the servers settle it themselves
├── RolloutsFailing              rollouts keep crashing; the text has the last traceback
├── WorkflowFault                a workflow file or function cannot be used
└── Refusal(code, detail, fields)
    ├── TryLater(retry_after_s)  retried until patience ran out
    │   ├── NotRolling · Draining · MixFull
    ├── OverLimit                the run is over
    │   └── TeamOver             the run of a team's member is over: the team cannot go on
    ├── LeaseLost · ServerBusy · EngineFailed · StorageFull · ServerFault
    ├── Unauthorized · Forbidden · NotFound · InvalidSpec
    └── IdempotencyConflict · ConfigConflict

`cause` says who lost an attempt that ended with the error; None if the error does not tell.
"""

from __future__ import annotations

from typing import Any

from swarm.protocol.episodes import Cause
from swarm.protocol.errors import ErrorCode, Refusal, SwarmError
from swarm.protocol.errors import InvalidSpec as InvalidSpec


class ServerUnreachable(SwarmError):
    """Nothing answers at the url."""

    cause = Cause.NETWORK

    def __init__(self, message: str, url: str = "") -> None:
        super().__init__(message)
        self.url = url


class NotASwarmServer(SwarmError):
    """The answer does not belong to this protocol."""

    cause = Cause.NETWORK


class EpisodeUnfinished(SwarmError):
    """The block of an episode ended without `end` or `abort`; the episode was aborted."""


class GraderFailed(SwarmError):
    """The grader raised an exception, gave no number or timed out. A rollout raises it, or lets `grading()` do so."""

    cause = Cause.GRADER


class NoReward(GraderFailed, ValueError):
    """The result is not valid: for example, its reward is not a finite number."""


class AgentFailed(SwarmError):
    """A black-box agent ended with an error."""

    cause = Cause.ROLLOUT


class AgentTooSlow(AgentFailed):
    """A black-box agent ran longer than it may."""

    cause = Cause.LIMIT


class TeamAborted(SwarmError):
    """No episode of the team counts, on any server."""


class TeamUndecided(SwarmError):
    """This client does not know whether the team counts. It counts on all of its servers or on none."""


class RolloutsFailing(SwarmError):
    """Too many rollouts crashed in a row: the rollout itself must be broken."""


class WorkflowFault(SwarmError):
    """A workflow cannot be loaded, or lacks `tasks` or `rollout`."""


class TryLater(Refusal):
    """The server cannot do it now, but will be able to."""

    cause = Cause.SERVER

    @property
    def retry_after_s(self) -> float:
        value = self.fields.get("retry_after_s")
        return float(value) if isinstance(value, int | float) else 0.0


class NotRolling(TryLater):
    """The server is booting, updating or idle."""


class Draining(TryLater):
    """No new train groups for now."""


class MixFull(TryLater):
    """This family of tasks is ahead of its share of the mix."""


class LeaseLost(Refusal):
    """The lease ran out or was superseded; claim a new episode."""


class OverLimit(Refusal):
    """The run has reached its limit, or the request is over one."""

    cause = Cause.SERVER


class TeamOver(OverLimit):
    """The run of a member is over: no further team with it is possible. `run_tasks` stops."""


class ServerBusy(Refusal):
    """Another run holds the server."""


class EngineFailed(Refusal):
    """The engine has failed for good; look at the server's log."""

    cause = Cause.SERVER


class StorageFull(Refusal):
    """The server's disk is full; nothing was stored."""

    cause = Cause.SERVER


class ServerFault(Refusal):
    """The server failed on this request alone; look at its log."""

    cause = Cause.SERVER


class Unauthorized(Refusal):
    """The token is missing or wrong."""


class Forbidden(Refusal):
    """The token does not allow this."""


class NotFound(Refusal):
    """There is no such run or episode on this server."""


class IdempotencyConflict(Refusal):
    """The same key was used with another body."""


class ConfigConflict(Refusal):
    """The config was changed by someone else meanwhile."""


_BY_CODE: dict[ErrorCode, type[Refusal]] = {
    ErrorCode.UNAUTHORIZED: Unauthorized,
    ErrorCode.FORBIDDEN: Forbidden,
    ErrorCode.NOT_FOUND: NotFound,
    ErrorCode.INVALID_SPEC: InvalidSpec,
    ErrorCode.SERVER_BUSY: ServerBusy,
    ErrorCode.NOT_ROLLING: NotRolling,
    ErrorCode.DRAINING: Draining,
    ErrorCode.MIX_FULL: MixFull,
    ErrorCode.LEASE_LOST: LeaseLost,
    ErrorCode.IDEMPOTENCY_CONFLICT: IdempotencyConflict,
    ErrorCode.CONFIG_CONFLICT: ConfigConflict,
    ErrorCode.OVER_LIMIT: OverLimit,
    ErrorCode.ENGINE_FAILED: EngineFailed,
    ErrorCode.STORAGE_FULL: StorageFull,
    ErrorCode.SERVER_FAULT: ServerFault,
}


def refusal(code: ErrorCode | str, detail: str, fields: dict[str, Any]) -> Refusal:
    """The refusal of this code as its own type; a plain `Refusal` if this version does not know the code."""
    return _BY_CODE.get(code, Refusal)(code, detail, **fields)  # type: ignore[arg-type]
