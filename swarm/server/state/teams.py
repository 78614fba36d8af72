"""Teams: episodes on several servers that are committed or aborted together. One server, the decider, decides for all.

Each server first prepares its own episode of the team: the episode is on disk, no longer has a lease, and keeps its slot. The
decider then commits or aborts its episode; if its client is silent for too long, it aborts. The other servers never decide: the
client informs them, or they ask. A decider without a commit on record answers "aborted", and will never commit.
"""

from __future__ import annotations

import orjson

from swarm.protocol.episodes import Cause, DropReason, EpisodeKind, EpisodeResult, EpisodeState, LedgerEntry
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.teams import EpisodePreparation, EpisodeResolution, TeamDecision, TeamOutcome, TeamReceipt
from swarm.server.state.calls import nothing_answered, refuse_misspelt_agents, why_tainted
from swarm.server.state.episodes import (
    blamed,
    close,
    dropped_at_end,
    encoded_calls,
    held,
    leave,
    lost,
    result_digest,
    store_result,
)
from swarm.server.state.leases import Prepared, digest, held_it
from swarm.server.state.rows import EpisodeRow, PutCalls, TeamRow
from swarm.server.state.sample_pool import fill_slot, free_slot
from swarm.server.state.server_state import ServerState, Transition

# `prepare` and `commit` are for open or prepared episodes, the other functions for prepared ones. For episodes that are no longer
# in memory, the functions `late_…` decide by the rows on disk.


def prepare(t: Transition, episode_id: str, wish: EpisodePreparation, sealed_key: str) -> TeamReceipt:
    """Bind an open episode to its team's decision. A repeated request gets the same answer.

    A tainted episode is dropped now, before the decision, unless one of its calls was answered and its result has `despite`.
    The other members' work depends on it, so the client must give up the whole team (lease_lost{dropped: tainted}).

    Codes: not_found, lease_lost, idempotency_conflict, invalid_spec.
    """
    known = t.state.prepared.get(episode_id)
    if known is not None:
        _require_lease(known.row, wish.lease)
        return _repeated(known.team, wish)
    live = held(t, episode_id, wish.lease)
    refuse_misspelt_agents(live.calls, wish.result.agent_rewards)
    row = live.row
    preparation = preparation_digest(wish)
    body = encoded_calls(t, live)
    live.count_calls()
    if live.calls:
        t.changes.append(PutCalls(row.seq, body))
    if row.tainted and (wish.result.despite is None or nothing_answered(live.calls)):
        store_result(row, EpisodeResult(lease="", **wish.result.model_dump()))
        close(t, live, DropReason.TAINTED, why_tainted(live.calls), cause=Cause.SERVER)
        raise lost(row, episode_id)
    team = TeamRow(
        seq=row.seq,
        episode_id=episode_id,
        decider_url=wish.decider.url,
        decider_id=wish.decider.episode_id,
        sealed_key=sealed_key,
        patience_s=wish.patience_s,
        prepared_at=t.now.unix,
        prepare_digest=preparation,
        result=wish.result.model_dump(mode="json"),
    )
    row.state = EpisodeState.PREPARED
    waits = "decides for its team" if team.decides else f"waits for {team.decider_id} at {team.decider_url}"
    row.detail = live.explained(waits)
    leave(t, live)
    row.ended_at = None
    hold(t, Prepared(row=row, team=team))
    t.changes += [row, team]
    return TeamReceipt(episode_id=episode_id, status="prepared")


def commit(t: Transition, episode_id: str, lease: str) -> TeamReceipt:
    """Commit the team, if this server is its decider; otherwise record the commit that the client reports.

    Codes: lease_lost, invalid_spec (not prepared).
    """
    if episode_id not in t.state.prepared:
        held(t, episode_id, lease)
        detail = f"episode {episode_id!r} is not prepared; send :prepare to every server of the team first"
        raise Refusal(ErrorCode.INVALID_SPEC, detail, errors=[])
    prepared = _held_prepared(t, episode_id, lease)
    decide(t, prepared, "committed", how="client")
    return TeamReceipt(episode_id=episode_id, status="committed", dropped=dropped_at_end(prepared.row))


def abort(t: Transition, episode_id: str, lease: str, words: str, cause: Cause | None = None) -> LedgerEntry:
    """Abort a prepared episode because its client gave up the team. `cause` is what the client blames. Codes: lease_lost."""
    prepared = _held_prepared(t, episode_id, lease)
    cause = blamed(cause, tainted=prepared.row.tainted)
    decide(t, prepared, "aborted", how="client", detail=words, cause=cause)
    return prepared.row.entry()


