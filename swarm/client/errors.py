"""What a client may run into.

SwarmError
├── ServerUnreachable            nothing answers at the url, for as long as patience lasted
├── NotASwarmServer              something answers, but not in this protocol
├── EpisodeUnfinished            an episode's block was left without a reward
├── GraderFailed                 the agent is not to blame: its grader failed, or gave no number
│   └── NoReward                 a result that no episode can be ended with
├── TeamAborted                  the team was decided against, on every server
├── TeamUndecided                the decider cannot be reached; the servers settle it among themselves
├── RolloutsFailing              rollouts crash again and again; the last traceback is in the text
├── WorkflowFault                a workflow file or function cannot be used
└── Refusal(code, detail, fields)
    ├── TryLater(retry_after_s)  has been tried again until patience ran out
    │   ├── NotRolling · Draining · MixFull
    ├── OverLimit                the run is over
    │   └── TeamOver             that of a team's member: the team can never be had again
    ├── LeaseLost · ServerBusy · EngineFailed · StorageFull · ServerFault
    ├── Unauthorized · Forbidden · NotFound · InvalidSpec
    └── IdempotencyConflict · ConfigConflict

`cause` says who lost an attempt that such an error ended; None if the error does not say.
"""

from __future__ import annotations

from typing import Any

from swarm.protocol.episodes import Cause
from swarm.protocol.errors import ErrorCode, Refusal, SwarmError


class ServerUnreachable(SwarmError):
    """Nothing answers at the url."""

    cause = Cause.NETWORK

    def __init__(self, message: str, url: str = "") -> None:
        super().__init__(message)
        self.url = url


class NotASwarmServer(SwarmError):
    """The answer is none that this protocol knows."""

    cause = Cause.NETWORK


class EpisodeUnfinished(SwarmError):
    """The block of an episode was left without `end` or `abort`; the episode was aborted."""


class GraderFailed(SwarmError):
    """The grader raised an exception, gave no number, or ran out of time. A rollout raises it, or scores within `grading()`."""

    cause = Cause.GRADER


class NoReward(GraderFailed, ValueError):
    """What was handed in is no result: the reward is no finite number, say."""


class TeamAborted(SwarmError):
    """Nothing of the team counts, on any server."""


class TeamUndecided(SwarmError):
    """Whether the team counts is not known here. It does on all of its servers, or on none."""


class RolloutsFailing(SwarmError):
    """So many rollouts crashed in a row that the fault is not the episode's."""


class WorkflowFault(SwarmError):
    """A workflow cannot be loaded, or lacks `tasks` or `rollout`."""


class TryLater(Refusal):
    """The server cannot now, but will."""

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
    """This family of tasks is ahead of its share."""


class LeaseLost(Refusal):
    """The lease ran out or was superseded; claim a new episode."""


class OverLimit(Refusal):
    """The run has reached its limit, or the request is over one."""

    cause = Cause.SERVER


class TeamOver(OverLimit):
    """The run of a member is over, or none goes on there: no further team with it can be had. `run_tasks` stops at it."""


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


class InvalidSpec(Refusal):
    """A field is wrong; `fields["errors"]` names each."""

    cause = Cause.GRADER


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
    """The refusal of this code, as its own type; a plain one where this version does not know the code."""
    return _BY_CODE.get(code, Refusal)(code, detail, **fields)  # type: ignore[arg-type]
