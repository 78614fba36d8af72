"""Open episodes: their calls, and how they end."""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Sequence
from typing import Any

import orjson

from foundation import strict_json
from foundation.ids import derived_seed
from foundation.strict import FieldError
from swarm.protocol.episodes import (
    CallFailure,
    Cause,
    DropReason,
    EpisodeReceipt,
    EpisodeResult,
    EpisodeState,
    LedgerEntry,
    RecordedCall,
    SessionRequest,
    WeightsVersion,
)
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.problem import invalid_spec
from swarm.server.state.call_codec import Unwritable, encode
from swarm.server.state.calls import (
    CallAttempt,
    Ending,
    FailedCall,
    OpenCall,
    attempts_of,
    is_tainted,
    nothing_answered,
    refuse_misspelt_agents,
    suspicion,
    why_tainted,
    with_failure,
)
from swarm.server.state.claims import expires_at
from swarm.server.state.leases import LiveEpisode, digest, held_it
from swarm.server.state.rows import EpisodeRow, PutCalls, PutMeta, session_note
from swarm.server.state.sample_pool import (
    MIX_PATIENCE,
    fill_slot,
    free_slot,
    mix_patience_ended,
    settle,
    settle_kin,
    take_back,
)
from swarm.server.state.server_state import Transition
from swarm.server.state.ungrouped import join, name_task, too_stale

METADATA_DEPTH = 128
"""Maximum nesting depth of an episode's metadata."""
RECORD_LIMIT_S = 2.0
"""Seconds that an ending episode waits for the records of the calls that its end cuts off."""
_UNSETTLED = "its client gave up, and the server restarted before its engine showed a sign of life"


# -- ends -------------------------------------------------------------------------------------------------------------
# These functions are for open episodes. For all others, the functions `late_…` decide by the row on disk.


def end(t: Transition, episode_id: str, result: EpisodeResult, task_id: str | None = None) -> EpisodeReceipt:
    """Close an open episode with its reward.

    The episode is dropped as tainted if a call failed and no later call made up for it, unless the result has `despite`. It is
    also dropped if it has no calls, unless a person played it by hand. `task_id` names the task if the episode was claimed
    without one.

    Codes: not_found, lease_lost, invalid_spec.
    """
    live = held(t, episode_id, result.lease)
    refuse_misspelt_agents(live.calls, result.agent_rewards)
    if result.by_hand and live.row.kind == "train":
        fault = FieldError(
            field="by_hand", problem="text that a person wrote is never trained on; claim with kind eval"
        )
        raise invalid_spec([fault])
    row, body = live.row, encoded_calls(t, live)
    store_result(row, result)
    if not row.task_id:
        name_task(t, row, task_id)
    row.end_key = result.idempotency_key
    live.count_calls()
    if live.calls:
        t.changes.append(PutCalls(row.seq, body))
    if row.tainted and row.despite is None:
        close(t, live, DropReason.TAINTED, why_tainted(live.calls), cause=Cause.SERVER)
    elif row.tainted and nothing_answered(live.calls):
        close(t, live, DropReason.NO_CALLS, "all of its calls failed", cause=Cause.SERVER)
    elif not live.calls and not result.by_hand:
        close(t, live, DropReason.NO_CALLS, live.explained("ended without any recorded call"), cause=Cause.ROLLOUT)
    elif row.kind == "eval":
        close(t, live, DropReason.EVAL, cause=None)
    elif row.ungrouped and (stale := too_stale(t.state, row)) is not None:
        close(t, live, DropReason.STALE, stale, cause=None)
    else:
        leave(t, live)
        ungrouped = row.ungrouped
        group = join(t, row) if ungrouped else t.state.groups.get(row.group_id or "")
        assert group is not None
        fill_slot(t, row, group)
        if ungrouped:
            settle_kin(t, row)
    return EpisodeReceipt(episode_id=episode_id, status="pooled", dropped=dropped_at_end(row))


def abort(t: Transition, episode_id: str, lease: str, words: str, cause: Cause | None = None) -> LedgerEntry:
    """Close an open episode as aborted. `cause` is what the client blames. Codes: not_found, lease_lost."""
    live = held(t, episode_id, lease)
    live.count_calls()
    close(t, live, DropReason.ABORTED, live.explained(words), cause=blamed(cause, tainted=live.row.tainted))
    return live.row.entry()