def renew(t: Transition, episode_id: str, lease: str) -> float:
    """Note that a prepared episode's client is alive. Return the Unix time at which it will count as gone.

    Codes: lease_lost.
    """
    prepared = _held_prepared(t, episode_id, lease)
    prepared.in_doubt = False
    prepared.touch(t.lease_time)
    return t.now.unix + prepared.team.patience_s


def resolve(t: Transition, episode_id: str, resolution: EpisodeResolution) -> TeamReceipt:
    """Apply an operator's decision on a prepared episode."""
    prepared = t.state.prepared[episode_id]
    detail = f"resolved by an operator: {resolution.reason}"
    decide(t, prepared, resolution.outcome, how="operator", detail=detail, cause=Cause.PERSON)
    return TeamReceipt(episode_id=episode_id, status=resolution.outcome)


def hear_decision(t: Transition, episode_id: str, decision: TeamDecision) -> None:
    """Apply the decider's answer, unless the decision has already arrived in another way."""
    prepared = t.state.prepared.get(episode_id)
    if prepared is not None and not prepared.team.decides and decision.decision != "undecided":
        detail, cause = "its decider says so", decision.cause or Cause.CLIENT
        decide(t, prepared, decision.decision, how="decider", detail=detail, cause=cause)


def in_doubt(state: ServerState) -> list[str]:
    """Return the episodes that have to ask their deciders."""
    return [name for name, prepared in state.prepared.items() if prepared.asks]


def expire(t: Transition) -> None:
    """Handle clients that were silent for too long: the decider aborts, and other servers start to ask it."""
    state, now = t.state, t.lease_time
    for name in state.team_deadlines.take(now):
        prepared = state.prepared.get(name)
        if prepared is None:
            continue
        if prepared.silent_at > now:
            state.team_deadlines.add(prepared.silent_at, name)
        elif prepared.team.decides:
            detail = f"its client was silent for {prepared.team.patience_s:g} s and had not committed"
            decide(t, prepared, "aborted", how="silence", detail=detail, cause=Cause.CLIENT)
            t.say(f"team of episode {name} aborted: {detail}", one_of="teams aborted")
        else:
            prepared.in_doubt = t.in_doubt = True
            # A renewal may end the doubt, so keep a deadline for the time after it.
            prepared.touch(now)
            state.team_deadlines.add(prepared.silent_at, name)


def hold(t: Transition, prepared: Prepared) -> None:
    """Keep a prepared episode, with its slot. Patience with its client starts now."""
    state, row = t.state, prepared.row
    group = state.groups.get(row.group_id) if row.group_id else None
    if group is not None and row.slot is not None:
        group.clients.add(row.client_id)
        group.running[row.slot] = row.episode_id
    state.prepared[row.episode_id] = prepared
    prepared.touch(t.lease_time)
    state.team_deadlines.add(prepared.silent_at, row.episode_id)
    t.in_doubt = t.in_doubt or prepared.asks


def decide(
    t: Transition,
    prepared: Prepared,
    outcome: TeamOutcome,
    *,
    how: str,
    detail: str | None = None,
    reason: DropReason = DropReason.TEAM_ABORTED,
    cause: Cause | None = None,
) -> None:
    """End a prepared episode: it enters the pool with its reward or is dropped. `cause` says who is to blame if it is aborted."""
    row, team = prepared.row, prepared.team
    prepared_as = row.detail
    del t.state.prepared[row.episode_id]
    team.outcome, team.how = outcome, how
    t.changes.append(team)
    t.state.closed_count += 1
    row.ended_at = t.now.unix
    row.detail = detail if outcome == "aborted" or how != "client" else None
    superseded = row.reason is DropReason.SUPERSEDED
    if outcome == "aborted":
        row.state, row.reason, row.cause = EpisodeState.DROPPED, reason, cause
    else:
        store_result(row, EpisodeResult(lease="", **team.result))
        group = t.state.groups.get(row.group_id) if row.group_id else None
        tainted = row.tainted and row.despite is None and not superseded
        if row.kind == "train" and row.calls and group is not None and not tainted:
            fill_slot(t, row, group)
            return
        row.state = EpisodeState.DROPPED
        if superseded:
            row.cause, row.detail = Cause.SERVER, "its run had been restored before its team's decision came"
        elif tainted:
            row.reason, row.cause = DropReason.TAINTED, Cause.SERVER
            row.detail = "after it was prepared, one of its calls turned out to have failed on the server's side"
        elif not row.calls:
            row.reason, row.cause = DropReason.NO_CALLS, Cause.ROLLOUT
            row.detail = f"committed without any recorded call ({prepared_as})"
        elif row.kind == "eval":
            row.reason = DropReason.EVAL
        else:
            row.reason, row.cause = DropReason.RUN_ENDED, Cause.SERVER
            row.detail = "its run had ended before its team's decision came"
    t.changes.append(row)
    if not superseded:  # otherwise its group is gone, and another evaluation may have its ordinal by now
        free_slot(t, row)


