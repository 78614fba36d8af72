"""The book of episodes: who may claim, who holds what, and how each one ended.

Pure bookkeeping: no HTTP, no torch, no waiting. What it decides stands in memory at once and in `state.changes` for the pool.
"""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from foundation.ids import derived_seed
from foundation.strict import FieldError
from swarm.protocol.episodes import (
    CallFailure,
    Cause,
    DropReason,
    EpisodeClaim,
    EpisodeReceipt,
    EpisodeResult,
    EpisodeState,
    LedgerEntry,
    RecordedCall,
    WeightsVersion,
)
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.problem import invalid_spec
from swarm.server.state.admission import Admission, NotYet
from swarm.server.state.batches import count_tokens
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
from swarm.server.state.groups import Group
from swarm.server.state.leases import API_KEY_PREFIX, LiveEpisode, digest
from swarm.server.state.rows import EpisodeRow, FreeCalls, GroupRow, PutCalls, PutEpisode, PutGroup, PutVersion
from swarm.server.state.runs import Run
from swarm.server.state.state import MIX_PATIENCE, BookState

LEASE_PREFIX = "swl_"
TRACES_KEPT = 2_000
"""Of this many newest episodes the calls are kept, though no replay needs them, so that people can look at them."""
_UNSETTLED = "its client gave up, and the server was restarted before its engine was heard of again"
FREED_EVERY = 100
"""Claims, evaluations too: a run that is complete may be evaluated for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedLease:
    """A claim that was granted; the route adds base_url and team_key."""

    episode_id: str
    lease: str
    api_key: str
    group_id: str | None
    slot: int | None
    weights_version: WeightsVersion
    expires_at: float


class EpisodeBook:
    """Claims, calls, ends, aborts, renewals, expiries, over one `BookState`."""

    def __init__(self, state: BookState) -> None:
        self._state = state
        self._admission = Admission(state)

    # -- claims -----------------------------------------------------------------------------------------------------

    def claim(self, claim: EpisodeClaim) -> GrantedLease | NotYet:
        """A lease, or why there is none yet.

        Codes: not_found, over_limit, engine_failed, idempotency_conflict, forbidden{client_version} when it is quarantined,
        invalid_spec{errors} for a mix that the run has not.
        """
        repeated = self._repeated(claim)
        if repeated is not None:
            return repeated
        run = self._claimable_run(claim)
        if not self._state.serving:
            return NotYet(code=ErrorCode.NOT_ROLLING, detail="the server is not serving yet; ask again")
        if run.row.stop_requested_at is not None:
            return NotYet(code=ErrorCode.DRAINING, detail=f"run {run.run_id} is being stopped")
        if claim.kind == "eval":
            return self._grant(claim, run, None, None, self._take_eval_ordinal(claim.task_id))
        self._admission.require_trainable(claim, run)
        return self._claim_slot(claim, run)

    def _repeated(self, claim: EpisodeClaim) -> GrantedLease | None:
        """The lease that an equal claim with this key already got, while it is held."""
        held = self._state.claim_keys.get(claim.idempotency_key) if claim.idempotency_key else None
        if held is None:
            return None
        live = self._state.live[held]
        if live.claim_digest != claim_digest(claim):
            raise Refusal(
                ErrorCode.IDEMPOTENCY_CONFLICT,
                f"key {claim.idempotency_key!r} was used for another claim; use a fresh key for each",
            )
        return self._granted(live)

    def _claimable_run(self, claim: EpisodeClaim) -> Run:
        run = self._state.run
        if run is None or run.run_id != claim.run_id:
            now = f"works on {run.run_id}" if run else "has had none yet"
            raise Refusal(ErrorCode.NOT_FOUND, f"no run {claim.run_id!r} to claim for; this server {now}")
        failed = self._state.situation.engine_failed
        if failed is not None:
            raise Refusal(ErrorCode.ENGINE_FAILED, f"the engine failed for good: {failed.reason}")
        if run.row.status == "failed":
            raise Refusal(ErrorCode.ENGINE_FAILED, f"run {run.run_id} failed: {run.row.reason}", run_status="failed")
        if run.row.released:
            detail = f"run {run.run_id} is {run.row.status} and no longer served; start another"
            raise Refusal(ErrorCode.OVER_LIMIT, detail, run_status=run.row.status)
        if claim.kind == "train" and run.row.status != "running":
            detail = f"run {run.run_id} is {run.row.status}: it {run.row.reason}"
            raise Refusal(ErrorCode.OVER_LIMIT, detail, run_status=run.row.status)
        return run

    def _claim_slot(self, claim: EpisodeClaim, run: Run) -> GrantedLease | NotYet:
        state = self._state
        key = (claim.task_id, claim.mix, claim.client_version, run.config_version)
        offered = state.groups.offer(key, state.lease_time)
        if offered is None:
            state.leave_behind(claim.client_id, claim.client_version)
            refused = self._admission.no_room(claim, run)
            if refused is not None:
                return refused
            offered = self._open_group(claim, run), 0
        group, slot = offered
        counted = group.counts
        group.clients.add(claim.client_id)
        group.left.discard(claim.client_id)
        if group.counts != counted:  # somebody came back to it: it holds its place again
            state.groups.touch()
        return self._grant(claim, run, group, slot, group.row.ordinal)

    def _open_group(self, claim: EpisodeClaim, run: Run) -> Group:
        state = self._state
        ordinal = state.groups_by_task.get(claim.task_id, 0)
        state.groups_by_task[claim.task_id] = ordinal + 1
        row = GroupRow(
            seq=state.next_group_seq,
            group_id=state.ids.new("gr"),
            run_id=run.run_id,
            task_id=claim.task_id,
            mix=claim.mix,
            client_version=claim.client_version,
            config_version=run.config_version,
            ordinal=ordinal,
            size=run.spec.batch.group_size,
        )
        state.next_group_seq += 1
        group = Group(row=row, rules=run.spec.batch)
        state.groups.add(group)
        state.changes.append(PutGroup(row))
        version = (claim.mix, claim.client_version)
        if not state.versions.knows(version):
            state.changes.append(PutVersion(state.versions.begin(run.run_id, version, state.clock.now())))
        return group

    def _take_eval_ordinal(self, task_id: str) -> int:
        taken = self._state.eval_ordinals.setdefault(task_id, set())
        ordinal = next(i for i in range(len(taken) + 1) if i not in taken)
        taken.add(ordinal)
        return ordinal

    def _grant(
        self, claim: EpisodeClaim, run: Run, group: Group | None, slot: int | None, ordinal: int
    ) -> GrantedLease:
        state = self._state
        lease = LEASE_PREFIX + state.ids.secret()
        episode_id = state.ids.new("ep")
        api_key = f"{API_KEY_PREFIX}{episode_id}.{state.ids.secret()}"
        row = EpisodeRow(
            seq=state.next_episode_seq,
            episode_id=episode_id,
            run_id=run.run_id,
            kind=claim.kind,
            task_id=claim.task_id,
            mix=claim.mix,
            client_id=claim.client_id,
            client_version=claim.client_version,
            config_version=run.config_version,
            group_id=group.row.group_id if group else None,
            slot=slot,
            ordinal=ordinal,
            claimed_step=run.step,
            claimed_at=state.clock.now(),
            lease_digest=digest(lease),
            api_key_digest=digest(api_key),
        )
        state.next_episode_seq += 1
        now = state.lease_time
        live = LiveEpisode(
            row=row,
            lease=lease,
            api_key=api_key,
            idle_limit_s=claim.idle_limit_s,
            idle_at=now + claim.idle_limit_s,
        )
        live.ends_at = now + (claim.max_episode_s or run.spec.limits.max_episode_s)
        if claim.max_call_s is not None:
            live.max_call_s = claim.max_call_s
        if claim.idempotency_key is not None:
            live.claim_key, live.claim_digest = claim.idempotency_key, claim_digest(claim)
            state.claim_keys[claim.idempotency_key] = row.episode_id
        if group is not None and slot is not None:
            state.play(group, slot, row.episode_id)
        state.live[row.episode_id] = live
        state.deadlines.add(live.deadline, row.episode_id)
        state.changes.append(PutEpisode(row))
        if row.seq % FREED_EVERY == 0:
            state.changes.append(FreeCalls(run.run_id, run.oldest_kept_step, row.seq - TRACES_KEPT))
        return self._granted(live)

    def _granted(self, live: LiveEpisode) -> GrantedLease:
        row = live.row
        return GrantedLease(
            episode_id=row.episode_id,
            lease=live.lease,
            api_key=live.api_key,
            group_id=row.group_id,
            slot=row.slot,
            weights_version=self._version(row.run_id, row.claimed_step),
            expires_at=self._expires_at(live),
        )

    def _version(self, run_id: str, step: int) -> WeightsVersion:
        run = self._state.run
        return WeightsVersion(run_id=run_id, branch=run.row.branch if run else 0, step=step)

    def _expires_at(self, live: LiveEpisode) -> float:
        return self._state.clock.now() + max(0.0, min(live.idle_at, live.ends_at) - self._state.lease_time)

    # -- closing ----------------------------------------------------------------------------------------------------

    def end(self, episode_id: str, result: EpisodeResult) -> EpisodeReceipt:
        """Close an open episode with its reward. Only for ids that `is_open`; others are judged by `late_end`.

        One with a failed call that nothing made good is dropped as tainted, unless the result says `despite`. One without calls is
        dropped too, unless a person played it by hand.
        """
        state = self._state
        live = self.held(episode_id, result.lease)
        refuse_misspelt_agents(live.calls, result.agent_rewards)
        if result.by_hand and live.row.kind == "train":
            fault = FieldError(field="by_hand", problem="what a person wrote is never trained; claim with kind eval")
            raise invalid_spec([fault])
        row, body = live.row, self.calls_of(live)
        store_result(row, result)
        row.end_key = result.idempotency_key
        live.entry()  # sees whether it is tainted
        count_tokens(row, live.calls)
        if live.calls:
            state.changes.append(PutCalls(row.seq, body))
        group = state.groups.get(row.group_id) if row.group_id else None
        if row.tainted and row.despite is None:
            state.close(live, DropReason.TAINTED, why_tainted(live.calls), cause=Cause.SERVER)
        elif row.tainted and nothing_answered(live.calls):
            state.close(live, DropReason.NO_CALLS, "all of its calls failed", cause=Cause.SERVER)
        elif not live.calls and not result.by_hand:
            state.close(live, DropReason.NO_CALLS, "ended without any recorded call", cause=Cause.ROLLOUT)
        elif row.kind == "eval":
            state.close(live, DropReason.EVAL, cause=None)
        else:
            assert group is not None
            state.leave(live)
            state.enter_pool(row, group)
        return EpisodeReceipt(episode_id=episode_id, status="pooled", dropped=dropped_at_end(row))

    def abort(self, episode_id: str, lease: str, words: str, cause: Cause | None = None) -> LedgerEntry:
        """Only for ids that `is_open`; others are judged by `late_abort`. cause: as the client states it."""
        live = self.held(episode_id, lease)
        cause = blamed(cause, tainted=live.entry().tainted)
        self._state.close(live, DropReason.ABORTED, words, cause=cause)
        return live.row.entry()

    def renew(self, episode_id: str, lease: str) -> float:
        """Unix time at which the lease now expires. Only for ids that `is_open`."""
        live = self.held(episode_id, lease)
        live.touch(self._state.lease_time)
        return self._expires_at(live)

    def expire(self) -> None:
        """Close what ran out by now: leases, and the patience of groups."""
        state = self._state
        now = state.lease_time
        for name in state.deadlines.take(now):
            if name == MIX_PATIENCE:
                state.mix_patience_ended()
                continue
            live = state.live.get(name)
            group = state.groups.get(name)
            if group is not None:
                state.settle(group)
            elif live is not None and live.deadline <= now:
                self._expire(live, now)
            elif live is not None:
                state.deadlines.add(live.look_at(now), name)

    def _expire(self, live: LiveEpisode, now: float) -> None:
        cause = Cause.LIMIT
        if live.ends_at <= now:
            detail = "took longer than its max_episode_s"
        elif live.open_since:
            detail = f"a call took longer than its max_call_s of {live.max_call_s:g} s"
        else:
            cause, detail = Cause.CLIENT, f"no call and no renewal for {live.idle_limit_s:g} s"
        try:
            body = encode(live.calls)
        except Unwritable as error:
            detail += f"; its calls cannot be kept: {error}"
        else:
            if live.calls:
                self._state.changes.append(PutCalls(live.row.seq, body))
        self._state.log.append(f"episode {live.row.episode_id} of {live.row.client_id} expired: {detail}")
        self._state.close(live, DropReason.EXPIRED, detail, cause=blamed(cause, tainted=live.entry().tainted))

    def is_open(self, episode_id: str) -> bool:
        return episode_id in self._state.live

    def held(self, episode_id: str, lease: str) -> LiveEpisode:
        """The open episode, when the lease is the one that holds it and has not run out. Codes: not_found, lease_lost."""
        live = self._state.live.get(episode_id)
        if live is None:
            raise lost(self.row(episode_id), episode_id)
        if not hmac.compare_digest(live.lease.encode(), lease.encode()):
            raise Refusal(
                ErrorCode.LEASE_LOST, f"this lease does not hold episode {episode_id!r}; claim one of your own"
            )
        now = self._state.lease_time
        if live.deadline <= now:  # due, though the timer has not come round to it
            self._expire(live, now)
            raise lost(live.row, episode_id)
        return live

    def calls_of(self, live: LiveEpisode) -> bytes:
        """Its calls as they are kept. Codes: lease_lost where they cannot be: then it is given up, and so it stands."""
        try:
            return encode(live.calls)
        except Unwritable as error:
            detail = f"its calls cannot be kept: {error}"
            self._state.close(live, DropReason.ABORTED, detail, cause=Cause.SERVER)
            raise lost(live.row, live.row.episode_id) from error

    def row(self, episode_id: str) -> EpisodeRow | None:
        """The row, when memory still has it."""
        state = self._state
        held = state.live.get(episode_id) or state.closing.get(episode_id) or state.prepared.get(episode_id)
        return held.row if held is not None else state.pooled.get(episode_id)

    # -- calls ------------------------------------------------------------------------------------------------------

    def open_call(self, episode_id: str, lease: str) -> OpenCall:
        """Codes: not_found, lease_lost. For ids that are not open, the caller looks the row up first."""
        state = self._state
        live = self.held(episode_id, lease)
        if live.ending.over:  # its end was refused, or could not be written
            live.ending = Ending()
        run = state.run
        assert run is not None
        row, index = live.row, live.calls_opened
        live.calls_opened += 1
        live.open_since[index] = state.lease_time
        live.touch(state.lease_time)
        if live.max_call_s < math.inf:
            state.deadlines.add(live.deadline, episode_id)
        place = ("eval", row.claimed_step, row.ordinal) if row.kind == "eval" else (row.ordinal, row.slot)
        spec = run.specs[row.config_version]
        return OpenCall(
            episode_id=episode_id,
            lease=lease,
            entry=live.entry(),
            spec=spec,
            weights_version=self._version(run.run_id, run.step),
            earlier=tuple(live.calls),
            index=index,
            seed=derived_seed(spec.seed, row.task_id, *place, index),
            opened_at=state.clock.now(),
            ending=live.ending,
            attempts=live.attempts,
        )

    def break_off(self, episode_id: str, lease: str) -> None:
        """Stop the calls that are open. Only for ids that `is_open`; what was sampled comes by `close_call`. Codes: lease_lost."""
        self.held(episode_id, lease).ending.come()

    def close_call(self, call: OpenCall, recorded: Sequence[RecordedCall], attempt: CallAttempt | None = None) -> bool:
        """Whether the call still counted: False when its lease was lost or its episode closed."""
        live = self._state.live.get(call.episode_id)
        if live is None or live.lease != call.lease:
            closing = self._state.closing.get(call.episode_id)
            if closing is not None:  # if its end cannot be written it will be open again, and this call will not
                closing.open_since.pop(call.index, None)
            return False
        now = self._state.lease_time
        if live.deadline <= now:
            self._expire(live, now)
            return False
        live.open_since.pop(call.index, None)
        live.touch(now)
        live.calls.extend(recorded)
        if attempt is not None:
            live.attempted(attempt)
        return True

    def fail_open(self, found: FailedCall) -> bool:
        """A recorded call failed on the server's side after all. False: its episode is not open; then see `fail_closed`."""
        live = self._state.live.get(found.episode_id)
        if live is None:
            return False
        found.attempt.outcome = "failed"
        live.calls = with_failure(live.calls, found.call_ids, found.failure)
        live.cached_entry = None
        return True

    def fail_closed(self, found: FailedCall, on_disk: EpisodeRow | None, calls: Sequence[RecordedCall]) -> None:
        """The same for an episode that is over, and not yet in a step. What a step has taken stays as it was trained.

        on_disk, calls: as the pool has them; no end of the episode may be on its way there.
        """
        state = self._state
        row = self.row(found.episode_id) or on_disk
        if row is None or row.state in (EpisodeState.IN_STEP, EpisodeState.TRAINED):
            return
        found.attempt.outcome = "failed"
        row.suspected = suspicion(found.attempts)
        marked = with_failure(calls, found.call_ids, found.failure)
        if marked:
            state.changes.append(PutCalls(row.seq, encode(marked)))
        row.tainted = is_tainted(found.attempts)
        counts = row.state is EpisodeState.ENDED or row.reason is DropReason.EVAL
        if row.tainted and counts and row.despite is None:
            state.drop_tainted(row, why_tainted(marked))
            return
        if row.reason in (DropReason.ABORTED, DropReason.EXPIRED):
            row.cause = blamed(row.cause, tainted=row.tainted)
        state.changes.append(PutEpisode(row))

    def fail_unsettled(self, on_disk: EpisodeRow, calls: Sequence[RecordedCall], lived_at: float) -> None:
        """After a restart: nobody can find out any more whether the engine, gone since, hung when clients gave up on it.

        So a call that was given up after `lived_at` failed on the server's side: an outage must not count as a wrong answer.
        """
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
        self.fail_closed(found, on_disk, calls)


