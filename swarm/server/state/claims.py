"""Decides on claims: whether an episode may begin, in which group and slot, and under which lease."""

from __future__ import annotations

from foundation.nearest import nearest
from foundation.strict import FieldError
from swarm.protocol.episodes import EpisodeClaim, EpisodeGrant, WeightsVersion
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.problem import invalid_spec
from swarm.server.state.batching import balance_under, family_of, horizon, openings
from swarm.server.state.claim_queue import NotYet, claim_digest
from swarm.server.state.groups import Group
from swarm.server.state.leases import API_KEY_PREFIX, LiveEpisode, digest
from swarm.server.state.rows import EpisodeRow, FreeCalls
from swarm.server.state.runs import Run
from swarm.server.state.sample_pool import await_families, leave_behind, open_group, take_slot
from swarm.server.state.server_state import ServerState, Transition
from swarm.server.state.ungrouped import GuestClaim, no_room

LEASE_PREFIX = "swl_"
LONGEST_RETRY_S = 5.0
"""Maximum `retry_after_s`; also used when we do not know how long the wait will be."""
TRACES_KEPT = 2_000
"""Number of most recent episodes whose calls are kept for people to look at, even if no replay needs them."""
FREED_EVERY = 100
"""Number of claims between two deletions of old calls. Evaluations count too: a complete run can be evaluated without limit."""


def claim(t: Transition, wanted: EpisodeClaim) -> EpisodeGrant | NotYet:
    """Grant a lease, or return why it cannot be granted yet.

    Codes: not_found, over_limit, engine_failed, idempotency_conflict, forbidden{client_version} if that version is quarantined,
    invalid_spec{errors} for an unknown mix, lease_lost if the client has begun a newer session.
    """
    state = t.state
    held = state.claim_keys.get(wanted.idempotency_key) if wanted.idempotency_key else None
    if held is not None:
        live = state.live[held]
        if live.claim_digest != claim_digest(wanted):
            detail = (
                f"key {wanted.idempotency_key!r} was already used for a different claim; use a new key for each claim"
            )
            raise Refusal(ErrorCode.IDEMPOTENCY_CONFLICT, detail)
        return _granted(t, live)
    run = _claimable_run(state, wanted)
    _require_newest_session(state, wanted)
    if not state.serving:
        return NotYet(code=ErrorCode.NOT_ROLLING, detail="the server is not serving yet; ask again")
    if run.row.stop_requested_at is not None:
        return NotYet(code=ErrorCode.DRAINING, detail=f"run {run.run_id} is being stopped")
    if wanted.kind == "eval" and not wanted.task_id:
        return _grant(t, wanted, run, None, None, 0)
    if wanted.kind == "eval":
        taken = state.eval_ordinals.setdefault(wanted.task_id, set())
        ordinal = next(i for i in range(len(taken) + 1) if i not in taken)
        taken.add(ordinal)
        return _grant(t, wanted, run, None, None, ordinal)
    _require_trainable(wanted, run)
    if not wanted.task_id:
        return no_room(t, run) or _grant(t, wanted, run, None, None, 0)
    return _claim_slot(t, wanted, run)


def is_decided_by(state: ServerState, lease_time: float) -> tuple[object, ...]:
    """Return all values that decide about waiting claims. Until one of them changes, it is useless to try the claims again."""
    run, situation = state.run, state.situation
    return (
        state.serving,
        situation.engine_failed is None,
        state.groups.revision,
        state.journalled is None,
        state.passed(lease_time),
        run and (run.run_id, run.row.branch, run.row.status, run.row.released, run.row.stop_requested_at),
        run and (run.config_version, run.step, len(run.row.quarantined)),
    )


def expires_at(t: Transition, live: LiveEpisode) -> float:
    """Return the Unix time at which the lease expires."""
    return t.now.unix + max(0.0, min(live.idle_at, live.ends_at) - t.lease_time)