def begin_session(t: Transition, wanted: SessionRequest) -> list[str]:
    """Close the open episodes of the client's older sessions, and refuse later claims of those sessions. Return the closed ones.

    Episodes that were claimed without a session, or are bound to a team's decision, stay as they are. Repeating the request does
    nothing.
    """
    state, me = t.state, wanted.client_id
    if state.run is None or state.run.run_id != wanted.run_id or state.sessions.get(me) == wanted.session:
        return []
    state.sessions[me] = wanted.session
    t.changes.append(PutMeta(session_note(wanted.run_id, me), wanted.session))
    older = [live for live in state.live.values() if live.session is not None and live.row.client_id == me]
    for live in older:
        live.count_calls()
        close(t, live, DropReason.ABORTED, wanted.reason, cause=blamed(Cause.CLIENT, tainted=live.row.tainted))
    return [live.row.episode_id for live in older]


def renew(t: Transition, episode_id: str, lease: str) -> float:
    """Extend a lease, and return the Unix time at which it now expires. Codes: not_found, lease_lost."""
    live = held(t, episode_id, lease)
    _extend(t, live)
    return expires_at(t, live)


def _extend(t: Transition, live: LiveEpisode) -> None:
    """Restart the idle limit after a sign of life, and watch the new deadline, which may be a call's time limit."""
    live.touch(t.lease_time)
    t.state.deadlines.watch(live, t.lease_time)


def expire(t: Transition) -> None:
    """Act on everything that has expired: leases, and patience with groups and families."""
    state, now = t.state, t.lease_time
    for name in state.deadlines.take(now):
        live, group = state.live.get(name), state.groups.get(name)
        if name == MIX_PATIENCE:
            mix_patience_ended(t)
        elif group is not None:
            settle(t, group)
        elif live is not None and live.ran_out(now):
            _expire(t, live)
        elif live is not None and live.check_at <= now:
            live.check_at = math.inf
            state.deadlines.watch(live, now)


def _expire(t: Transition, live: LiveEpisode) -> None:
    """Close an expired episode. If it has open calls, first cut them off and wait for their records."""
    row, (cause, detail) = live.row, _expiry(t, live)
    if live.open_since and t.lease_time < live.close_at:
        return
    try:
        body = encode(live.calls)
    except Unwritable as error:
        detail += f"; its calls cannot be kept: {error}"
    else:
        if live.calls:
            t.changes.append(PutCalls(row.seq, body))
    live.count_calls()
    detail = live.explained(detail)
    t.say(f"episode {row.episode_id} of {row.client_id} expired: {detail}", one_of="episodes expired")
    close(t, live, DropReason.EXPIRED, detail, cause=blamed(cause, tainted=row.tainted))


def _expiry(t: Transition, live: LiveEpisode) -> tuple[Cause, str]:
    """Return who is to blame for an expired episode, and why it expired. From now on, the episode accepts no new calls."""
    if live.expiry is not None:
        return live.expiry
    if live.ends_at <= t.lease_time:
        live.expiry = Cause.LIMIT, "took longer than its max_episode_s"
    elif live.open_since:
        live.expiry = Cause.LIMIT, f"a call took longer than its max_call_s of {live.max_call_s:g} s"
    else:
        live.expiry = Cause.CLIENT, f"no call and no renewal for {live.idle_limit_s:g} s"
    if live.open_since:
        live.close_at = t.lease_time + RECORD_LIMIT_S
        t.state.deadlines.add(live.close_at, live.row.episode_id)
        t.broken_off.append(live.row.episode_id)
    return live.expiry


def held(t: Transition, episode_id: str, lease: str) -> LiveEpisode:
    """Return the open episode if `lease` holds it and has not expired. Codes: not_found, lease_lost."""
    live = t.state.live.get(episode_id)
    if live is None:
        raise lost(t.state.row(episode_id), episode_id)
    if not hmac.compare_digest(live.lease.encode(), lease.encode()):
        detail = f"this lease does not hold episode {episode_id!r}; claim your own episode"
        raise Refusal(ErrorCode.LEASE_LOST, detail)
    if live.ran_out(t.lease_time):  # even if the timer has not noticed yet
        _, detail = _expiry(t, live)
        _expire(t, live)
        raise _closed(episode_id, DropReason.EXPIRED, live.row.detail or detail, DropReason.EXPIRED)
    return live


