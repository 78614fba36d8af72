"""What the book holds in memory (only what is open), and the changes that are decided and not yet on disk.

After a failed write the state is made again from the pool, with the situation and the open leases carried over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foundation.clock import Clock
from foundation.ids import Ids
from swarm.engine.seam import EngineInfo
from swarm.protocol.episodes import Cause, DropReason, EpisodeState
from swarm.protocol.status import Failure, Hang, Phase, WaitingFor
from swarm.server.state.batches import draw, most_flat, one_batch
from swarm.server.state.calls import suspicion
from swarm.server.state.groups import Group, Groups
from swarm.server.state.leases import Deadlines, LeaseClock, LiveEpisode
from swarm.server.state.mix import Awaited, Turns, family_of, in_force
from swarm.server.state.prepared import Prepared
from swarm.server.state.rows import (
    Change,
    EpisodeRow,
    PutEpisode,
    PutGroup,
    PutVersion,
    SetFate,
    Snapshot,
    StepRow,
)
from swarm.server.state.runs import Run
from swarm.server.state.versions import Versions

MIX_PATIENCE = "mix patience"
"""Among the deadlines: the others have waited long enough for a family."""
LEAST_SWEPT = 1024
"""So few deadlines are not worth looking through for those of what is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """A wish to go back to a checkpoint, which the training loop carries out when it is at nothing else."""

    run_id: str
    step: int
    by: str
    key: str | None = None


@dataclass(slots=True, kw_only=True)
class Situation:
    """How the server stands right now: known to this process alone, and independent of what is on disk."""

    lease_clock: LeaseClock
    phase: Phase = Phase.IDLE
    """What the training loop is at; the engine's health overrides it."""
    engine_ready: bool = False
    engine_failed: Failure | None = None
    engine_failures: int = 0
    hang: Hang | None = None
    """The newest one of the engine."""
    opened_run: str | None = None
    """Whose weights the engine serves, at its newest step."""
    run_directory: str = ""
    """Where that run's checkpoints lie."""
    serve_again: bool = False
    """Inference was restarted: the weights must be served again before anything else."""
    collecting_since: float = 0.0
    """Monotonic time since which the next batch is being collected."""
    quiet_since: float = 0.0
    """Unix time of the newest claim, end or step, or anything else that bears on the next step."""
    waiting_for: WaitingFor | None = None
    """What was found then to hold the run up."""
    suspected_at: float = 0.0
    """Unix time at which a client gave up last on a call that the engine may be found to have left without an answer."""
    lived_at: float = 0.0
    """Unix time: whoever gave up before this met no hang. Also on disk, for the time after a restart."""
    no_room: dict[str, Failure] = field(default_factory=dict)
    """What could not be written when it was last tried (`the pool`, `checkpoints`), and why."""
    checkpoint_wanted: bool = False
    restoration: Restoration | None = None

    @property
    def storage_full(self) -> Failure | None:
        return next(iter(self.no_room.values()), None)

    @property
    def shown_phase(self) -> Phase:
        if self.engine_failed is not None:
            return Phase.FAILED
        if not self.engine_ready:
            return Phase.BOOTING
        served = self.opened_run is not None and not self.serve_again
        return Phase.UPDATING if self.phase is Phase.ROLLING and not served else self.phase