def _claimable_run(state: ServerState, wanted: EpisodeClaim) -> Run:
    run = state.run
    if run is None or run.run_id != wanted.run_id:
        now = f"works on {run.run_id}" if run else "has no run yet"
        raise Refusal(ErrorCode.NOT_FOUND, f"cannot claim for run {wanted.run_id!r}: this server {now}")
    failed = state.situation.engine_failed
    if failed is not None:
        raise Refusal(ErrorCode.ENGINE_FAILED, f"the engine failed for good: {failed.reason}")
    if run.row.status == "failed":
        raise Refusal(ErrorCode.ENGINE_FAILED, f"run {run.run_id} failed: {run.row.reason}", run_status="failed")
    if run.row.released:
        detail = f"run {run.run_id} is {run.row.status} and no longer served; start another"
        raise Refusal(ErrorCode.OVER_LIMIT, detail, run_status=run.row.status)
    if wanted.kind == "train" and run.row.status != "running":
        detail = f"run {run.run_id} is {run.row.status}: it {run.row.reason}"
        raise Refusal(ErrorCode.OVER_LIMIT, detail, run_status=run.row.status)
    return run


def _require_newest_session(state: ServerState, wanted: EpisodeClaim) -> None:
    newest = state.sessions.get(wanted.client_id)
    if wanted.session is None or wanted.session == newest:
        return
    detail = "begin the session first, with POST /swarm/v1/sessions"
    if newest is not None:
        detail = f"another process has taken over as client {wanted.client_id!r}; give each process its own client_id"
    raise Refusal(ErrorCode.LEASE_LOST, detail)


def _require_trainable(wanted: EpisodeClaim, run: Run) -> None:
    quarantined = run.row.quarantined.get(wanted.client_version)
    if quarantined is not None:
        detail = f"client version {wanted.client_version!r} is quarantined: {quarantined}; fix it, and claim with a new version"
        raise Refusal(ErrorCode.FORBIDDEN, detail, client_version=wanted.client_version)
    mix = run.spec.batch.mix
    if mix and wanted.mix not in mix:
        problem = f"must name a family of the run's mix: {', '.join(mix)}"
        raise invalid_spec([FieldError(field="mix", problem=problem, nearest=nearest(wanted.mix or "", mix))])


# -- groups -----------------------------------------------------------------------------------------------------------


def _claim_slot(t: Transition, wanted: EpisodeClaim, run: Run) -> EpisodeGrant | NotYet:
    state = t.state
    key = (wanted.task_id, wanted.mix, wanted.client_version, run.config_version)
    offered = state.groups.offer(key, t.lease_time)
    if offered is None:
        leave_behind(t, wanted.client_id, wanted.client_version)
        refused = _no_room(t, wanted, run)
        if refused is not None:
            return refused
        offered = open_group(t, run, key), 0
    group, slot = offered
    counted = group.counts
    group.clients.add(wanted.client_id)
    group.left.discard(wanted.client_id)
    if group.counts != counted:  # a client has returned to the group, so the group counts again
        state.groups.touch()
    return _grant(t, wanted, run, group, slot, group.row.ordinal)