def encoded_calls(t: Transition, live: LiveEpisode) -> bytes:
    """Return the episode's encoded calls. Codes: lease_lost if they cannot be encoded; the episode is then closed for good."""
    try:
        return encode(live.calls)
    except Unwritable as error:
        close(t, live, DropReason.ABORTED, f"its calls cannot be kept: {error}", cause=Cause.SERVER)
        raise lost(live.row, live.row.episode_id) from error


def close(
    t: Transition, live: LiveEpisode, reason: DropReason, detail: str | None = None, *, cause: Cause | None
) -> None:
    """Close an open episode as dropped, and offer its slot again if it has one. `cause` says who is to blame; None for an evaluation
    that ended."""
    live.count_calls()
    row = live.row
    row.state, row.reason, row.detail, row.cause = EpisodeState.DROPPED, reason, detail, cause
    leave(t, live)
    t.changes.append(row)
    free_slot(t, row)


def leave(t: Transition, live: LiveEpisode) -> None:
    """Remove an episode from the open episodes. Its row must already say how it ended."""
    state, row = t.state, live.row
    row.ended_at = t.now.unix
    row.suspected = suspicion(live.attempts)
    if row.ungrouped:
        state.groups.expect_no_more(row)
    state.live.pop(row.episode_id, None)
    state.closing[row.episode_id] = live
    state.closed_count += 1
    t.closed.append(row.episode_id)
    if live.claim_key is not None:
        state.claim_keys.pop(live.claim_key, None)
    if state.run is not None and row.run_id == state.run.run_id:
        state.run.tokens += row.sampled_tokens
    # A closed episode's deadline may still be a day away.
    state.deadlines.sweep(lambda name: name in state.live or state.groups.get(name) is not None or name == MIX_PATIENCE)


def forget(t: Transition, closed: Sequence[str]) -> None:
    """Drop closed episodes from memory, once their ends are on disk."""
    for episode_id in closed:
        t.state.closing.pop(episode_id, None)


# -- calls ------------------------------------------------------------------------------------------------------------


def open_call(t: Transition, episode_id: str, lease: str, ending: Ending) -> OpenCall:
    """Begin a call. The idle limit is paused until the call is closed. Codes: not_found, lease_lost."""
    live, run, now = held(t, episode_id, lease), t.state.run, t.lease_time
    assert run is not None
    row, index = live.row, live.calls_opened
    live.calls_opened += 1
    live.open_since[index] = now
    _extend(t, live)
    place = ("eval", row.claimed_step, row.ordinal) if row.kind == "eval" else (row.ordinal, row.slot)
    spec = run.specs[row.config_version]
    drawn_for = (row.task_id, *place) if row.task_id else (row.episode_id,)
    return OpenCall(
        episode_id=episode_id,
        lease=lease,
        entry=live.entry(),
        spec=spec,
        weights_version=WeightsVersion(run_id=run.run_id, branch=run.row.branch, step=run.step),
        earlier=tuple(live.calls),
        index=index,
        seed=derived_seed(spec.seed, *drawn_for, index),
        opened_at=t.now.unix,
        ending=ending,
        attempts=live.attempts,
    )


def break_off(t: Transition, episode_id: str, lease: str) -> None:
    """Cut off the episode's open calls; their sampled tokens arrive with `close_call`. Codes: not_found, lease_lost."""
    held(t, episode_id, lease)
    t.broken_off.append(episode_id)


def close_call(
    t: Transition, call: OpenCall, recorded: Sequence[RecordedCall], attempt: CallAttempt | None = None
) -> bool:
    """End a call. Return whether it came in time: False if its lease was lost or its episode has expired or closed.

    A call that was open when its episode expired is still recorded with the episode.
    """
    live, now = t.state.live.get(call.episode_id), t.lease_time
    if live is None or live.lease != call.lease:
        closing = t.state.closing.get(call.episode_id)
        if closing is not None:  # if its end cannot be written, the episode reopens, but this call stays closed
            closing.open_since.pop(call.index, None)
        return False
    in_time = not live.ran_out(now)
    if not in_time:
        _expiry(t, live)
    live.open_since.pop(call.index, None)
    live.calls.extend(recorded)
    live.refusal = "" if recorded else live.refusal
    live.cached_entry = None
    if attempt is not None:
        live.attempts.append(attempt)
    if in_time:
        _extend(t, live)
    else:
        _expire(t, live)
    return in_time