def claim_digest(claim: EpisodeClaim) -> str:
    return digest(claim.model_dump_json(exclude={"wait_s", "idempotency_key"}))


def result_digest(result: EpisodeResult) -> str:
    """Equal for equal results. Codes: invalid_spec for numbers that cannot be stored."""
    stated: list[Any] = [result.reward, result.agent_rewards, result.success, result.metrics, result.metadata]
    if result.despite is not None:
        stated.append(result.despite)
    if result.by_hand:
        stated.append({"by_hand": True})
    try:
        json.dumps(result.metadata, allow_nan=False)  # the other writes nothing in place of what is no number
        return digest(orjson.dumps(stated, option=orjson.OPT_SORT_KEYS))
    except (orjson.JSONEncodeError, ValueError) as error:
        problem = f"cannot be stored: {error}; send plain JSON values"
        raise invalid_spec([FieldError(field="metadata", problem=problem)]) from error


def store_result(row: EpisodeRow, result: EpisodeResult) -> None:
    """Write into the row what its client says that it is worth."""
    row.end_digest = result_digest(result)
    row.reward = result.reward
    row.agent_rewards = result.agent_rewards
    row.success = result.success
    row.metrics = result.metrics
    row.metadata = result.metadata
    row.despite = result.despite


def dropped_at_end(row: EpisodeRow) -> DropReason | None:
    """Why an episode was dropped as it ended; None where its reward counted then."""
    return row.reason if row.reason in (DropReason.NO_CALLS, DropReason.TAINTED) else None


