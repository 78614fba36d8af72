"""Steps: the training loop's next duty, batches in the journal, their outcomes, and checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from swarm.engine.seam import StepOutcome, TrainingRefused
from swarm.protocol.episodes import DropReason, EpisodeState
from swarm.server.state.batching import balance_after, mix_values, plan, pool_values
from swarm.server.state.rows import KeepSteps, SetFate, StepRow
from swarm.server.state.runs import Run, kept_steps
from swarm.server.state.sample_pool import next_batch, settle_all
from swarm.server.state.server_state import Moment, ServerState, Transition


class Duty(Enum):
    """A task of the training loop."""

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
    """For WAIT: Unix time at which to ask again, unless something happens earlier."""


def next_duty(state: ServerState, now: Moment) -> NextDuty:
    """Return the training loop's most urgent duty."""
    run, situation = state.run, state.situation
    if run is not None and situation.restoration is not None and situation.engine_ready:
        return NextDuty(Duty.RESTORE)
    if run is None or run.row.released or not situation.engine_ready:
        return NextDuty(Duty.WAIT)
    if situation.opened_run != run.run_id:
        return NextDuty(Duty.OPEN)
    if situation.serve_again:
        return NextDuty(Duty.SERVE)
    limit = run.limit_reached(now.unix)
    running = run.row.status == "running"
    may_step = running and limit is None and next_batch(state, situation.lease_clock.time(now.monotonic)) is not None
    stopped_at = run.row.stop_requested_at
    if stopped_at is not None:
        late = now.unix >= stopped_at + run.spec.limits.drain_limit_s
        if late or not (still_open(state, run) or may_step):
            return NextDuty(Duty.STOP)
    behind = run.step > run.kept_step
    if behind and (situation.checkpoint_wanted or run.step % run.spec.checkpoint.every_steps == 0):
        return NextDuty(Duty.CHECKPOINT)
    if running and limit is not None:
        return NextDuty(Duty.CHECKPOINT if behind else Duty.COMPLETE)
    return NextDuty(Duty.STEP) if may_step else NextDuty(Duty.WAIT, until=_wake_at(run))


def still_open(state: ServerState, run: Run) -> int:
    """Return the number of the run's running and prepared episodes. Prepared episodes of earlier runs do not count."""
    return len(state.live) + sum(one.row.run_id == run.run_id for one in state.prepared.values())


def _wake_at(run: Run) -> float:
    limits, at = run.spec.limits, math.inf
    if run.row.status == "running" and limits.wall_s is not None:
        at = run.row.started_at + limits.wall_s
    if run.row.stop_requested_at is not None:
        at = min(at, run.row.stop_requested_at + limits.drain_limit_s)
    return at


def journal(t: Transition) -> StepRow:
    """Fix the batch and config of the next step. Call this only if `next_duty` returns STEP."""
    state, run = t.state, t.state.run
    assert run is not None
    assert state.journalled is None
    groups = next_batch(state, t.lease_time)
    assert groups is not None
    run.row.mix = balance_after(run.row.mix, run.spec.batch.mix, [group.row.mix for group in groups])
    waited_s = t.now.monotonic - state.situation.collecting_since
    row = StepRow(
        run_id=run.run_id,
        branch=run.row.branch,
        step=run.step + 1,
        config_version=run.config_version,
        groups=plan(groups),
        values=pool_values(groups, weights_step=run.step, generate_s=waited_s) | mix_values(groups, run.row.mix),
        at=t.now.unix,
    )
    for group in groups:
        for episode in group.in_slot_order():
            state.pooled.pop(episode.episode_id, None)
            t.changes.append(SetFate(episode.episode_id, EpisodeState.IN_STEP, step=row.step))
        state.groups.remove(group)
        t.changes.append(group.row)
    state.journalled = row
    state.flat_groups = 0
    t.changes += [row, run.row]
    settle_all(t)  # the remaining groups will be one version older at the next batch
    return row


def judge_outcome(row: StepRow | None, outcome: StepOutcome) -> None:
    """Check the outcome of the journalled step.

    Raises: TrainingRefused if the outcome belongs to another step, has a metric that is not finite, or has an untrained episode of
    another batch or with an unknown reason.
    """
    if row is None or outcome.step != row.step:
        raise TrainingRefused(f"the engine trained step {outcome.step}, which is not the step in the journal")
    strange = [name for name, value in outcome.metrics.items() if not math.isfinite(value)]
    if strange:
        raise TrainingRefused(f"step {row.step}: metrics that are not finite: {', '.join(sorted(strange))}")
    batch = {episode_id for group in row.groups for episode_id in group.episode_ids}
    for episode_id, reason in outcome.untrained.items():
        if episode_id not in batch or reason not in set(DropReason):
            raise TrainingRefused(
                f"step {row.step}: the engine reports {episode_id!r} as untrained because of {reason!r}: the episode is not in this "
                "batch, or the reason is unknown"
            )


def record(t: Transition, outcome: StepOutcome, *, train_s: float, sync_s: float) -> None:
    """Record the journalled step as done, once it is trained and its weights are served."""
    state, run, row = t.state, t.state.run, t.state.journalled
    assert run is not None
    assert row is not None
    for episode_id, reason in outcome.untrained.items():
        t.changes.append(SetFate(episode_id, EpisodeState.DROPPED, DropReason(reason)))
    values = row.values | {"train_s": train_s} | outcome.metrics | {"sync_s": sync_s}
    values["step_s"] = values["generate_s"] + train_s + sync_s
    row.values, row.state, row.at = values, "done", t.now.unix
    t.changes.append(row)
    state.journalled = None
    run.step = row.step
    state.eval_ordinals.clear()
    state.situation.collecting_since = t.now.monotonic
    episodes, reward = sum(len(group.episode_ids) for group in row.groups), values.get("reward_mean", math.nan)
    t.say(f"run {run.run_id} step {row.step}: {episodes} episodes, reward {reward:.3f}, {values['step_s']:.1f} s")


def checkpointed(t: Transition, run_id: str, step: int, best: int | None = None) -> None:
    """Record that the engine wrote a full checkpoint of this step. `best` is a step whose checkpoint it keeps even if it is old."""
    run = t.state.run
    if run is None or run.run_id != run_id:
        raise ValueError(f"cannot record a checkpoint of {run_id!r}: it is not this server's run")
    if step > 0 and step not in run.row.checkpoints:
        kept = run.kept_step
        run.row.checkpoints = kept_steps([*run.row.checkpoints, step], run.spec.checkpoint.keep, best)
        t.changes += [run.row, KeepSteps(run_id, kept, step)]
    t.state.situation.checkpoint_wanted = False
