"""Open calls, as the gateway sees them, and how an episode's calls affect its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from foundation.nearest import nearest
from foundation.strict import FieldError
from swarm.protocol.episodes import CallFailure, LedgerEntry, RecordedCall, WeightsVersion
from swarm.protocol.problem import invalid_spec
from swarm.protocol.runspec import RunSpec
from swarm.server.state.rows import EpisodeRow


def refuse_misspelt_agents(calls: Sequence[RecordedCall], rewards: Mapping[str, float] | None) -> None:
    """Refuse a reward for an unknown agent whose name resembles that of an agent with calls but without a reward.

    Other agents without calls may get a reward. Codes: invalid_spec.
    """
    called = {call.agent for call in calls if call.agent}
    for name in rewards or {}:
        meant = None if name in called else nearest(name, called - set(rewards or {}))
        if meant is not None:
            detail = f"agent {name!r} made no call in this episode, and there is no reward for {meant!r}: did you mean that agent?"
            fault = FieldError(field=f"agent_rewards.{name}", problem="no such agent made a call", nearest=meant)
            raise invalid_spec([fault], detail)


@dataclass(slots=True)
class Ending:
    """Signals that an episode ends or the server stops. `over` is set once that happens or is about to; `heard` holds the callbacks."""

    over: bool = False
    heard: set[Callable[[], object]] = field(default_factory=set)

    def come(self) -> None:
        if not self.over:
            self.over = True
            for hear in tuple(self.heard):
                hear()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """What the gateway needs to answer one LLM request. Each open call must be closed with `close_call`."""

    episode_id: str
    lease: str
    entry: LedgerEntry
    spec: RunSpec
    """The run's spec at the episode's config version."""
    weights_version: WeightsVersion
    """The weights that were served when the call opened. If they are updated during the call, its version spans show that."""
    earlier: tuple[RecordedCall, ...]
    """The calls of this episode recorded so far, in the order in which they closed."""
    index: int
    """0-based index of the call within its episode, in the order of opening."""
    seed: int
    """Sampling seed if the request does not set one. It depends only on run, task, group, slot and index."""
    opened_at: float
    """Unix time at which the call opened."""
    ending: Ending
    """The end of the episode."""
    attempts: list[CallAttempt]
    """Finished requests of the episode. The list grows while the episode is open."""


def count_tokens(row: EpisodeRow, calls: Sequence[RecordedCall]) -> None:
    """Write the totals of an episode's calls into its row."""
    row.calls = len(calls)
    row.prompt_tokens = sum(len(call.prompt_ids) for call in calls)
    row.sampled_tokens = sum(len(call.sampled_ids) for call in calls)
    row.restricted_tokens = sum(len(call.sampled_ids) for call in calls if call.sampling.restricted)
    spans = [span for call in calls for span in call.versions if span.end > span.start]
    row.oldest_step = min((span.version.step for span in spans), default=row.claimed_step)
    spanned = sum(span.end - span.start for span in spans)
    # Tokens that no span covers count as sampled by the weights served at the claim.
    row.step_tokens = sum((span.end - span.start) * span.version.step for span in spans)
    row.step_tokens += (row.sampled_tokens - spanned) * row.claimed_step


# -- calls that failed because of the server ---------------------------------------------------------------------------


Outcome = Literal["answered", "failed", "left"]


@dataclass(slots=True, kw_only=True)
class CallAttempt:
    """One request of an agent and its outcome. All attempts together show whether a later answer made up for a failure."""

    asked: str
    """Digest of dialect, agent and body: it is equal if the same request is sent again."""
    key: str | None = None
    """The request's Idempotency-Key header, if it has one."""
    is_retry: bool = False
    """Whether the SDK marks the request as a retry of a failed one."""
    began: int
    ended: int
    """Positions of the request's beginning and end among those of all requests."""
    outcome: Outcome
    """How the request ended. "left" means that its client went away, or its episode ended, while nothing seemed wrong."""
    left_at: float | None = None
    """Unix time at which its client gave up, if it may still turn out that the engine was hanging by then."""
    call_ids: frozenset[str] = frozenset()
    """Ids of its recorded calls, if `left_at` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCall:
    """A call that was recorded as abandoned by its client, but turned out to have failed because of the server."""

    episode_id: str
    call_ids: frozenset[str]
    failure: CallFailure
    attempt: CallAttempt
    attempts: list[CallAttempt]
    """All attempts of its episode, including this one."""


def is_tainted(attempts: Sequence[CallAttempt]) -> bool:
    """True if a call failed because of the server, and no later attempt at the same request was answered.

    A later request of the same agent with the same body replaces a failed one, and everything that the failed one had
    replaced. Once it is answered, the agent has its answer. An agent that sends the same body several times on purpose looks
    like one that retries; then only attempts that are marked as retries count, by their SDK's header or by the Idempotency-Key
    of the failed request.
    """
    failed = {attempt.asked for attempt in attempts if attempt.outcome == "failed"}
    return any(not _made_good([attempt for attempt in attempts if attempt.asked == asked]) for asked in failed)


def _made_good(attempts: Sequence[CallAttempt]) -> bool:
    """True if each failure was made good by a later answered attempt, one answer per failure. A failed retry replaces the failure
    before it."""
    waiting: list[CallAttempt] = []  # the newest attempt at each unanswered request
    unmarked = unrelated = 0
    for attempt in sorted(attempts, key=lambda one: one.began):
        before = [one for one in waiting if one.ended < attempt.began]
        marked = [one for one in before if attempt.is_retry or (one.key is not None and one.key == attempt.key)]
        repeated = next(iter(marked or before), None)
        if repeated is not None:
            waiting.remove(repeated)
        if attempt.outcome != "answered":
            if repeated is not None or attempt.outcome == "failed":
                waiting.append(attempt)
        elif repeated is None:
            unrelated += 1
        elif not marked:
            unmarked += 1
    return not waiting and not (unmarked and unrelated)


def suspicion(attempts: Sequence[CallAttempt]) -> dict[str, Any] | None:
    """Return a record of an ended episode's requests if one of them may still turn out to have failed because of us, else None.

    Its `at` is the last Unix time at which a client gave up.
    """
    left = [attempt.left_at for attempt in attempts if attempt.outcome == "left" and attempt.left_at is not None]
    if not left:
        return None
    return {"at": max(left), "attempts": [{**asdict(one), "call_ids": sorted(one.call_ids)} for one in attempts]}


def attempts_of(suspected: Mapping[str, Any]) -> list[CallAttempt]:
    """Return the requests that `suspicion` recorded."""
    return [CallAttempt(**{**one, "call_ids": frozenset(one["call_ids"])}) for one in suspected["attempts"]]


def with_failure(calls: Sequence[RecordedCall], call_ids: frozenset[str], failure: CallFailure) -> list[RecordedCall]:
    """Return the calls, with the failure set on those whose ids are in `call_ids`."""
    mark = {"failure": failure, "complete": False}
    return [call.model_copy(update=mark) if call.call_id in call_ids else call for call in calls]


def nothing_answered(calls: Sequence[RecordedCall]) -> bool:
    """True if every call failed. Then there is nothing to train on, whatever the client reports."""
    return all(call.failure is not None for call in calls)


def why_tainted(calls: Sequence[RecordedCall]) -> str:
    """Describe the first failed call, for the ledger."""
    for call in calls:
        if call.failure is not None:
            words = f": {call.failure.detail}" if call.failure.detail else ""
            return f"call {call.index} failed on the server's side ({call.failure.reason}{words})"
    return "a call failed on the server's side"
