"""The sample pool: ended episodes in their groups, until a step uses them or they are dropped."""

from __future__ import annotations

from swarm.protocol.episodes import DropReason, EpisodeState
from swarm.server.state.batching import balance_under, draw, family_of, most_flat, one_batch
from swarm.server.state.groups import Group, GroupKey
from swarm.server.state.rows import EpisodeRow, GroupRow, SetFate
from swarm.server.state.runs import Run
from swarm.server.state.server_state import ServerState, Transition

MIX_PATIENCE = "mix patience"
"""Name of the deadline at which patience with a family runs out."""


def next_batch(state: ServerState, lease_time: float) -> list[Group] | None:
    """Return the groups of the next step, in the order of their turns; None if there are too few."""
    assert state.run is not None
    batch = state.run.spec.batch
    balance = balance_under(state.run.row.mix, batch.mix)
    found = draw(batch, balance, state.groups.ready(), one_batch(batch), state.passed(lease_time))
    return found.groups if found.complete else None


def open_group(t: Transition, run: Run, key: GroupKey) -> Group:
    """Open a new group for this key, with the batch rules of the key's config version."""
    state = t.state
    task_id, mix, client_version, config_version = key
    ordinal = state.groups_by_task.get(task_id, 0)
    state.groups_by_task[task_id] = ordinal + 1
    rules = run.specs[config_version].batch
    row = GroupRow(
        seq=state.next_group_seq,
        group_id=state.ids.new("gr"),
        run_id=run.run_id,
        task_id=task_id,
        mix=mix,
        client_version=client_version,
        config_version=config_version,
        ordinal=ordinal,
        size=rules.group_size,
    )
    state.next_group_seq += 1
    group = Group(row=row, rules=rules)
    state.groups.add(group)
    t.changes.append(row)
    version = (mix, client_version)
    if not state.versions.knows(version):
        t.changes.append(state.versions.begin(run.run_id, version, t.now.unix))
    return group


# -- slots ------------------------------------------------------------------------------------------------------------


def take_slot(t: Transition, group: Group, slot: int, episode_id: str) -> None:
    """Assign a slot to an episode that begins."""
    group.running[slot] = episode_id
    if t.state.run is not None:
        mix = t.state.run.spec.batch.mix
        t.state.awaited.played(family_of(group.row.mix, mix), mix, t.lease_time)


def fill_slot(t: Transition, row: EpisodeRow, group: Group) -> None:
    """Fill the slot of an episode that ended with a reward."""
    state = t.state
    assert row.slot is not None
    row.state = EpisodeState.ENDED
    t.changes += [row, state.versions.rewarded(row, t.now.unix)]
    state.pooled[row.episode_id] = row
    del group.running[row.slot]
    group.ended[row.slot] = row
    group.last_end = t.lease_time
    if state.run is not None:
        state.awaited.delivered(family_of(group.row.mix, state.run.spec.batch.mix))
    settle(t, group)
    _see_idle_group(t, group)


def free_slot(t: Transition, row: EpisodeRow) -> None:
    """Free the slot of a lost episode, or the ordinal of a lost evaluation, so that it can be offered again."""
    state = t.state
    group = state.groups.get(row.group_id) if row.group_id else None
    if group is not None and row.slot is not None:
        group.running.pop(row.slot, None)
        group.last_loss = t.lease_time
        state.groups.touch()
        settle(t, group)
        _see_idle_group(t, group)
    if row.ungrouped:
        settle_kin(t, row)
    taken = state.eval_ordinals.get(row.task_id)
    counts = row.reason is DropReason.EVAL
    if row.kind == "eval" and taken is not None and not counts and state.is_at_this_step(row):
        taken.discard(row.ordinal)


def settle_kin(t: Transition, row: EpisodeRow) -> None:
    """Settle the groups that were only waiting for this ungrouped episode, which is over now."""
    for group in t.state.groups.left_alone_by(row):
        settle(t, group)


def take_back(t: Transition, row: EpisodeRow) -> None:
    """Remove an ended episode from its group, because it must not be trained on after all. Its slot is offered again."""
    state = t.state
    t.changes.append(row)
    group = state.groups.get(row.group_id) if row.group_id else None
    if state.pooled.pop(row.episode_id, None) is not None and group is not None and row.slot is not None:
        del group.ended[row.slot]
        if not group.open:
            group.row.state = "open"
            t.changes.append(group.row)
    free_slot(t, row)


def leave_behind(t: Transition, client_id: str, client_version: str) -> None:
    """Note that a client, whose claim has no group to join, will claim no more in groups of other code versions."""
    state = t.state
    if not state.groups.has_other(client_version):
        return
    for group in state.groups:
        elsewhere = group.open and group.row.client_version != client_version
        if elsewhere and client_id in group.clients and client_id not in group.left:
            group.left.add(client_id)
            state.groups.touch()
            settle(t, group)


def _see_idle_group(t: Transition, group: Group) -> None:
    """If nothing runs in this group and it is not ready, let the other families start to wait for its family."""
    state = t.state
    if state.run is not None and state.run.spec.batch.mix and not group.running and group.row.state != "ready":
        state.groups.touch()  # so that waiting claims are tried again
        await_families(t)


# -- groups -----------------------------------------------------------------------------------------------------------


def settle_all(t: Transition) -> None:
    """Settle every group after a change that may affect any of them."""
    for group in t.state.groups:
        settle(t, group)
    await_families(t, rearm=True)


