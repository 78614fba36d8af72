"""The book of steps: what the training loop is to do next, journalled batches, outcomes, checkpoints, and how runs begin and end.

Pure bookkeeping, like the book of episodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from swarm.engine.seam import StepOutcome, TrainingRefused
from swarm.protocol.episodes import Cause, DropReason, EpisodeState
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.runspec import RunSpec
from swarm.server.state import mix as mixes
from swarm.server.state.batches import draw, mix_values, one_batch, plan, pool_values
from swarm.server.state.groups import Group
from swarm.server.state.held_out import kept_steps
from swarm.server.state.rows import (
    ConfigRow,
    DropUnkept,
    KeepSteps,
    PutConfig,
    PutGroup,
    PutRun,
    PutStep,
    RunRow,
    SetFate,
    StepRow,
)
from swarm.server.state.runs import Run, judge, patched
from swarm.server.state.state import BookState
from swarm.server.state.teams import give_up
from swarm.server.state.versions import Versions


class Duty(Enum):
    """What the training loop is to do."""

    WAIT = "wait"
    OPEN = "open"
    SERVE = "serve"
    STEP = "step"
    CHECKPOINT = "checkpoint"
    COMPLETE = "complete"
    STOP = "stop"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class NextDuty:
    duty: Duty
    until: float = math.inf
    """WAIT: Unix time at which to ask again, if nothing happens before."""


class StepBook:
    """Runs and steps, over one `BookState`."""

    def __init__(self, state: BookState) -> None:
        self._state = state

    # -- what to do -------------------------------------------------------------------------------------------------

    def next_duty(self) -> NextDuty:
        """The most urgent thing."""
        state, run = self._state, self._state.run
        if run is not None and state.situation.restoration is not None and state.situation.engine_ready:
            return NextDuty(Duty.RESTORE)
        if run is None or run.row.released or not state.situation.engine_ready:
            return NextDuty(Duty.WAIT)
        if state.situation.opened_run != run.run_id:
            return NextDuty(Duty.OPEN)
        if state.situation.serve_again:
            return NextDuty(Duty.SERVE)
        return NextDuty(Duty.STOP) if self._drained(run) else self._while_running(run)

    def _while_running(self, run: Run) -> NextDuty:
        state, now = self._state, self._state.clock.now()
        behind = run.step > run.kept_step
        if behind and (state.situation.checkpoint_wanted or run.step % run.spec.checkpoint.every_steps == 0):
            return NextDuty(Duty.CHECKPOINT)
        if run.row.status == "running" and run.limit_reached(now):
            return NextDuty(Duty.CHECKPOINT if behind else Duty.COMPLETE)
        if self._may_step(run):
            return NextDuty(Duty.STEP)
        return NextDuty(Duty.WAIT, until=self._wake_at(run))

    def _may_step(self, run: Run) -> bool:
        """Whether a batch is complete, and may be trained."""
        limited = run.limit_reached(self._state.clock.now()) is not None
        return run.row.status == "running" and not limited and self._batch(run) is not None

    def _drained(self, run: Run) -> bool:
        """Whether a stop was asked for and nothing stands in its way. (Its last checkpoint is the caller's to write.)"""
        wanted_at = run.row.stop_requested_at
        if wanted_at is None:
            return False
        late = self._state.clock.now() >= wanted_at + run.spec.limits.drain_limit_s
        return late or not (self._still_open(run) or self._may_step(run))

    def _still_open(self, run: Run) -> int:
        """Episodes of the run that are running or prepared. (Those of runs before it may wait for other servers.)"""
        prepared = [one for one in self._state.prepared.values() if one.row.run_id == run.run_id]
        return len(self._state.live) + len(prepared)

    def _wake_at(self, run: Run) -> float:
        at = math.inf
        if run.row.status == "running" and run.spec.limits.wall_s is not None:
            at = run.row.started_at + run.spec.limits.wall_s
        if run.row.stop_requested_at is not None:
            at = min(at, run.row.stop_requested_at + run.spec.limits.drain_limit_s)
        return at

    def _batch(self, run: Run) -> list[Group] | None:
        """The groups of the next step, in the order of their turns; None when there are not enough."""
        state, batch = self._state, run.spec.batch
        balance = mixes.in_force(run.row.mix, batch.mix)
        found = draw(batch, balance, state.groups.ready(), one_batch(batch), state.passed())
        return found.groups if found.complete else None

    # -- steps ------------------------------------------------------------------------------------------------------

    def journal(self) -> StepRow:
        """Fix the batch and config of the next step. Only when `next_duty` says STEP."""
        state, run = self._state, self._state.run
        assert run is not None
        assert state.journalled is None
        groups = self._batch(run)
        assert groups is not None
        run.row.mix = mixes.after(run.row.mix, run.spec.batch.mix, [group.row.mix for group in groups])
        waited_s = state.clock.monotonic() - state.situation.collecting_since
        row = StepRow(
            run_id=run.run_id,
            branch=run.row.branch,
            step=run.step + 1,
            config_version=run.config_version,
            groups=plan(groups),
            values=pool_values(groups, weights_step=run.step, generate_s=waited_s) | mix_values(groups, run.row.mix),
            at=state.clock.now(),
        )
        for group in groups:
            for episode in group.in_slot_order():
                state.pooled.pop(episode.episode_id, None)
                state.changes.append(SetFate(episode.episode_id, EpisodeState.IN_STEP, step=row.step))
            state.groups.remove(group)
            state.changes.append(PutGroup(group.row))
        state.journalled = row
        state.flat_groups = 0
        state.changes += [PutStep(row), PutRun(run.row)]
        state.settle_all()  # what is left over is one version older when the next batch is made
        state.turned = True
        return row

    def judge_outcome(self, outcome: StepOutcome) -> None:
        """Raises: TrainingRefused when an outcome cannot be what it says."""
        row = self._state.journalled
        if row is None or outcome.step != row.step:
            raise TrainingRefused(f"the engine made step {outcome.step}, not the one that was journalled")
        strange = [name for name, value in outcome.metrics.items() if not math.isfinite(value)]
        if strange:
            raise TrainingRefused(f"step {row.step}: not a finite number: {', '.join(sorted(strange))}")
        batch = {episode_id for group in row.groups for episode_id in group.episode_ids}
        for episode_id, reason in outcome.untrained.items():
            if episode_id not in batch or reason not in set(DropReason):
                raise TrainingRefused(
                    f"step {row.step}: untrained {episode_id!r} because {reason!r}: not of this batch"
                )

    def record(self, outcome: StepOutcome, *, train_s: float, sync_s: float) -> None:
        """The journalled step is made and its weights are served."""
        state, run, row = self._state, self._state.run, self._state.journalled
        assert run is not None
        assert row is not None
        for episode_id, reason in outcome.untrained.items():
            state.changes.append(SetFate(episode_id, EpisodeState.DROPPED, DropReason(reason)))
        values = row.values | {"train_s": train_s} | outcome.metrics | {"sync_s": sync_s}
        values["step_s"] = values["generate_s"] + train_s + sync_s
        row.values, row.state, row.at = values, "done", state.clock.now()
        state.changes.append(PutStep(row))
        state.journalled = None
        self._advance(run, row.step)
        state.log.append(f"step {row.step}: reward {values.get('reward_mean', math.nan):.3f}, {values['step_s']:.1f} s")

    def _advance(self, run: Run, step: int) -> None:
        state = self._state
        run.step = step
        state.eval_ordinals.clear()
        state.situation.collecting_since = state.clock.monotonic()
        state.turned = True

    def checkpointed(self, run_id: str, step: int, best: int | None = None) -> None:
        """The engine has a whole checkpoint of this step. best: the step that it kept besides the newest ones."""
        state, run = self._state, self._state.run
        if run is None or run.run_id != run_id:
            raise ValueError(f"a checkpoint of {run_id!r}, which is not the run of this server")
        if step > 0 and step not in run.row.checkpoints:
            kept = run.kept_step
            run.row.checkpoints = kept_steps([*run.row.checkpoints, step], run.spec.checkpoint.keep, best)
            state.changes += [PutRun(run.row), KeepSteps(run_id, kept, step)]
        state.situation.checkpoint_wanted = False
        state.turned = True

    # -- runs -------------------------------------------------------------------------------------------------------

    def create(self, spec: RunSpec, *, by: str, key: str | None, request_digest: str) -> Run:
        """A new run in the place of the old one. Codes: server_busy{run_id, holder}, invalid_spec{errors}, engine_failed."""
        state, old = self._state, self._state.run
        if state.situation.engine_failed is not None:
            reason = state.situation.engine_failed.reason
            raise Refusal(ErrorCode.ENGINE_FAILED, f"the engine failed for good: {reason}; restart the server")
        if old is not None and old.row.status == "running":
            detail = f"run {old.run_id} of {old.row.holder} {self._what_keeps(old)}"
            raise Refusal(ErrorCode.SERVER_BUSY, detail, run_id=old.run_id, holder=old.row.holder)
        judge(spec, state.info)
        spec = spec.computed_in(state.info.dtype)
        if old is not None:
            self._release(old, "replaced by another run")
        row = RunRow(
            seq=old.row.seq + 1 if old else 1,
            run_id=state.ids.new("run"),
            holder=by,
            started_at=state.clock.now(),
            idempotency_key=key,
            request_digest=request_digest,
        )
        config = ConfigRow(
            run_id=row.run_id, config_version=1, at=row.started_at, by=by, patch={}, spec=spec.model_dump(mode="json")
        )
        state.run = Run(row=row, configs=[config])
        state.groups_by_task = {}
        state.versions = Versions()
        state.awaited.clear()
        state.eval_ordinals = {}
        state.flat_groups = 0
        state.situation.checkpoint_wanted = False
        state.changes += [PutRun(row), PutConfig(config)]
        state.turned = True
        state.log.append(f"run {row.run_id} started by {by}")
        return state.run

    def _what_keeps(self, run: Run) -> str:
        """Why another run cannot begin yet, and what to do about it."""
        wanted_at = run.row.stop_requested_at
        if wanted_at is None:
            return "is running; stop it first, or wait until it is complete"
        still_open = self._still_open(run)
        left_s = max(0.0, wanted_at + run.spec.limits.drain_limit_s - self._state.clock.now())
        episodes = f"{still_open} open episode{'' if still_open == 1 else 's'}"
        waits = f"{episodes} may still end, within {left_s:.0f} s (limits.drain_limit_s)"
        rest = waits if still_open else "no episode is open any more"
        return f"is stopping: {rest}; `swarm run stop --wait` returns when it has ended"

    def patch(self, patch: Mapping[str, Any], *, if_match: int | None, by: str) -> None:
        """Change tunable fields of the running run. Codes: over_limit, config_conflict{config_version}, invalid_spec{errors}."""
        state, run = self._state, self._state.run
        assert run is not None
        if run.row.status != "running":
            detail = f"run {run.run_id} is {run.row.status}; only a running one can be changed"
            raise Refusal(ErrorCode.OVER_LIMIT, detail, run_status=run.row.status)
        if if_match is not None and if_match != run.config_version:
            detail = f"the config is at version {run.config_version}, not {if_match}; read it and try again"
            raise Refusal(ErrorCode.CONFIG_CONFLICT, detail, config_version=run.config_version)
        spec = patched(run.spec, patch)
        judge(spec, state.info)
        if spec == run.spec:
            return
        new_rule = spec.batch.rule != run.spec.batch.rule
        config = ConfigRow(
            run_id=run.run_id,
            config_version=run.config_version + 1,
            at=state.clock.now(),
            by=by,
            patch=dict(patch),
            spec=spec.model_dump(mode="json"),
        )
        run.configs.append(config)
        run.specs[config.config_version] = spec
        state.changes.append(PutConfig(config))
        if new_rule:
            state.drop_flat()
        state.settle_all()
        state.turned = True
        state.log.append(f"config {config.config_version} of {run.run_id} by {by}")

    def request_stop(self) -> None:
        """Ask for a stop of the newest run. Again, or when nothing is served: nothing."""
        state, run = self._state, self._state.run
        if run is None or run.row.released or run.row.stop_requested_at is not None:
            return
        run.row.stop_requested_at = state.clock.now()
        state.changes.append(PutRun(run.row))
        state.turned = True
        state.log.append(f"run {run.run_id} is being stopped")

    def complete(self) -> None:
        """A limit was reached and a checkpoint holds every step. Eval episodes go on."""
        state, run = self._state, self._state.run
        assert run is not None
        reason = run.limit_reached(state.clock.now())
        run.row.status, run.row.reason, run.row.ended_at = "complete", reason, state.clock.now()
        self._end_training(f"the run {reason}")
        state.changes.append(PutRun(run.row))
        state.turned = True
        state.log.append(f"run {run.run_id} is complete: it {reason}")

    def stop(self) -> None:
        """The run is drained and a checkpoint holds every step: let go of it. A complete run stays complete."""
        run = self._state.run
        assert run is not None
        if run.row.status == "running":
            run.row.status, run.row.reason, run.row.ended_at = "stopped", "was stopped", self._state.clock.now()
        self._release(run, "the run was stopped")

    def fail(self, reason: str) -> None:
        """The run cannot go on. What no checkpoint holds is lost, and its episodes are dropped."""
        state, run = self._state, self._state.run
        assert run is not None
        run.row.status, run.row.reason, run.row.ended_at = "failed", reason, state.clock.now()
        detail = f"trained in no step that was kept: the run failed: {reason}"
        state.changes.append(DropUnkept(run.run_id, run.kept_step, detail))
        state.journalled = None
        self._release(run, "the run failed")
        state.log.append(f"run {run.run_id} failed: {reason}")

    def _release(self, run: Run, why: str) -> None:
        state = self._state
        if not run.row.released:
            self._end_training(why)
            give_up(state, why)
            for live in list(state.live.values()):
                state.close(live, DropReason.RUN_ENDED, why, cause=Cause.SERVER)
            run.row.released = True
            state.changes.append(PutRun(run.row))
        state.situation.opened_run = None
        state.situation.checkpoint_wanted = False
        state.turned = True

    def _end_training(self, why: str) -> None:
        state = self._state
        for live in [live for live in state.live.values() if live.row.kind == "train"]:
            state.close(live, DropReason.RUN_ENDED, why, cause=Cause.SERVER)
        give_up(state, why, kind="train")
        for group in state.groups:
            state.drop_group(group, DropReason.RUN_ENDED, why)
