"""The errors that a client raises.

SwarmError
├── ServerUnreachable            nothing answered at the URL before patience ran out
├── NotASwarmServer              something answered, but not in this protocol
├── EpisodeUnfinished            an episode's block ended without a reward
├── GraderFailed                 the grader failed or returned no number; the agent is not to blame
│   └── NoReward                 the result of an episode is invalid
├── AgentFailed                  a black-box agent ended with an error
│   └── AgentTooSlow             the agent exceeded its time limit
├── TeamAborted                  the team was aborted on every server
├── TeamUndecided                the decider cannot be reached; the servers settle the team among themselves
├── RolloutsFailing              rollouts keep crashing; the message quotes the last error
├── WorkflowFault                a workflow file or function cannot be used
└── Refusal(code, detail, fields)
    ├── TryLater(retry_after_s)  the client retried until patience ran out
    │   ├── NotRolling · Draining · MixFull
    ├── OverLimit                the run is over
    │   └── TeamOver             the run of a team member is over, so the team cannot go on
    ├── LeaseLost · ServerBusy · EngineFailed · StorageFull · ServerFault
    ├── Unauthorized · Forbidden · NotFound · InvalidSpec
    └── IdempotencyConflict · ConfigConflict

An error's `cause` says who is to blame for an attempt that ended with it; None if the error does not tell.
"""

from __future__ import annotations

from typing import Any

from swarm.protocol.episodes import Cause
from swarm.protocol.errors import ErrorCode, Refusal, SwarmError
from swarm.protocol.errors import InvalidSpec as InvalidSpec


class ServerUnreachable(SwarmError):
    """Nothing answers at the URL."""

    cause = Cause.NETWORK

    def __init__(self, message: str, url: str = "") -> None:
        super().__init__(message)
        self.url = url


class NotASwarmServer(SwarmError):
    """The response does not follow this protocol."""

    cause = Cause.NETWORK


class EpisodeUnfinished(SwarmError):
    """The block of an episode exited without `end` or `abort`, so the episode was aborted."""


class GraderFailed(SwarmError):
    """The grader raised an exception, returned no number or timed out. Raise it from a rollout, or let `grading()` do so."""

    cause = Cause.GRADER


class NoReward(GraderFailed, ValueError):
    """The result is invalid; for example, its reward is not a finite number."""


class AgentFailed(SwarmError):
    """A black-box agent ended with an error."""

    cause = Cause.ROLLOUT


class AgentTooSlow(AgentFailed):
    """A black-box agent exceeded its time limit."""

    cause = Cause.LIMIT


class TeamAborted(SwarmError):
    """No episode of the team counts, on any server."""


class TeamUndecided(SwarmError):
    """This client does not know whether the team counts. It counts on all of its servers or on none."""


class RolloutsFailing(SwarmError):
    """Too many rollouts in a row crashed, so the rollout function itself must be broken."""


class WorkflowFault(SwarmError):
    """A workflow or program cannot be used; for example, the workflow lacks `tasks` or `rollout`."""


class TryLater(Refusal):
    """The server cannot handle the request now, but will be able to later."""

    cause = Cause.SERVER

    @property
    def retry_after_s(self) -> float:
        value = self.fields.get("retry_after_s")
        return float(value) if isinstance(value, int | float) else 0.0


class NotRolling(TryLater):
    """The server is booting, updating or idle."""


class Draining(TryLater):
    """The server starts no new training groups for now."""


class MixFull(TryLater):
    """This family of tasks is ahead of its share of the mix."""


class LeaseLost(Refusal):
    """The lease ran out or was superseded; claim a new episode."""


class OverLimit(Refusal):
    """The run has reached its limit, or the request exceeds one."""

    cause = Cause.SERVER


class TeamOver(OverLimit):
    """The run of a team member is over, so it can join no more teams. `run_tasks` stops."""


class ServerBusy(Refusal):
    """The server is busy with another run."""


class EngineFailed(Refusal):
    """The engine has failed for good; look at the server's log."""

    cause = Cause.SERVER


class StorageFull(Refusal):
    """The server's disk is full; nothing was stored."""

    cause = Cause.SERVER


class ServerFault(Refusal):
    """The server failed on this request only; look at its log."""

    cause = Cause.SERVER


class Unauthorized(Refusal):
    """The token is missing or wrong."""


class Forbidden(Refusal):
    """The token does not allow this."""


class NotFound(Refusal):
    """This server has no such run or episode."""


class IdempotencyConflict(Refusal):
    """The same idempotency key was used with a different request body."""


class ConfigConflict(Refusal):
    """Someone else changed the config in the meantime."""


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
    """Return the error class for this code, or a plain `Refusal` if this version does not know the code."""
    return _BY_CODE.get(code, Refusal)(code, detail, **fields)  # type: ignore[arg-type]