def attempted(t: Transition, episode_id: str, attempt: CallAttempt) -> None:
    """Note the outcome of a request that is not recorded: it may make up for an earlier failure."""
    live = t.state.live.get(episode_id)
    if live is not None:
        live.attempts.append(attempt)
        live.cached_entry = None


def refused(t: Transition, episode_id: str, why: str) -> None:
    """Note why a request was refused. The ledger reports it if the episode is lost before its next call is recorded."""
    live = t.state.live.get(episode_id)
    if live is not None:
        live.refusal = why


def suspect(t: Transition, attempt: CallAttempt, at: float, call_ids: frozenset[str]) -> None:
    """Note that a client gave up on a recorded call at Unix time `at`. We may learn later that the engine was hanging by then."""
    attempt.left_at, attempt.call_ids = at, call_ids
    t.state.situation.suspected_at = at


def fail_open(t: Transition, found: FailedCall) -> bool:
    """Mark a recorded call as failed because of the server. Return False if its episode is not open; see `fail_closed`."""
    live = t.state.live.get(found.episode_id)
    if live is None:
        return False
    found.attempt.outcome = "failed"
    live.calls = with_failure(live.calls, found.call_ids, found.failure)
    live.cached_entry = None
    return True


def fail_closed(t: Transition, found: FailedCall, on_disk: EpisodeRow | None, calls: Sequence[RecordedCall]) -> bool:
    """Mark a recorded call of an ended episode as failed because of the server. An episode in a step stays as it is.

    `on_disk` and `calls` are the episode's row and calls, read from storage while no end of the episode is being written. Returns
    False and changes nothing if the row is out of date, because the episode has left the pool and that is not on disk yet.
    """
    held = t.state.row(found.episode_id)
    row = held or on_disk
    if row is None or row.state in (EpisodeState.IN_STEP, EpisodeState.TRAINED):
        return True
    if held is None and row.state in (EpisodeState.ENDED, EpisodeState.PREPARED):
        return False
    found.attempt.outcome = "failed"
    row.suspected = suspicion(found.attempts)
    marked = with_failure(calls, found.call_ids, found.failure)
    if marked:
        t.changes.append(PutCalls(row.seq, encode(marked)))
    row.tainted = is_tainted(found.attempts)
    counts = row.state is EpisodeState.ENDED or row.reason is DropReason.EVAL
    if row.tainted and counts and row.despite is None:
        row.state, row.reason, row.detail = EpisodeState.DROPPED, DropReason.TAINTED, why_tainted(marked)
        row.cause = Cause.SERVER
        text = f"episode {row.episode_id} of {row.client_id} is dropped as tainted: {row.detail}"
        t.say(text, "warning", one_of="episodes dropped after their end, as tainted")
        take_back(t, row)
        return True
    if row.reason in (DropReason.ABORTED, DropReason.EXPIRED):
        row.cause = blamed(row.cause, tainted=row.tainted)
    t.changes.append(row)
    return True


def fail_unsettled(t: Transition, on_disk: EpisodeRow, calls: Sequence[RecordedCall]) -> None:
    """After a restart, mark calls whose clients gave up after `lived_at` as failed because of the server.

    The engine is gone, so we cannot find out whether it was hanging, and an outage must not count as a wrong answer. An episode
    that the restart itself has dropped stays dropped.
    """
    lived_at = t.state.situation.lived_at
    attempts = attempts_of(on_disk.suspected or {"attempts": []})
    unsettled = [
        one for one in attempts if one.outcome == "left" and one.left_at is not None and one.left_at > lived_at
    ]
    for attempt in unsettled:
        attempt.outcome = "failed"
    found = FailedCall(
        episode_id=on_disk.episode_id,
        call_ids=frozenset[str]().union(*(attempt.call_ids for attempt in unsettled)),
        failure=CallFailure(cause=Cause.SERVER, reason="engine_down", detail=_UNSETTLED),
        attempt=unsettled[-1],
        attempts=attempts,
    )
    fail_closed(t, found, on_disk, calls)


