"""A call between its opening and its close, as the gateway holds it, and what an episode's calls say of its result."""

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
    """An agent that was not called this time may be rewarded all the same; a name that only resembles one that was is refused.

    Codes: invalid_spec.
    """
    called = {call.agent for call in calls if call.agent}
    for name in rewards or {}:
        meant = None if name in called else nearest(name, called - set(rewards or {}))
        if meant is not None:
            detail = f"no call of agent {name!r} in this episode, and no reward for {meant!r}: did you mean that one?"
            fault = FieldError(field=f"agent_rewards.{name}", problem="no such agent was called", nearest=meant)
            raise invalid_spec([fault], detail)


@dataclass(slots=True)
class Ending:
    """Whether an episode, or the server's work, is over or about to end. heard: called once it is."""

    over: bool = False
    heard: set[Callable[[], object]] = field(default_factory=set)

    def come(self) -> None:
        if not self.over:
            self.over = True
            for hear in tuple(self.heard):
                hear()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """What the gateway needs to answer one LLM request. Hand it back to `close_call`, whatever happened."""

    episode_id: str
    lease: str
    entry: LedgerEntry
    spec: RunSpec
    """At the episode's config version."""
    weights_version: WeightsVersion
    """What is served now. An update may fall into the call; its spans then say so."""
    earlier: tuple[RecordedCall, ...]
    """Calls of this episode that are recorded so far, in the order they closed."""
    index: int
    """0-based, in the order of opening."""
    seed: int
    """For the sampler, where the request states none: depends on run, task, group, slot and index alone."""
    opened_at: float
    """Unix time."""
    ending: Ending
    """Of the episode."""
    attempts: list[CallAttempt]
    """Requests of the episode that are over. Grows while it is open."""


def count_tokens(row: EpisodeRow, calls: Sequence[RecordedCall]) -> None:
    """Write into the row what its calls add up to."""
    row.calls = len(calls)
    row.prompt_tokens = sum(len(call.prompt_ids) for call in calls)
    row.sampled_tokens = sum(len(call.sampled_ids) for call in calls)
    row.restricted_tokens = sum(len(call.sampled_ids) for call in calls if call.sampling.restricted)
    spans = [span for call in calls for span in call.versions if span.end > span.start]
    row.oldest_step = min((span.version.step for span in spans), default=row.claimed_step)
    spanned = sum(span.end - span.start for span in spans)
    # Tokens that no span covers count as sampled by what was served at the claim.
    row.step_tokens = sum((span.end - span.start) * span.version.step for span in spans)
    row.step_tokens += (row.sampled_tokens - spanned) * row.claimed_step


# -- calls that failed on the server's side ---------------------------------------------------------------------------


Outcome = Literal["answered", "failed", "left"]


@dataclass(slots=True, kw_only=True)
class CallAttempt:
    """One request of an agent and how it went: what tells whether a failure was made good."""

    asked: str
    """Digest of dialect, agent and body: equal for the same request again."""
    key: str | None = None
    """Its Idempotency-Key."""
    is_retry: bool = False
    """Its SDK says that it repeats a request that failed."""
    began: int
    ended: int
    """Positions in the order of all beginnings and ends of requests."""
    outcome: Outcome
    """left: its client went away, or its episode ended, while nothing was wrong."""
    left_at: float | None = None
    """Unix time at which its client gave up on it, where the engine may yet be found to have hung by then."""
    call_ids: frozenset[str] = frozenset()
    """Its records, where `left_at` is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCall:
    """A call that was recorded as broken off by its client, and is found to have failed on the server's side."""

    episode_id: str
    call_ids: frozenset[str]
    failure: CallFailure
    attempt: CallAttempt
    attempts: list[CallAttempt]
    """All of its episode, this one included."""


def is_tainted(attempts: Sequence[CallAttempt]) -> bool:
    """Whether a call failed on the server's side and the same request was not answered later.

    A later request with the same body, of the same agent, takes the place of one that failed, and of those that this one took
    the place of. Once it is answered the agent has what it asked for. An agent that sends one body several times on purpose
    cannot be told from one that tries again: there only an attempt that is marked as a retry (by its SDK's header, or by the
    Idempotency-Key of the one that failed) counts.
    """
    failed = {attempt.asked for attempt in attempts if attempt.outcome == "failed"}
    return any(not _made_good([attempt for attempt in attempts if attempt.asked == asked]) for asked in failed)


def _made_good(attempts: Sequence[CallAttempt]) -> bool:
    """Whether every failure among attempts at one request was followed by an answer of its own."""
    waiting: list[CallAttempt] = []  # the newest attempt of each that has no answer yet
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
    """What is kept of the requests of an episode that is over, while one may yet be found to have failed; None where none may.

    at: Unix time at which a client gave up last.
    """
    left = [attempt.left_at for attempt in attempts if attempt.outcome == "left" and attempt.left_at is not None]
    if not left:
        return None
    return {"at": max(left), "attempts": [{**asdict(one), "call_ids": sorted(one.call_ids)} for one in attempts]}


def attempts_of(suspected: Mapping[str, Any]) -> list[CallAttempt]:
    """The requests that `suspicion` kept."""
    return [CallAttempt(**{**one, "call_ids": frozenset(one["call_ids"])}) for one in suspected["attempts"]]


def with_failure(calls: Sequence[RecordedCall], call_ids: frozenset[str], failure: CallFailure) -> list[RecordedCall]:
    """The same calls, those of these ids marked as failed."""
    mark = {"failure": failure, "complete": False}
    return [call.model_copy(update=mark) if call.call_id in call_ids else call for call in calls]


def nothing_answered(calls: Sequence[RecordedCall]) -> bool:
    """Whether every call failed: then there is nothing to train, whatever its client says."""
    return all(call.failure is not None for call in calls)


def why_tainted(calls: Sequence[RecordedCall]) -> str:
    """For the ledger: the first call that failed."""
    for call in calls:
        if call.failure is not None:
            words = f": {call.failure.detail}" if call.failure.detail else ""
            return f"call {call.index} failed on the server's side ({call.failure.reason}{words})"
    return "a call failed on the server's side"