def blamed(stated: Cause | None, *, tainted: bool) -> Cause:
    """Who lost an episode that its client gave up. stated: the client's word; None means the rollout.

    Where a call failed on the server's side, agent and client could not do better: the server lost it.
    """
    cause = stated or Cause.ROLLOUT
    return Cause.SERVER if tainted and cause not in (Cause.GRADER, Cause.PERSON) else cause


def lost(row: EpisodeRow | None, episode_id: str) -> Refusal:
    """Why a request for an episode that is not open is refused."""
    if row is None:
        return Refusal(ErrorCode.NOT_FOUND, f"no episode {episode_id!r} on this server")
    if row.state is EpisodeState.PREPARED:
        detail = f"episode {episode_id!r} is prepared in a team; commit it or abort it"
        return Refusal(ErrorCode.LEASE_LOST, detail)
    how = row.reason or ("ended" if row.end_digest else row.state)
    because = f" ({row.detail})" if row.detail else ""
    fields = {} if row.reason is None else {"dropped": row.reason.value}
    return Refusal(ErrorCode.LEASE_LOST, f"episode {episode_id!r} is closed: {how}{because}; claim a new one", **fields)


def late_end(row: EpisodeRow | None, episode_id: str, result: EpisodeResult) -> EpisodeReceipt:
    """Judge an `end` for an episode that is not open: a repetition is answered, anything else refused.

    Codes: not_found, lease_lost, idempotency_conflict.
    """
    if row is None or row.end_digest is None or not held_it(row, result.lease):
        raise lost(row, episode_id)
    if row.end_digest == result_digest(result):
        return EpisodeReceipt(episode_id=episode_id, status="already_ended", dropped=dropped_at_end(row))
    if result.idempotency_key is not None and result.idempotency_key == row.end_key:
        raise Refusal(
            ErrorCode.IDEMPOTENCY_CONFLICT,
            f"episode {episode_id!r} was ended under key {row.end_key!r} with another result; the first one stands",
        )
    raise lost(row, episode_id)


def late_abort(row: EpisodeRow | None, episode_id: str, lease: str) -> LedgerEntry:
    """Judge an `abort` for an episode that is not open. Codes: not_found, lease_lost."""
    aborted = row is not None and row.reason in (DropReason.ABORTED, DropReason.TEAM_ABORTED)
    if row is not None and aborted and held_it(row, lease):
        return row.entry()
    raise lost(row, episode_id)


def held_it(row: EpisodeRow, lease: str) -> bool:
    """Whether this is the lease under which the episode was claimed."""
    return hmac.compare_digest(row.lease_digest, digest(lease))