def give_up(
    t: Transition, why: str, kind: EpisodeKind | None = None, reason: DropReason = DropReason.RUN_ENDED
) -> None:
    """Abort the teams that this server decides, because the run or its branch ends. Episodes with another decider keep waiting."""
    for prepared in list(t.state.prepared.values()):
        if prepared.team.decides and kind in (None, prepared.row.kind):
            decide(t, prepared, "aborted", how="run_ended", detail=why, reason=reason, cause=Cause.SERVER)


def preparation_digest(wish: EpisodePreparation) -> str:
    """Return a digest that is equal for equal preparations. Codes: invalid_spec for values that cannot be stored."""
    result = result_digest(EpisodeResult(lease="", **wish.result.model_dump()))
    stated = [wish.decider.url, wish.decider.episode_id, digest(wish.decider.key), result, wish.patience_s]
    return digest(orjson.dumps(stated))


def late_prepare(
    row: EpisodeRow | None, team: TeamRow | None, episode_id: str, wish: EpisodePreparation
) -> TeamReceipt:
    """Answer a `prepare` for an episode that is not in memory. Codes: not_found, lease_lost, idempotency_conflict."""
    if row is None or team is None or not held_it(row, wish.lease) or team.outcome == "aborted":
        raise lost(row, episode_id)
    return _repeated(team, wish)


def late_commit(row: EpisodeRow | None, team: TeamRow | None, episode_id: str, lease: str) -> TeamReceipt:
    """Answer a `commit` for an episode that is not in memory. Codes: not_found, lease_lost."""
    if row is None or team is None or not held_it(row, lease) or team.outcome != "committed":
        raise lost(row, episode_id)
    return TeamReceipt(episode_id=episode_id, status="committed", dropped=dropped_at_end(row))


def late_resolve(
    row: EpisodeRow | None, team: TeamRow | None, episode_id: str, resolution: EpisodeResolution
) -> TeamReceipt:
    """Answer a `resolve` for an episode that is not in memory.

    Codes: not_found; lease_lost if it was decided differently or never prepared.
    """
    if row is None or team is None or team.outcome != resolution.outcome:
        raise lost(row, episode_id)
    return TeamReceipt(episode_id=episode_id, status=resolution.outcome)


def late_decision(team: TeamRow | None, episode_id: str, cause: Cause | None = None) -> TeamDecision:
    """Return the decision on an episode that is not in memory. `cause` says who is to blame for losing the decider's episode.

    No record means abort: an episode that is neither open nor prepared, or is not on disk, will never be committed.
    """
    if team is not None and team.outcome == "committed":
        return TeamDecision(episode_id=episode_id, decision="committed")
    return TeamDecision(episode_id=episode_id, decision="aborted", cause=cause)


def _held_prepared(t: Transition, episode_id: str, lease: str) -> Prepared:
    prepared = t.state.prepared[episode_id]
    _require_lease(prepared.row, lease)
    return prepared


def _repeated(team: TeamRow, wish: EpisodePreparation) -> TeamReceipt:
    if team.prepare_digest != preparation_digest(wish):
        detail = f"episode {team.episode_id!r} was already prepared with a different request; the first one stands"
        raise Refusal(ErrorCode.IDEMPOTENCY_CONFLICT, detail)
    return TeamReceipt(episode_id=team.episode_id, status=team.outcome or "prepared")


def _require_lease(row: EpisodeRow, lease: str) -> None:
    if not held_it(row, lease):
        detail = f"this lease does not hold episode {row.episode_id!r}; claim your own episode"
        raise Refusal(ErrorCode.LEASE_LOST, detail)
