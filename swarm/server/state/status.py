"""Reports on the server and its runs in the protocol's form, and finds out what a run waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import pvariance

from swarm.protocol.runspec import AS_STORED, RunSpec
from swarm.protocol.status import (
    CheckpointReport,
    ConfigChange,
    EngineStatus,
    MixStatus,
    Phase,
    PoolStatus,
    ReplicaStatus,
    RunReport,
    ServerStatus,
    StepMetrics,
    VersionReport,
    WaitingFor,
)
from swarm.server.state.batching import balance_under, groups_needed, horizon, openings
from swarm.server.state.groups import Group
from swarm.server.state.rows import (
    Change,
    ConfigRow,
    EpisodeRow,
    FreeCalls,
    HeldOutRow,
    PutCalls,
    PutMeta,
    RunRow,
    StepRow,
    VersionRow,
)
from swarm.server.state.runs import Run, best_of, shift
from swarm.server.state.sample_pool import next_batch
from swarm.server.state.server_state import Moment, ServerState

QUIET_S = 10.0
"""Seconds without a claim or an ended episode after which the run counts as waiting, if nobody else may claim for the next step."""
LONG_QUIET_S = 60.0
"""Seconds, as for QUIET_S, if others may claim but do not."""


def status(state: ServerState, now: Moment, server_id: str, *, revision: int, tokens_per_s: float) -> ServerStatus:
    run, situation, info = state.run, state.situation, state.info
    held = run if run is not None and not run.row.released else None
    return ServerStatus(
        server_id=server_id,
        revision=revision,
        phase=situation.shown_phase,
        failed=situation.engine_failed,
        storage_full=situation.storage_full,
        run_id=held.run_id if held else None,
        newest_run_id=run.run_id if run else None,
        step=held.step if held else 0,
        weights_version=state.weights_version,
        model=info.model,
        model_fingerprint=info.fingerprint,
        pool=_pool_status(state, now),
        waiting_for=situation.waiting_for,
        engine=EngineStatus(
            backend=info.backend,
            device=info.device,
            dtype=info.dtype,
            tokens_per_s=tokens_per_s,
            warm=situation.engine_ready,
            failures=situation.engine_failures,
            hang=situation.hang,
            replicas=[
                ReplicaStatus(
                    device=each.device,
                    ready=each.ready,
                    failed_for_good=each.failed_for_good,
                    failures=each.failures,
                    reason=None if each.ready else each.reason,
                )
                for each in situation.replicas
            ],
        ),
        limits=dict(held.spec.limits) if held else {},
    )


def _pool_status(state: ServerState, now: Moment) -> PoolStatus:
    run = state.run
    ready = len(state.groups.ready())
    running = run is not None and run.row.status == "running"
    return PoolStatus(
        running=len(state.live),
        prepared=len(state.prepared),
        ended=len(state.pooled),
        groups_open=len(state.groups) - ready,
        groups_ready=ready,
        groups_needed=groups_needed(run.spec.batch) if run is not None and running else 0,
        by_mix=_by_mix(state, now),
    )


def _by_mix(state: ServerState, now: Moment) -> dict[str, MixStatus]:
    found = state.groups.by_mix()
    if state.run is None or state.run.row.released:
        return found
    for name, groups in state.run.row.mix.trained.items():
        found.setdefault(name, MixStatus()).trained_groups = groups
    passed = state.passed(state.situation.lease_clock.time(now.monotonic))
    for name, debt in state.debts().items():
        status = found.setdefault(name, MixStatus())
        status.debt, status.passed = debt, name in passed
    return found


def watched(state: ServerState, now: Moment) -> tuple[object, ...]:
    """Return the values whose changes are sent to watchers immediately."""
    run, situation = state.run, state.situation
    return (
        state.passed(situation.lease_clock.time(now.monotonic)),
        situation.shown_phase,
        situation.engine_ready,
        situation.engine_failures,
        situation.replicas,
        situation.hang,
        situation.waiting_for,
        situation.opened_run,
        state.serving,
        tuple(situation.no_room),
        run
        and (run.run_id, run.row.branch, run.step, run.config_version, run.row.status, run.row.released, run.kept_step),
    )


# -- runs -------------------------------------------------------------------------------------------------------------


def report(
    row: RunRow,
    configs: Sequence[ConfigRow],
    steps: Sequence[StepRow],
    seen: Sequence[VersionRow],
    evaluated: Sequence[HeldOutRow],
    *,
    phase: Phase,
    step: int,
) -> RunReport:
    """Build a run's report in the protocol's form."""
    spec = RunSpec.model_validate(configs[-1].spec, context=AS_STORED)
    return RunReport(
        run_id=row.run_id,
        branch=row.branch,
        spec=spec,
        status=row.status,
        reason=row.reason,
        phase=phase,
        step=step,
        config_version=configs[-1].config_version,
        changes=[
            ConfigChange(config_version=config.config_version, at=config.at, by=config.by, patch=config.patch)
            for config in configs[1:]
        ],
        steps=[
            StepMetrics(
                step=done.step, branch=done.branch, at=done.at, config_version=done.config_version, values=done.values
            )
            for done in steps
            if done.state == "done"
        ],
        started_at=row.started_at,
        ended_at=row.ended_at,
        versions=[_version_report(one, row.quarantined.get(one.client_version)) for one in seen],
        checkpoints=_checkpoint_reports(row.checkpoints, evaluated),
        notes=spec.sampling.untrained,
    )


def _version_report(row: VersionRow, quarantined: str | None) -> VersionReport:
    moved = shift(row)
    mean = row.reward_sum / row.ended if row.ended else None
    return VersionReport(
        client_version=row.client_version,
        mix=row.mix,
        first_at=row.first_at,
        episodes=row.ended,
        reward_mean=mean,
        reward_std=None if mean is None else math.sqrt(max(0.0, row.square_sum / row.ended - mean * mean)),
        before=row.before,
        shift=moved,
        shift_stderr=None if moved is None else math.sqrt(_squared_error(row.opening) + _squared_error(row.baseline)),
        quarantined=quarantined,
    )


def _squared_error(rewards: list[float]) -> float:
    """Return the squared standard error of the mean reward."""
    return pvariance(rewards) / len(rewards)


def _checkpoint_reports(kept: Sequence[int], evaluated: Sequence[HeldOutRow]) -> list[CheckpointReport]:
    best, by_step = best_of(kept, evaluated), {row.step: row for row in evaluated}
    return [
        CheckpointReport(
            step=step,
            held_out=by_step[step].reward if step in by_step else None,
            held_out_episodes=by_step[step].episodes if step in by_step else 0,
            best=best is not None and step == best.step,
        )
        for step in kept
    ]


# -- what a run waits for ---------------------------------------------------------------------------------------------


def who_is_waited_for(state: ServerState, now: Moment) -> WaitingFor | None:
    """Return what holds the run up; None while it makes progress or waits for nothing in particular.

    That is the oldest open episode in the groups that the next step needs, or a task whose slots nobody claims. We name nothing
    until the run has been quiet for a while, because it normally takes time to fill groups.
    """
    run, quiet_since = state.run, state.situation.quiet_since
    lease_time = state.situation.lease_clock.time(now.monotonic)
    if run is None or run.row.status != "running" or not state.serving or state.journalled is not None:
        return None
    quiet_s = now.unix - quiet_since
    if quiet_s < QUIET_S or next_batch(state, lease_time) is not None:
        return None
    if quiet_s < LONG_QUIET_S and run.row.stop_requested_at is None and _may_open(state, run, lease_time):
        return None
    groups = [group for group in state.groups if group.open and not group.useless]
    running = [row for group in groups for row in _running(state, group)]
    running += [live.row for live in state.live.values() if live.row.ungrouped] if state.groups.ungrouped else []
    if run.row.stop_requested_at is not None:  # the run then waits for every open episode
        running = [live.row for live in state.live.values()] or running
    if running:
        oldest = min(running, key=lambda row: row.seq)
        return WaitingFor(task_id=oldest.task_id, client_id=oldest.client_id, since=quiet_since)
    free = next((group for group in groups if group.free_slot(lease_time) is not None), None)
    return None if free is None else WaitingFor(task_id=free.row.task_id, since=quiet_since)


def stirs(changes: Sequence[Change]) -> bool:
    """True if these changes bring the next step closer or set it back. Evaluations do neither."""
    return any(
        not isinstance(change, PutCalls | FreeCalls | PutMeta) and not _of_evaluation(change) for change in changes
    )


def _of_evaluation(change: Change) -> bool:
    return isinstance(change, EpisodeRow) and change.kind == "eval"


def _running(state: ServerState, group: Group) -> list[EpisodeRow]:
    """Return the rows of the episodes that hold the group's slots."""
    holders = [state.live.get(name) or state.prepared.get(name) for name in group.running.values()]
    return [holder.row for holder in holders if holder is not None]


def _may_open(state: ServerState, run: Run, lease_time: float) -> bool:
    """True if a claim could open another group now."""
    batch = run.spec.batch
    wanted = horizon(run.spec, step=run.step, versions_ahead=0)
    return bool(openings(batch, balance_under(run.row.mix, batch.mix), state.groups, wanted, state.passed(lease_time)))