def _no_room(t: Transition, wanted: EpisodeClaim, run: Run) -> NotYet | None:
    """Return why no group can be opened for the claim now; None if one can.

    If a family is refused because it is not its turn, this may start the wait for the families whose turn it is.
    """
    state, batch = t.state, run.spec.batch
    ahead = 0 if state.journalled is None else 1
    wanted_groups = horizon(run.spec, step=run.step, versions_ahead=ahead)
    passed = state.passed(t.lease_time)
    memo = state.groups.openings
    asked = (run.run_id, run.row.branch, run.config_version, state.groups.revision, run.step, ahead, passed)
    if memo.asked != asked:
        found = openings(batch, balance_under(run.row.mix, batch.mix), state.groups, wanted_groups, passed)
        memo.asked, memo.families, memo.held_up = asked, found, set()
        held = sum(group.expected for group in state.groups) + state.groups.ungrouped
        memo.full = not found and held >= batch.max_pool_episodes
    if family_of(wanted.mix, batch.mix) in memo.families:
        return None
    if memo.full:
        return NotYet(code=ErrorCode.DRAINING, detail=f"the pool is full ({batch.max_pool_episodes} episodes)")
    if wanted_groups and not state.versions.knows((wanted.mix, wanted.client_version)):
        return (
            None  # edited code gets one group immediately, whatever the old code left behind, so that its effect shows
        )
    if not memo.families:
        detail = f"all groups that max_staleness allows at step {run.step + ahead} are taken; wait for the next step"
        return NotYet(code=ErrorCode.DRAINING, detail=detail)
    if wanted.mix not in memo.held_up:
        memo.held_up.add(wanted.mix)
        await_families(t, held_up=wanted.mix)
    ends_at = [at - t.lease_time for at in state.awaited.ends_at(batch.mix).values()]
    retry_s = min([left_s for left_s in ends_at if left_s > 0], default=LONGEST_RETRY_S)
    turn = ", ".join(sorted(memo.families))
    detail = f"family {wanted.mix!r} already has its share of the next steps; it is the turn of {turn}"
    return NotYet(code=ErrorCode.MIX_FULL, detail=detail, retry_after_s=min(retry_s, LONGEST_RETRY_S))


# -- leases -----------------------------------------------------------------------------------------------------------


def _grant(
    t: Transition, wanted: EpisodeClaim, run: Run, group: Group | None, slot: int | None, ordinal: int
) -> EpisodeGrant:
    state, now = t.state, t.lease_time
    lease = LEASE_PREFIX + state.ids.secret()
    episode_id = state.ids.new("ep")
    api_key = f"{API_KEY_PREFIX}{episode_id}.{state.ids.secret()}"
    row = EpisodeRow(
        seq=state.next_episode_seq,
        episode_id=episode_id,
        run_id=run.run_id,
        kind=wanted.kind,
        task_id=wanted.task_id,
        mix=wanted.mix,
        client_id=wanted.client_id,
        client_version=wanted.client_version,
        config_version=run.config_version,
        group_id=group.row.group_id if group else None,
        slot=slot,
        ordinal=ordinal,
        claimed_step=run.step,
        claimed_at=t.now.unix,
        lease_digest=digest(lease),
        api_key_digest=digest(api_key),
    )
    state.next_episode_seq += 1
    idle_limit_s = wanted.idle_limit_s
    live = LiveEpisode(row=row, lease=lease, api_key=api_key, idle_limit_s=idle_limit_s, idle_at=now + idle_limit_s)
    live.session, live.guest = wanted.session, isinstance(wanted, GuestClaim)
    live.ends_at = now + (wanted.max_episode_s or run.spec.limits.max_episode_s)
    if wanted.max_call_s is not None:
        live.max_call_s = wanted.max_call_s
    if wanted.idempotency_key is not None:
        live.claim_key, live.claim_digest = wanted.idempotency_key, claim_digest(wanted)
        state.claim_keys[wanted.idempotency_key] = row.episode_id
    if group is not None and slot is not None:
        take_slot(t, group, slot, row.episode_id)
    elif row.ungrouped:
        state.groups.expect(row)
    state.live[row.episode_id] = live
    state.deadlines.watch(live, now)
    t.changes.append(row)
    if row.seq % FREED_EVERY == 0:
        t.changes.append(FreeCalls(run.run_id, run.oldest_kept_step, row.seq - TRACES_KEPT))
    return _granted(t, live)


def _granted(t: Transition, live: LiveEpisode) -> EpisodeGrant:
    row, run = live.row, t.state.run
    return EpisodeGrant.model_construct(
        base_url="",  # the route fills in the base_url and the team's key
        episode_id=row.episode_id,
        lease=live.lease,
        api_key=live.api_key,
        group_id=row.group_id,
        slot=row.slot,
        weights_version=WeightsVersion(run_id=row.run_id, branch=run.row.branch if run else 0, step=row.claimed_step),
        expires_at=expires_at(t, live),
    )