def settle(t: Transition, group: Group) -> None:
    """Decide what becomes of a group.

    Drop it if it is useless. Make it ready if it is full. Apply the partial policy if patience with it has run out or nobody can
    join it any more. Otherwise check again when patience runs out.
    """
    state, verdict = t.state, _useless_because(t.state, group)
    if group.useless != (verdict is not None):
        group.useless = verdict is not None
        state.groups.touch()
    if verdict is not None and not group.running:
        drop_group(t, group, *verdict)
    if verdict is not None or not group.open:
        return
    if group.full:
        _make_ready(t, group)
        return
    if state.groups.awaits(group):
        return
    assert state.run is not None
    ends_at = group.patience_ends_at()
    unjoinable = group.forsaken or group.row.config_version != state.run.config_version
    if (not group.running and unjoinable) or (ends_at is not None and ends_at <= t.lease_time):
        _apply_partial_policy(t, group)
    elif ends_at is not None and ends_at != group.watched_until:
        group.watched_until = ends_at
        state.deadlines.add(ends_at, group.row.group_id)


def _useless_because(state: ServerState, group: Group) -> tuple[DropReason, str | None] | None:
    """Return why no batch will ever use the group, as the ledger reports it; None if a batch may."""
    run, row = state.run, group.row
    assert run is not None
    quarantined = run.row.quarantined.get(row.client_version)
    if quarantined is not None:
        return DropReason.QUARANTINED, quarantined
    mix = run.spec.batch.mix
    if mix and row.mix not in mix:
        return DropReason.SUPERSEDED, f"the run's mix no longer names its family {row.mix!r}"
    lag = run.step + (state.journalled is not None) - group.oldest_step
    if group.ended and lag > run.spec.max_staleness:
        return DropReason.STALE, f"its oldest token is {lag} versions behind"
    return None


def _apply_partial_policy(t: Transition, group: Group) -> None:
    if group.worth_training():
        _make_ready(t, group)
    else:
        drop_group(t, group, DropReason.PARTIAL_GROUP, f"{len(group.ended)} of {group.row.size} slots were filled")


def _make_ready(t: Transition, group: Group) -> None:
    state, run = t.state, t.state.run
    assert run is not None
    if _teaches_nothing(state, group):
        state.flat_groups += 1
        if state.flat_groups == most_flat(run.spec.batch):
            t.say(
                f"{state.flat_groups} groups with equal rewards were dropped: from now on such groups count for the step"
            )
        drop_group(t, group, DropReason.ZERO_VARIANCE)
        return
    group.row.state = "ready"
    state.groups.touch()
    t.changes.append(group.row)
    state.awaited.ready(family_of(group.row.mix, run.spec.batch.mix))
    await_families(t)


def _teaches_nothing(state: ServerState, group: Group) -> bool:
    """True if the batch rule rejects the finished group because its rewards are equal."""
    if state.run is None or state.run.spec.batch.rule != "informative_tasks" or not group.equal_rewards:
        return False
    return state.flat_groups < most_flat(state.run.spec.batch)


def drop_flat(t: Transition) -> None:
    """Drop ready groups with equal rewards, after a patch to a rule that requires different rewards."""
    for group in t.state.groups.ready():
        if _teaches_nothing(t.state, group):
            drop_group(t, group, DropReason.ZERO_VARIANCE)


def drop_group(t: Transition, group: Group, reason: DropReason, detail: str | None = None) -> None:
    """Drop a group and its ended episodes. No episode may be running in it."""
    for row in group.in_slot_order():
        t.state.pooled.pop(row.episode_id, None)
        t.changes.append(SetFate(row.episode_id, EpisodeState.DROPPED, reason, detail=detail))
    t.state.groups.remove(group)
    t.changes.append(group.row)
    if group.ended:
        t.say(
            f"group {group.row.group_id} of task {group.row.task_id!r} dropped: {reason}",
            one_of=f"groups dropped as {reason}",
        )


# -- families ---------------------------------------------------------------------------------------------------------


def await_families(t: Transition, *, rearm: bool = False, held_up: str | None = None) -> None:
    """Find out which families the others wait for.

    Set `rearm` if patience with a family may have changed. `held_up` is a family that may not open a group now.
    """
    state, run = t.state, t.state.run
    if run is None or run.row.status != "running" or not run.spec.batch.mix:
        state.awaited.clear()
        return
    batch, now = run.spec.batch, t.lease_time
    ready = state.groups.ready()
    found = draw(batch, balance_under(run.row.mix, batch.mix), ready, one_batch(batch), state.passed(now))
    missing = set(found.missing)
    done = {family_of(group.row.mix, batch.mix) for group in ready}
    if held_up is not None:
        done.add(held_up)
    early = {family_of(group.row.mix, batch.mix) for group in found.groups} <= missing
    awaited = missing if done - missing else set()
    if early:
        awaited = awaited - {family_of(group.row.mix, batch.mix) for group in state.groups if group.running}
    begun = state.awaited.look(missing, awaited, batch.mix, now, early=early)
    ends_at = state.awaited.ends_at(batch.mix)
    for name in ends_at if rearm else begun:
        state.deadlines.add(ends_at[name], MIX_PATIENCE)


def mix_patience_ended(t: Transition) -> None:
    """If patience with a family has run out, let steps and claims of the other families continue without it."""
    if t.state.run is not None:
        late = t.state.awaited.newly_passed(t.state.run.spec.batch.mix, t.lease_time)
        for name in late:
            t.say(f"family {name!r} keeps the others waiting: they continue without it")
    await_families(t)  # without that family, it may be the turn of another absent family