# -- results, and late requests -----------------------------------------------------------------------------


def result_digest(result: EpisodeResult) -> str:
    """Return a digest that is equal for equal results. Codes: invalid_spec for values that cannot be stored."""
    stated: list[Any] = [result.reward, result.agent_rewards, result.success, result.metrics, result.metadata]
    if result.despite is not None:
        stated.append(result.despite)
    if result.by_hand:
        stated.append({"by_hand": True})
    if strict_json.is_deeper(result.metadata, METADATA_DEPTH):
        problem = f"is nested more than {METADATA_DEPTH} levels deep; send anything deeper as text"
        raise invalid_spec([FieldError(field="metadata", problem=problem)])
    try:
        json.dumps(result.metadata, allow_nan=False)  # orjson would write null for NaN and infinity
        return digest(orjson.dumps(stated, option=orjson.OPT_SORT_KEYS))
    except (orjson.JSONEncodeError, ValueError) as error:
        problem = f"cannot be stored: {error}; send plain JSON values"
        raise invalid_spec([FieldError(field="metadata", problem=problem)]) from error


def store_result(row: EpisodeRow, result: EpisodeResult) -> None:
    """Copy the client's result into the row."""
    row.end_digest = result_digest(result)
    row.reward = result.reward
    row.agent_rewards = result.agent_rewards
    row.success = result.success
    row.metrics = result.metrics
    row.metadata = result.metadata
    row.despite = result.despite


def dropped_at_end(row: EpisodeRow) -> DropReason | None:
    """Return why an episode was dropped when it ended; None if its reward counted."""
    return row.reason if row.reason in (DropReason.NO_CALLS, DropReason.TAINTED) else None


def blamed(stated: Cause | None, *, tainted: bool) -> Cause:
    """Return who is to blame for an episode that its client gave up. `stated` is what the client blames; None means the rollout.

    If a call failed because of the server, agent and client could do no better, so we blame the server, unless the client
    blames a grader or a person.
    """
    cause = stated or Cause.ROLLOUT
    return Cause.SERVER if tainted and cause not in (Cause.GRADER, Cause.PERSON) else cause


def lost(row: EpisodeRow | None, episode_id: str) -> Refusal:
    """Return the refusal of a request for an episode that is not open."""
    if row is None:
        return Refusal(ErrorCode.NOT_FOUND, f"no episode {episode_id!r} on this server")
    if row.state is EpisodeState.PREPARED:
        detail = f"episode {episode_id!r} is prepared as part of a team; commit or abort it"
        return Refusal(ErrorCode.LEASE_LOST, detail)
    return _closed(episode_id, row.reason or ("ended" if row.end_digest else row.state), row.detail, row.reason)


def _closed(episode_id: str, how: str, detail: str | None, dropped: DropReason | None) -> Refusal:
    because = f" ({detail})" if detail else ""
    fields = {} if dropped is None else {"dropped": dropped.value}
    return Refusal(ErrorCode.LEASE_LOST, f"episode {episode_id!r} is closed: {how}{because}; claim a new one", **fields)


def late_end(row: EpisodeRow | None, episode_id: str, result: EpisodeResult) -> EpisodeReceipt:
    """Answer an `end` for an episode that is not open. A repetition gets the same answer; anything else is refused.

    Codes: not_found, lease_lost, idempotency_conflict.
    """
    if row is None or row.end_digest is None or not held_it(row, result.lease):
        raise lost(row, episode_id)
    if row.end_digest == result_digest(result):
        return EpisodeReceipt(episode_id=episode_id, status="already_ended", dropped=dropped_at_end(row))
    if result.idempotency_key is not None and result.idempotency_key == row.end_key:
        raise Refusal(
            ErrorCode.IDEMPOTENCY_CONFLICT,
            f"episode {episode_id!r} was ended with key {row.end_key!r} and a different result; the first result stands",
        )
    raise lost(row, episode_id)


def late_abort(row: EpisodeRow | None, episode_id: str, lease: str) -> LedgerEntry:
    """Answer an `abort` for an episode that is not open. Codes: not_found, lease_lost."""
    aborted = row is not None and row.reason in (DropReason.ABORTED, DropReason.TEAM_ABORTED)
    if row is not None and aborted and held_it(row, lease):
        return row.entry()
    raise lost(row, episode_id)
