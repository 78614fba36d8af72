"""Exactly once, durably (invariants I2, I3, I4): the state machine over real storage, with a crash possible at every write.

A model-based test. The process may die before a write is on disk, or after it and before anyone was answered, or the disk may be
full; the trainer may die at any time and go back to its newest checkpoint; an operator may go back to one on purpose. Families
of tasks, partial groups, stale groups and quarantined code are all in play. Whatever happens:
- an acknowledged end is never lost, and a repeated one is recognised;
- every ended episode is in exactly one step of the surviving history, or in the ledger with its reason;
- nothing under a lost lease changes anything;
- a replay uses the recorded batches;
- groups enter steps in the turns of their families while nobody's patience ran out, and none is too stale;
- no episode that a restore superseded is ever trained;
- of two processes of one client only the newer holds episodes;
- whether its task was named at the claim or at the end, an episode has its slot for itself.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from foundation.clock import ManualClock
from foundation.ids import SeededIds
from foundation.paths import memory_dir
from swarm.engine.seam import StepOutcome, TrainBatch
from swarm.protocol.episodes import (
    DropReason,
    EpisodeClaim,
    EpisodeGrant,
    EpisodeResult,
    EpisodeState,
    RecordedCall,
    RecordedSampling,
    SessionRequest,
    VersionSpan,
)
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.runspec import BatchSpec, CheckpointSpec, LimitSpec, MixSpec, RunSpec
from swarm.protocol.summary import LedgerFilter
from swarm.server.state import claims, episodes, health, run_lifecycle, steps
from swarm.server.state.batching import Turns, balance_after, balance_under
from swarm.server.state.calls import Ending
from swarm.server.state.claim_queue import NotYet
from swarm.server.state.episodes import late_end
from swarm.server.state.machine import Command, load
from swarm.server.state.rows import StepRow
from swarm.server.state.server_state import Restoration, ServerState
from swarm.server.state.steps import Duty
from swarm.server.state.ungrouped import GuestClaim
from swarm.server.storage.replay import past_mix, recorded_batch
from swarm.server.storage.store import Store
from tests.swarm.server.state.process import INFO, Died, Process

T = TypeVar("T")
FATES = st.sampled_from(["written"] * 30 + ["full", "dies before", "dies after"])
MACHINE_FATES = st.sampled_from(["written"] * 9 + ["full", "dies before", "dies after"])
ALL = LedgerFilter()


@dataclass
class Lease:
    """What a client holds: a granted episode, and whether it may still think so."""

    granted: EpisodeGrant
    kind: str
    calls: int = 0
    ended_with: EpisodeResult | None = None
    acknowledged: bool = False
    session: str | None = None
    gone: bool = False
    """Ended, aborted, expired or closed by a restart."""


@dataclass
class Trainer:
    """The history that stands: what each step was made of. Checkpoints survive its death."""

    run_id: str = ""
    made: list[TrainBatch] = field(default_factory=list)
    branch: int = 0
    kept: dict[str, dict[int, list[TrainBatch]]] = field(default_factory=dict)
    branches: dict[tuple[str, int], int] = field(default_factory=dict)
    """On which branch each kept checkpoint was written."""

    def open(self, run_id: str, branch: int, at_step: int | None) -> int:
        checkpoints = self.kept.setdefault(run_id, {})
        if at_step is not None:
            for later in [step for step in checkpoints if step > at_step and self.branches[run_id, step] < branch]:
                del checkpoints[later]
        step = max(checkpoints, default=0) if at_step is None else at_step
        self.branch = branch
        self.run_id, self.made = run_id, list(checkpoints.get(step, []))
        return step

    def train(self, batch: TrainBatch) -> StepOutcome:
        assert batch.step == len(self.made) + 1, "steps are made in order, from where the weights stand"
        self.made.append(batch)
        equal = [group for group in batch.groups if len({episode.reward for episode in group.episodes}) == 1]
        untrained = {episode.episode_id: "zero_variance" for group in equal for episode in group.episodes}
        return StepOutcome(step=batch.step, metrics={"reward_mean": 0.5}, untrained=untrained)

    def checkpoint(self, keep: int) -> int:
        checkpoints = self.kept.setdefault(self.run_id, {})
        checkpoints[len(self.made)] = list(self.made)
        self.branches[self.run_id, len(self.made)] = self.branch
        for step in sorted(checkpoints)[:-keep]:
            del checkpoints[step]
        return len(self.made)


class ExactlyOnce(RuleBasedStateMachine):
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=memory_dir())
        self.clock = ManualClock()
        self.ids = SeededIds(1)
        self.trainer = Trainer()
        self.first_batches: dict[tuple[str, int, int], TrainBatch] = {}
        self.batch_of: dict[str, tuple[str, int, int]] = {}
        self.held: dict[str, Lease] = {}
        self.process = Process(Path(self.folder.name) / "pool.sqlite", self.clock, self.ids)

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    # -- the process ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> ServerState:
        return self.process.state

    @property
    def store(self) -> Store:
        return self.process.store

    def carry_out(self, fate: str, command: Command[T]) -> T:
        try:
            return self.process.carry_out(fate, command)
        except Died:
            for lease in self.held.values():
                lease.gone = True
            raise

    def survives(self, fate: str, action: Command[T]) -> T | None:
        """The result, or None when there was no answer."""
        try:
            return self.carry_out(fate, action)
        except Died:
            return None
        except Refusal as refusal:
            if refusal.code is not ErrorCode.STORAGE_FULL:
                raise
            return None

    # -- clients ----------------------------------------------------------------------------------------------------

    @initialize(
        staleness=st.integers(0, 2),
        rule=st.sampled_from(["tasks", "informative_tasks", "episodes"]),
        every=st.integers(1, 3),
        mix=st.sampled_from([{}, {}, {"a": 1, "b": 1}, {"a": 1, "b": 2}]),
        partial=st.sampled_from(["drop", "train"]),
    )
    def begin(self, staleness: int, rule: str, every: int, mix: dict[str, float], partial: str) -> None:
        self.spec = RunSpec(
            batch=BatchSpec(
                rule=rule,
                tasks=2,
                episodes=3,
                group_size=2,
                group_patience_s=50,
                partial_groups=partial,
                partial_min=1,
                max_pool_episodes=8,
                mix={name: MixSpec(ratio=ratio, patience_s=40) for name, ratio in mix.items()},
            ),
            max_staleness=staleness,
            checkpoint=CheckpointSpec(every_steps=every, keep=2),
            limits=LimitSpec(drain_limit_s=20),
        )
        self.create("written")

    def create(self, fate: str) -> None:
        self.survives(fate, lambda t: run_lifecycle.create(t, self.spec, by="me", key=None, request_digest=""))
        self.forget_lost()

    @rule(fate=FATES)
    def replace_run(self, fate: str) -> None:
        run = self.state.run
        if run is not None and run.row.status != "running":
            self.create(fate)

    @rule(
        target=leases,
        fate=FATES,
        task=st.sampled_from(["a", "b", "a", "b", ""]),
        kind=st.sampled_from(["train"] * 5 + ["eval"]),
        version=st.sampled_from("1112"),
        session=st.sampled_from([None, "older", "newer"]),
    )
    def claim(self, fate: str, task: str, kind: str, version: str, session: str | None) -> Lease | None:
        return self.claimed(fate, task, kind, version, session)

    @rule(fate=FATES, session=st.sampled_from(["older", "newer"]))
    def begin_session(self, fate: str, session: str) -> None:
        """A process of the client starts; the other may live on."""
        run = self.state.run
        wanted = SessionRequest(run_id=run.run_id if run else "none", client_id="me", session=session)
        closed = self.survives(fate, lambda t: episodes.begin_session(t, wanted))
        for episode_id in closed or ():
            assert self.held[episode_id].session not in (None, session)
        self.forget_lost()

    def claimed(self, fate: str, task: str, kind: str, version: str, session: str | None = None) -> Lease | None:
        run = self.state.run
        claim = (EpisodeClaim if task else GuestClaim)(
            run_id=run.run_id if run else "none",
            client_id="me",
            client_version=version,
            kind=kind,
            task_id=task,
            mix=task or None,
            idle_limit_s=100,
            session=session,
        )
        fenced = session is not None and self.state.sessions.get("me") != session
        try:
            granted = self.survives(fate, lambda t: claims.claim(t, claim))
        except Refusal as refusal:
            quarantined = (ErrorCode.FORBIDDEN,) if version == "2" and kind == "train" else ()
            shut_out = (ErrorCode.LEASE_LOST,) if fenced else ()
            of_no_family = (ErrorCode.INVALID_SPEC,) if self.spec.batch.mix and kind == "train" and not task else ()
            others = (*quarantined, *shut_out, *of_no_family)
            refused_with(refusal, ErrorCode.OVER_LIMIT, ErrorCode.NOT_FOUND, ErrorCode.ENGINE_FAILED, *others)
            return None
        assert not fenced or granted is None
        if granted is None or isinstance(granted, NotYet):
            return None
        lease = Lease(granted=granted, kind=kind, session=session)
        self.held[granted.episode_id] = lease
        return lease

    @rule(lease=leases, fate=FATES)
    def call_model(self, lease: Lease | None, fate: str) -> None:
        if lease is not None:
            self.called(lease, fate)

    def called(self, lease: Lease, fate: str) -> None:
        granted = lease.granted
        try:
            call = self.survives(fate, lambda t: episodes.open_call(t, granted.episode_id, granted.lease, Ending()))
        except Refusal as refusal:
            refused_with(refusal, ErrorCode.LEASE_LOST, ErrorCode.NOT_FOUND)
            assert lease.gone
            return
        if call is None:
            return
        assert call.index == len(call.earlier) == lease.calls
        record = recorded(granted.episode_id, call.index, call.weights_version)
        if self.process.tell(lambda t: episodes.close_call(t, call, [record])):
            lease.calls += 1

    @rule(lease=leases, fate=FATES, reward=st.sampled_from([0.0, 1.0]), keyed=st.booleans())
    def end(self, lease: Lease | None, fate: str, reward: float, keyed: bool) -> None:
        if lease is not None:
            self.ended(lease, fate, reward, keyed)

    def ended(self, lease: Lease, fate: str, reward: float, keyed: bool) -> None:
        granted = lease.granted
        result = lease.ended_with or EpisodeResult(
            lease=granted.lease, reward=reward, idempotency_key=f"end {granted.episode_id}" if keyed else None
        )
        if not self.process.is_open(granted.episode_id):
            self.end_again(lease, result)
            return
        live = self.state.live[granted.episode_id]
        ran_out = live.ran_out(self.state.situation.lease_clock.time(self.clock.monotonic()))
        lease.ended_with = None if ran_out else result
        task = None if live.row.task_id else "ab"[int(result.reward)]
        try:
            receipt = self.survives(fate, lambda t: episodes.end(t, granted.episode_id, result, task))
        except Refusal as refusal:  # that it ran out could not be written when its time came
            refused_with(refusal, ErrorCode.LEASE_LOST)
            assert ran_out
            self.forget_lost()
            return
        if receipt is not None:
            assert receipt.status == "pooled"
            lease.acknowledged = lease.gone = True

    def end_again(self, lease: Lease, result: EpisodeResult) -> None:
        """Ends for closed episodes: recognised when they ended so, refused when they did not. Nothing changes."""
        before = self.whole_ledger()
        row = self.store.read.episode(lease.granted.episode_id)
        try:
            receipt = late_end(row, lease.granted.episode_id, result)
        except Refusal as refusal:
            refused_with(refusal, ErrorCode.LEASE_LOST, ErrorCode.NOT_FOUND)
            assert not lease.acknowledged
        else:
            assert receipt.status == "already_ended"
            assert lease.ended_with == result
            lease.acknowledged = lease.gone = True
        assert self.whole_ledger() == before

    @rule(
        fates=st.tuples(FATES, FATES, FATES, FATES, MACHINE_FATES, MACHINE_FATES),
        task=st.sampled_from(["a", "b", "a", "b", ""]),
        rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=2),
    )
    def try_a_task(self, fates: tuple[str, ...], task: str, rewards: list[float]) -> None:
        """A client that goes through with it, twice; both at once where it names the task at the end."""
        if self.state.situation.opened_run is None:
            self.one_duty("written", "written")
        plays = list(zip(rewards, fates[::2], fates[1::2], strict=False))
        for played in [[each] for each in plays] if task else [plays]:
            leases = [self.claimed(fate, task, "train", "1") for _, fate, _ in played]
            for lease, (reward, _, later) in zip(leases, played, strict=True):
                if lease is not None:
                    self.called(lease, "written")
                    self.ended(lease, later, reward, keyed=False)
        self.one_duty(fates[4], fates[5])

    @rule(lease=leases, fate=FATES)
    def abort(self, lease: Lease | None, fate: str) -> None:
        if lease is None or not self.process.is_open(lease.granted.episode_id):
            return
        granted = lease.granted
        self.survives(fate, lambda t: episodes.abort(t, granted.episode_id, granted.lease, "changed my mind"))
        self.forget_lost()

    @rule(lease=leases, reward=st.sampled_from([0.0, 1.0]))
    def use_a_forged_lease(self, lease: Lease | None, reward: float) -> None:
        if lease is None or not self.process.is_open(lease.granted.episode_id):
            return
        before = self.whole_ledger()
        forged = EpisodeResult(lease="swl_forged", reward=reward)
        with pytest.raises(Refusal) as caught:
            self.carry_out("written", lambda t: episodes.end(t, lease.granted.episode_id, forged))
        assert caught.value.code is ErrorCode.LEASE_LOST
        self.forget_lost()
        if not lease.gone:
            assert self.whole_ledger() == before

    @rule(lease=consumes(leases))
    def walk_away(self, lease: Lease | None) -> None:
        """The client forgets that it ever claimed."""

    @rule(seconds=st.sampled_from([1.0, 30.0, 60.0, 101.0]), fate=FATES)
    def time_passes(self, seconds: float, fate: str) -> None:
        self.clock.advance(seconds)
        self.survives(fate, episodes.expire)
        self.forget_lost()

    def forget_lost(self) -> None:
        for episode_id, lease in self.held.items():
            if not self.process.is_open(episode_id):
                lease.gone = True

    # -- operators and machines ---------------------------------------------------------------------------------------

    @rule(fate=FATES, rate=st.sampled_from([1e-5, 3e-5]))
    def patch(self, fate: str, rate: float) -> None:
        run = self.state.run
        if run is not None and run.row.status == "running":
            change = {"optimizer": {"learning_rate": rate}}
            self.survives(fate, lambda t: run_lifecycle.patch(t, change, if_match=None, by="me"))

    @rule(fate=FATES, really=st.integers(0, 7))
    def stop(self, fate: str, really: int) -> None:
        if really == 7:
            self.survives(fate, run_lifecycle.request_stop)

    @rule(fate=FATES, wanted=st.booleans(), really=st.integers(0, 2))
    def quarantine(self, fate: str, wanted: bool, really: int) -> None:
        run = self.state.run
        if run is not None and run.row.status == "running" and really == 2:
            self.survives(fate, lambda t: run_lifecycle.quarantine(t, "2", wanted=wanted, reason="", by="me"))

    @rule(newest=st.booleans(), really=st.integers(0, 2))
    def restore(self, newest: bool, really: int) -> None:
        """Wished for; the training_loop does it."""
        run = self.state.run
        if run is not None and really == 2:
            kept = [0, *run.row.checkpoints]
            wish = Restoration(run_id=run.run_id, step=kept[-1 if newest else 0], by="me")
            try:
                self.process.tell(lambda t: run_lifecycle.want_restoration(t, wish))
            except Refusal as refusal:
                refused_with(refusal, ErrorCode.OVER_LIMIT, ErrorCode.SERVER_BUSY)

    @rule(really=st.integers(0, 5))
    def kill_everything(self, really: int) -> None:
        if really == 5:
            self.process.die()
            for lease in self.held.values():
                lease.gone = True

    @rule(really=st.integers(0, 3))
    def kill_trainer(self, really: int) -> None:
        if really == 3:
            self.process.tell(lambda t: health.engine_opened(t, None))

    @rule(fate=FATES, reason=st.just("the loss was not finite"))
    @precondition(lambda self: self.state.run is not None and self.state.run.step >= 4)
    def fail(self, fate: str, reason: str) -> None:
        if self.state.run is not None and self.state.run.row.status == "running":
            self.survives(fate, lambda t: run_lifecycle.fail(t, reason))
            self.forget_lost()

    @rule(fates=st.lists(MACHINE_FATES, min_size=6, max_size=6))
    def conduct(self, fates: list[str]) -> None:
        """Some duties of the training_loop."""
        for fate, later in zip(fates[::2], fates[1::2], strict=True):
            self.one_duty(fate, later)

    def one_duty(self, fate: str, later: str) -> None:
        """The training_loop dies with the process."""
        duty = steps.next_duty(self.state, self.process.now).duty
        run = self.state.run
        try:
            if duty is Duty.RESTORE:
                self.go_back(fate)
            elif duty is Duty.OPEN:
                self.open(fate)
            elif duty is Duty.STEP:
                self.make(self.journalled(fate), later)
            elif duty is Duty.CHECKPOINT:
                self.checkpoint(fate)
            elif duty is Duty.STOP:
                if run is not None and run.step > run.kept_step:
                    self.checkpoint(fate)
                self.carry_out(later, run_lifecycle.stop)
                self.forget_lost()
        except Died:
            pass
        except Refusal as refusal:
            refused_with(refusal, ErrorCode.STORAGE_FULL)

    def go_back(self, fate: str) -> None:
        wish, run = self.state.situation.restoration, self.state.run
        assert wish is not None
        assert run is not None
        mix = past_mix(self.store.read, wish.run_id, run.specs, wish.step)
        try:
            ended = self.store.read.eval_ordinals(wish.run_id, wish.step)
            self.carry_out(fate, lambda t: run_lifecycle.restore(t, wish, mix, ended))
        except Refusal as refusal:
            refused_with(refusal, ErrorCode.STORAGE_FULL, ErrorCode.OVER_LIMIT, ErrorCode.NOT_FOUND)
            if refusal.code is ErrorCode.STORAGE_FULL:
                raise
        self.process.tell(run_lifecycle.restoration_over)
        self.forget_lost()

    def journalled(self, fate: str) -> StepRow:
        """The next step's row. Its groups stand in the turns of their families, and none is too stale."""
        state = self.state
        run = state.run
        assert run is not None
        mix, balance = run.spec.batch.mix, run.row.mix
        passed = state.passed(state.situation.lease_clock.time(self.clock.monotonic()))
        row = self.carry_out(fate, steps.journal)
        assert row.values["staleness_max"] <= self.spec.max_staleness
        labels = [self.store.read.mixes(row.run_id)[group.group_id] for group in row.groups]
        for label in labels if mix and not passed else ():
            turns = Turns(balance_under(balance, mix))
            assert label == turns.whose(mix)
            balance = balance_after(balance, mix, [label])
        return row

    def open(self, fate: str) -> None:
        run = self.state.run
        assert run is not None
        begins = run.row.branch > 0 and run.kept_step == run.row.branched_at
        at = self.trainer.open(run.run_id, run.row.branch, run.kept_step if begins else None)
        if at > run.kept_step:
            self.certainly(fate, lambda t: steps.checkpointed(t, run.run_id, at))
        for row in self.store.read.steps(run.run_id, at):
            if row.state == "done":
                self.trainer.train(self.batch(row))
        if self.state.journalled is not None:
            self.make(self.state.journalled, fate)
        self.process.tell(lambda t: health.engine_opened(t, run.run_id))

    def make(self, row: StepRow, fate: str) -> None:
        outcome = self.trainer.train(self.batch(row))
        steps.judge_outcome(self.state.journalled, outcome)
        self.certainly(fate, lambda t: steps.record(t, outcome, train_s=1.0, sync_s=0.1))

    def checkpoint(self, fate: str) -> None:
        step = self.trainer.checkpoint(self.spec.checkpoint.keep)
        self.certainly(fate, lambda t: steps.checkpointed(t, self.trainer.run_id, step))

    def certainly(self, fate: str, action: Command[None]) -> None:
        """What the engine has done is written down again and again while the disk is full."""
        try:
            self.carry_out(fate, action)
        except Refusal:
            self.carry_out("written", action)

    def batch(self, row: StepRow) -> TrainBatch:
        """What is trained. The same as the first time, to the last token."""
        run = self.state.run
        assert run is not None
        batch = recorded_batch(self.store.read, row, run.specs)
        place = (run.run_id, row.branch, row.step)
        first = self.first_batches.setdefault(place, batch)
        assert batch == first
        for group in batch.groups:
            for episode in group.episodes:
                assert self.batch_of.setdefault(episode.episode_id, place) == place
        return batch

    # -- what must hold -------------------------------------------------------------------------------------------------

    def whole_ledger(self) -> list[object]:
        return list(self.store.read.ledger(ALL, 0, 100_000))

    @invariant()
    def acknowledged_ends_are_never_lost(self) -> None:
        for episode_id, lease in self.held.items():
            if lease.acknowledged:
                row = self.store.read.episode(episode_id)
                assert row is not None
                assert lease.ended_with is not None
                assert row.reward == lease.ended_with.reward
                assert row.state is not EpisodeState.RUNNING
                assert row.reason not in (DropReason.ABORTED, DropReason.EXPIRED, DropReason.SERVER_RESTARTED)

    @invariant()
    def one_process_of_a_client_holds_episodes(self) -> None:
        holders = {live.session for live in self.state.live.values() if live.session is not None}
        assert holders <= {self.state.sessions.get("me")}

    @invariant()
    def every_episode_is_in_one_place(self) -> None:
        snapshot = self.store.read.snapshot()
        run = snapshot.run
        in_batches: dict[str, tuple[str, int]] = {}
        for run_id in {row.run_id for row in self.store.read.ledger(ALL, 0, 100_000)}:
            for step in self.store.read.steps(run_id, 0):
                for group in step.groups:
                    for episode_id in group.episode_ids:
                        assert episode_id not in in_batches, "an episode is in one batch at most"
                        in_batches[episode_id] = (run_id, step.step)
        for row in self.store.read.ledger(ALL, 0, 100_000):
            assert (row.state is EpisodeState.DROPPED) == (row.reason is not None)
            if row.state in (EpisodeState.IN_STEP, EpisodeState.TRAINED):
                assert in_batches[row.episode_id] == (row.run_id, row.step)
            elif row.state is EpisodeState.ENDED:
                assert row.episode_id not in in_batches
                assert run is not None
                assert run.status == "running"
            elif row.reason is not DropReason.RUN_ENDED and row.reason is not DropReason.ZERO_VARIANCE:
                assert row.episode_id not in in_batches

    @invariant()
    def what_is_trained_for_good_is_in_a_checkpoint(self) -> None:
        for row in self.store.read.ledger(LedgerFilter(state=EpisodeState.TRAINED), 0, 100_000):
            newest = self.trainer.kept[row.run_id]
            history = newest[max(newest)]
            assert row.step is not None
            trained = [e.episode_id for group in history[row.step - 1].groups for e in group.episodes]
            assert row.episode_id in trained

    @invariant()
    def the_trainer_stands_where_the_journal_stands(self) -> None:
        run = self.state.run
        if run is not None and self.state.situation.opened_run == run.run_id:
            assert [batch.step for batch in self.trainer.made] == list(range(1, run.step + 1))
            rows = {row.step: row for row in self.store.read.steps(run.run_id, 0)}
            for batch in self.trainer.made:
                ids = [[e.episode_id for e in group.episodes] for group in batch.groups]
                assert ids == [group.episode_ids for group in rows[batch.step].groups]

    @invariant()
    def memory_is_what_the_pool_would_tell_again(self) -> None:
        state = self.state
        again = ServerState(info=INFO, ids=self.ids, situation=replace(state.situation), live=dict(state.live))
        assert not load(again, self.store.read.snapshot(), self.process.now).changes
        assert set(again.live) == set(state.live)
        assert set(again.pooled) == set(state.pooled)
        assert [group.row for group in again.groups] == [group.row for group in state.groups]
        assert [group.running for group in again.groups] == [group.running for group in state.groups]
        assert again.groups.ungrouped == state.groups.ungrouped
        open_ones = [live.row for live in state.live.values() if live.row.kind == "train"]
        assert state.groups.ungrouped == sum(row.group_id is None for row in open_ones)
        assert (again.run and again.run.row) == (state.run and state.run.row)
        assert (again.run and (again.run.step, again.run.tokens)) == (state.run and (state.run.step, state.run.tokens))
        assert again.journalled == state.journalled
        assert sorted(map(str, again.versions.rows)) == sorted(map(str, state.versions.rows))
        if state.run is not None and state.run.row.status != "failed":
            mix = past_mix(self.store.read, state.run.run_id, state.run.specs, state.run.step + 1)
            assert mix == state.run.row.mix
        assert again.groups_by_task == state.groups_by_task
        assert again.sessions == state.sessions
        taken = {task: ordinals for task, ordinals in state.eval_ordinals.items() if ordinals}
        assert again.eval_ordinals == taken

    @invariant()
    def tallies_add_up(self) -> None:
        rows = self.store.read.ledger(ALL, 0, 100_000)
        summary = self.store.read.summary(ALL)
        by_fate = Counter((row.client_version, row.kind, row.mix, row.state, row.reason, row.cause) for row in rows)
        assert by_fate == {
            (one.client_version, one.kind, one.mix, one.state, one.reason, one.cause): one.episodes
            for one in summary.counts
        }
        assert sum(one.prompt_tokens for one in summary.counts) == sum(row.prompt_tokens for row in rows)
        assert sum(one.reward_sum for one in summary.counts) == pytest.approx(sum(row.reward or 0.0 for row in rows))
        lost = ("no_calls", "tainted", "superseded", "run_ended")
        counted = [row for row in rows if row.reward is not None and row.reason not in lost]
        progress = [one for run_id in {row.run_id for row in rows} for one in self.store.read.tasks(run_id, None, None)]
        assert sum(one.ended for one in progress) == len(counted)

    @invariant()
    def the_pool_is_bounded(self) -> None:
        open_ones = sum(live.row.kind == "train" for live in self.state.live.values())
        assert len(self.state.pooled) + open_ones < self.spec.batch.max_pool_episodes + self.spec.batch.group_size

    @invariant()
    def a_slot_is_held_or_filled_by_one_episode(self) -> None:
        lost = (EpisodeState.DROPPED, EpisodeState.PREPARED)
        rows = [row for row in self.store.read.ledger(ALL, 0, 100_000) if row.group_id and row.state not in lost]
        assert len({(row.group_id, row.slot) for row in rows}) == len(rows)
        groups = self.store.read.mixes(self.state.run.run_id) if self.state.run else {}
        assert all(row.group_id in groups for row in rows if self.state.run and row.run_id == self.state.run.run_id)

    @invariant()
    def nothing_quarantined_waits_to_be_trained(self) -> None:
        run = self.state.run
        for group in self.state.groups:
            if run is not None and group.row.client_version in run.row.quarantined:
                assert group.running


def refused_with(refusal: Refusal, *codes: ErrorCode) -> None:
    assert refusal.code in codes, refusal.detail


def recorded(episode_id: str, index: int, version: object) -> RecordedCall:
    return RecordedCall(
        call_id=f"{episode_id}-{index}",
        episode_id=episode_id,
        index=index,
        agent=None,
        dialect="chat.completions",
        prompt_ids=[1, 2, 3],
        sampled_ids=[4, 5],
        logprobs=[-0.5, -0.25],
        sampling=RecordedSampling(temperature=1.0),
        versions=[VersionSpan(start=0, end=2, version=version)],
        finish_reason="stop",
        started_at=0.0,
        latency_s=0.1,
    )


TestExactlyOnce = ExactlyOnce.TestCase
TestExactlyOnce.settings = settings(
    max_examples=60,
    stateful_step_count=80,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