@dataclass(slots=True, kw_only=True)
class BookState:
    """The open part of the book."""

    info: EngineInfo
    clock: Clock
    ids: Ids
    situation: Situation
    run: Run | None
    journalled: StepRow | None
    """The step that is journalled and not done."""
    next_episode_seq: int
    next_group_seq: int
    groups_by_task: dict[str, int]
    groups: Groups = field(default_factory=Groups)
    live: dict[str, LiveEpisode] = field(default_factory=dict)
    closing: dict[str, LiveEpisode] = field(default_factory=dict)
    """Closed in memory, not yet on disk."""
    just_closed: list[str] = field(default_factory=list)
    """Those of them whose end is among `changes`."""
    prepared: dict[str, Prepared] = field(default_factory=dict)
    """Bound to the decision of a team."""
    pooled: dict[str, EpisodeRow] = field(default_factory=dict)
    """Ended, not yet in a step."""
    claim_keys: dict[str, str] = field(default_factory=dict)
    """Idempotency key of a claim → its open episode."""
    eval_ordinals: dict[str, set[int]] = field(default_factory=dict)
    """By task: which ordinals at the current step are taken."""
    versions: Versions = field(default_factory=Versions)
    awaited: Awaited = field(default_factory=Awaited)
    deadlines: Deadlines = field(default_factory=Deadlines)
    team_deadlines: Deadlines = field(default_factory=Deadlines)
    sweep_at: int = LEAST_SWEPT
    """With so many deadlines, those of what is closed are forgotten."""
    changes: list[Change] = field(default_factory=list)
    """Decided, not yet given to the pool."""
    log: list[str] = field(default_factory=list)
    """Lines for people, not yet shown."""
    turned: bool = True
    """Something happened that may let a waiting claim in."""
    stirred: bool = True
    """Something happened that the training loop must see."""
    doubted: bool = False
    """A prepared episode must ask its decider."""
    flat_groups: int = 0
    """Dropped for equal rewards since the newest batch was made, or the server started."""

    @classmethod
    def load(
        cls,
        snapshot: Snapshot,
        *,
        info: EngineInfo,
        clock: Clock,
        ids: Ids,
        situation: Situation,
        live: Mapping[str, LiveEpisode],
    ) -> BookState:
        """What the pool holds. Episodes that were running and are not in `live` are closed as server_restarted."""
        run = None
        if snapshot.run is not None:
            run = Run(row=snapshot.run, configs=snapshot.configs, step=snapshot.step, tokens=snapshot.tokens)
        state = cls(
            info=info,
            clock=clock,
            ids=ids,
            situation=situation,
            run=run,
            journalled=snapshot.journalled,
            next_episode_seq=snapshot.next_episode_seq,
            next_group_seq=snapshot.next_group_seq,
            groups_by_task=snapshot.groups_by_task,
            versions=Versions(snapshot.versions),
        )
        for row in snapshot.groups:
            assert run is not None
            # The patience with a group begins anew, also where all its episodes were lost before.
            state.groups.add(Group(row=row, rules=run.specs[row.config_version].batch, last_loss=state.lease_time))
        teams = {team.episode_id: team for team in snapshot.teams}
        for episode in snapshot.episodes:
            if episode.state is EpisodeState.PREPARED:
                state.hold(Prepared(row=episode, team=teams[episode.episode_id], in_doubt=True))
            else:
                state._take_in(episode, live.get(episode.episode_id))
        state.number_evals(snapshot.eval_ordinals)
        # Only now, with every slot accounted for, may closing one episode decide about its group.
        for lost in [taken for taken in state.live.values() if taken.row.episode_id not in live]:
            state.close(lost, DropReason.SERVER_RESTARTED, cause=Cause.SERVER)
        state.settle_all()
        return state

    def _take_in(self, row: EpisodeRow, live: LiveEpisode | None) -> None:
        now = self.lease_time
        group = self.groups.get(row.group_id) if row.group_id else None
        if group is not None:
            group.clients.add(row.client_id)
        if row.state is EpisodeState.ENDED:
            assert group is not None
            assert row.slot is not None
            group.ended[row.slot] = row
            group.last_end = now
            self.pooled[row.episode_id] = row
            return
        if group is not None and row.slot is not None:
            group.running[row.slot] = row.episode_id
        taken = live or LiveEpisode(row=row, lease="", idle_limit_s=0.0, idle_at=now)
        taken.row, taken.cached_entry = row, None
        self.live[row.episode_id] = taken
        if live is None:
            return
        self.deadlines.add(live.look_at(now), row.episode_id)
        if live.claim_key is not None:
            self.claim_keys[live.claim_key] = row.episode_id

    def number_evals(self, ended: Sequence[tuple[str, int]]) -> None:
        """The numbers (by task) of evaluations at the current step are taken: of those that `ended`, and of all open ones."""
        rows = [live.row for live in self.live.values()] + [prepared.row for prepared in self.prepared.values()]
        rows = [row for row in rows if row.kind == "eval" and row.reason is None and self._at_this_step(row)]
        held = [(row.task_id, row.ordinal) for row in rows]
        for task_id, ordinal in (*ended, *held):
            self.eval_ordinals.setdefault(task_id, set()).add(ordinal)

    def hold(self, prepared: Prepared) -> None:
        """A prepared episode keeps its slot. The patience with its client begins now."""
        row = prepared.row
        group = self.groups.get(row.group_id) if row.group_id else None
        if group is not None and row.slot is not None:
            group.clients.add(row.client_id)
            group.running[row.slot] = row.episode_id
        self.prepared[row.episode_id] = prepared
        prepared.touch(self.lease_time)
        self.team_deadlines.add(prepared.silent_at, row.episode_id)
        self.doubted = self.doubted or prepared.asks

    @property
    def next_deadline(self) -> float | None:
        """Lease time at which something must be looked at."""
        times = [at for at in (self.deadlines.next(), self.team_deadlines.next()) if at is not None]
        return min(times, default=None)

    @property
    def lease_time(self) -> float:
        return self.situation.lease_clock.time()

    @property
    def serving(self) -> bool:
        """Whether the engine samples from the current run's weights."""
        situation = self.situation
        ready = situation.engine_ready and not situation.serve_again
        return ready and self.run is not None and situation.opened_run == self.run.run_id

    @property
    def trained_from(self) -> int:
        """The step of the weights that the next batch will be trained from."""
        assert self.run is not None
        return self.run.step + (self.journalled is not None)

    def passed(self) -> frozenset[str]:
        """Families whose patience ran out."""
        mix = self.run.spec.batch.mix if self.run is not None else {}
        return self.awaited.passed(mix, self.lease_time)

    def debts(self) -> dict[str, float]:
        """Groups that each family of the run's mix is behind; empty without a mix."""
        if self.run is None or not self.run.spec.batch.mix:
            return {}
        return Turns(in_force(self.run.row.mix, self.run.spec.batch.mix)).debts()

    def take_changes(self) -> list[Change]:
        """What must be written next, whole or not at all."""
        changes, self.changes = self.changes, []
        return changes

    def take_closed(self) -> list[str]:
        """Episodes of which `changes` has the end: to be forgotten when it is on disk."""
        closed, self.just_closed = self.just_closed, []
        return closed

    # -- transitions ------------------------------------------------------------------------------------------------

    def close(self, live: LiveEpisode, reason: DropReason, detail: str | None = None, *, cause: Cause | None) -> None:
        """Close an open episode as dropped; a slot it held is offered again. cause: None for an evaluation that ended."""
        live.entry()  # counts the tokens of its calls
        row = live.row
        row.state, row.reason, row.detail, row.cause = EpisodeState.DROPPED, reason, detail, cause
        self.leave(live)
        self.drop(row)

    def drop(self, row: EpisodeRow) -> None:
        """An episode that was not yet in the pool is dropped, as its row says already; a slot it held is offered again."""
        self.changes.append(PutEpisode(row))
        group = self.groups.get(row.group_id) if row.group_id else None
        if group is not None and row.slot is not None:
            group.running.pop(row.slot, None)
            group.last_loss = self.lease_time
            self.turned = True
            self.settle(group)
            self._look_at_rest(group)
        self._free_number(row)

    def _free_number(self, row: EpisodeRow) -> None:
        """An evaluation that does not count gives its number back."""
        taken = self.eval_ordinals.get(row.task_id)
        if row.kind == "eval" and taken is not None and row.reason is not DropReason.EVAL and self._at_this_step(row):
            taken.discard(row.ordinal)

    def drop_tainted(self, row: EpisodeRow, detail: str) -> None:
        """An episode that ended, and that no step has taken, is found to be tainted: its slot is offered again."""
        row.state, row.reason, row.detail = EpisodeState.DROPPED, DropReason.TAINTED, detail
        row.cause = Cause.SERVER
        self.log.append(f"episode {row.episode_id} of {row.client_id} is dropped as tainted: {detail}")
        if self.pooled.pop(row.episode_id, None) is None:
            self.changes.append(PutEpisode(row))
            self._free_number(row)
            return
        group = self.groups.get(row.group_id or "")
        if group is not None and row.slot is not None:
            del group.ended[row.slot]
            if not group.open:
                group.row.state = "open"
                self.changes.append(PutGroup(group.row))
                self.groups.touch()
        self.drop(row)

    def leave(self, live: LiveEpisode) -> None:
        """Take an episode out of the open ones; its row says already how it ended."""
        row = live.row
        row.ended_at = self.clock.now()
        row.suspected = suspicion(live.attempts)
        self.live.pop(row.episode_id, None)
        self.closing[row.episode_id] = live
        live.ending.come()
        self.just_closed.append(row.episode_id)
        if live.claim_key is not None:
            self.claim_keys.pop(live.claim_key, None)
        if self.run is not None and row.run_id == self.run.run_id:
            self.run.tokens += row.sampled_tokens
        self.stirred = True
        self._sweep_deadlines()

    def _sweep_deadlines(self) -> None:
        """A closed episode's deadline may be a day ahead: at the latest when most are such, all of them are forgotten."""
        if len(self.deadlines) >= self.sweep_at:
            self.deadlines.keep(
                lambda name: name in self.live or self.groups.get(name) is not None or name == MIX_PATIENCE
            )
            self.sweep_at = max(LEAST_SWEPT, 2 * len(self.deadlines))

    def _at_this_step(self, row: EpisodeRow) -> bool:
        return self.run is not None and row.run_id == self.run.run_id and row.claimed_step == self.run.step

    def enter_pool(self, row: EpisodeRow, group: Group) -> None:
        """An episode that has its reward fills the slot that it held."""
        assert row.slot is not None
        row.state = EpisodeState.ENDED
        self.changes += [PutEpisode(row), PutVersion(self.versions.rewarded(row, self.clock.now()))]
        self.pooled[row.episode_id] = row
        del group.running[row.slot]
        group.ended[row.slot] = row
        group.last_end = self.lease_time
        if self.run is not None:
            self.awaited.delivered(family_of(group.row.mix, self.run.spec.batch.mix))
        self.settle(group)
        self._look_at_rest(group)

    def _look_at_rest(self, group: Group) -> None:
        """Nothing runs in it any more, and it is not ready: who waits for its family may begin to count."""
        if self.run is not None and self.run.spec.batch.mix and not group.running and group.row.state != "ready":
            self.groups.touch()  # so that waiting claims ask again
            self.turned = True
            self.look_at_mix()

    def play(self, group: Group, slot: int, episode_id: str) -> None:
        """An episode takes a slot."""
        group.running[slot] = episode_id
        if self.run is not None:
            mix = self.run.spec.batch.mix
            self.awaited.played(family_of(group.row.mix, mix), mix, self.lease_time)

    def leave_behind(self, client_id: str, client_version: str) -> None:
        """A client comes with a version of its code that has no group to join: it will not claim in groups of others."""
        if not self.groups.has_other(client_version):
            return
        for group in self.groups:
            if group.open and client_id in group.clients and group.row.client_version != client_version:
                group.left.add(client_id)
                self.groups.touch()
                self.settle(group)

    def settle_all(self) -> None:
        """See to every group after a change that may bear on any."""
        for group in self.groups:
            self.settle(group)
        self.look_at_mix(rearm=True)

    def settle(self, group: Group) -> None:
        """See whether a group that changed is of use, ready, or out of patience; else look again when patience runs out."""
        self.stirred = True
        verdict = self._useless_because(group)
        if group.useless != (verdict is not None):
            group.useless = verdict is not None
            self.groups.touch()
            self.turned = True
        if verdict is not None and not group.running:
            self.drop_group(group, *verdict)
        if verdict is not None or not group.open:
            return
        if group.full:
            self._make_ready(group)
            return
        assert self.run is not None
        closed = group.forsaken or group.row.config_version != self.run.config_version
        if not group.running and closed:
            self._resolve(group)  # no claim can join it any more
            return
        ends_at = group.patience_ends_at()
        if ends_at is None:
            return
        if ends_at <= self.lease_time:
            self._resolve(group)
        else:
            self.deadlines.add(ends_at, group.row.group_id)

    def _useless_because(self, group: Group) -> tuple[DropReason, str | None] | None:
        """Why no batch will ever take it, in the ledger's words; None when one may."""
        run, row = self.run, group.row
        assert run is not None
        quarantined = run.row.quarantined.get(row.client_version)
        if quarantined is not None:
            return DropReason.QUARANTINED, quarantined
        mix = run.spec.batch.mix
        if mix and row.mix not in mix:
            return DropReason.SUPERSEDED, f"the run's mix does not name its family {row.mix!r} any more"
        lag = self.trained_from - group.oldest_step
        if group.ended and lag > run.spec.max_staleness:
            return DropReason.STALE, f"its oldest token is {lag} versions behind"
        return None

    def _teaches_nothing(self, group: Group) -> bool:
        """Whether the batch rule has no use for it, as it ended."""
        if self.run is None or self.run.spec.batch.rule != "informative_tasks" or not group.equal_rewards:
            return False
        return self.flat_groups < most_flat(self.run.spec.batch)

    def drop_flat(self) -> None:
        """Drop groups that were ready before the rule asked for differences."""
        for group in self.groups.ready():
            if self._teaches_nothing(group):
                self.drop_group(group, DropReason.ZERO_VARIANCE)

    def look_at_mix(self, *, rearm: bool = False, held_up: str | None = None) -> None:
        """See which families the others wait for. rearm: patience may have been changed. held_up: may open no group now."""
        run = self.run
        if run is None or run.row.status != "running" or not run.spec.batch.mix:
            self.awaited.clear()
            return
        batch, now = run.spec.batch, self.lease_time
        balance = in_force(run.row.mix, batch.mix)
        found = draw(batch, balance, self.groups.ready(), one_batch(batch), self.passed())
        missing = set(found.missing)
        done = {family_of(group.row.mix, batch.mix) for group in self.groups.ready()}
        if held_up is not None:
            done.add(held_up)
        early = {family_of(group.row.mix, batch.mix) for group in found.groups} <= missing
        awaited = missing if done - missing else set()
        if early:
            awaited = awaited - {family_of(group.row.mix, batch.mix) for group in self.groups if group.running}
        begun = self.awaited.look(missing, awaited, batch.mix, now, early=early)
        ends_at = self.awaited.ends_at(batch.mix)
        for name in ends_at if rearm else begun:
            self.deadlines.add(ends_at[name], MIX_PATIENCE)

    def mix_patience_ended(self) -> None:
        """Somebody's patience may have run out: steps and claims of the others may go on."""
        self.turned = self.stirred = True
        if self.run is not None:
            late = self.awaited.newly_passed(self.run.spec.batch.mix, self.lease_time)
            self.log += [f"family {name!r} keeps the others waiting: they go on without it" for name in late]
        self.look_at_mix()  # without it, the turn may be of another that is not there

    def _resolve(self, group: Group) -> None:
        """The partial policy."""
        if group.worth_training():
            self._make_ready(group)
            return
        detail = f"{len(group.ended)} of {group.row.size} slots were filled"
        self.drop_group(group, DropReason.PARTIAL_GROUP, detail)

    def _make_ready(self, group: Group) -> None:
        assert self.run is not None
        if self._teaches_nothing(group):
            self.flat_groups += 1
            if self.flat_groups == most_flat(self.run.spec.batch):
                self.log.append(
                    f"{self.flat_groups} groups of equal rewards were dropped: from here on they fill the step"
                )
            self.drop_group(group, DropReason.ZERO_VARIANCE)
            return
        group.row.state = "ready"
        self.groups.touch()
        self.turned = True
        self.changes.append(PutGroup(group.row))
        self.awaited.ready(family_of(group.row.mix, self.run.spec.batch.mix))
        self.look_at_mix()

    def drop_group(self, group: Group, reason: DropReason, detail: str | None = None) -> None:
        """Drop what ended in it. Nothing of it may run."""
        for row in group.in_slot_order():
            self.pooled.pop(row.episode_id, None)
            self.changes.append(SetFate(row.episode_id, EpisodeState.DROPPED, reason, detail=detail))
        self.groups.remove(group)
        self.changes.append(PutGroup(group.row))
        self.turned = True
        if group.ended:
            self.log.append(f"group {group.row.group_id} of task {group.row.task_id!r} dropped: {reason}")
