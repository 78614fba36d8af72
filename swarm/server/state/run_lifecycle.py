"""Commands that start, change, restore and end runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from swarm.protocol.episodes import Cause, DropReason
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.runspec import RunSpec
from swarm.server.state import teams
from swarm.server.state.episodes import close
from swarm.server.state.rows import ConfigRow, DropUnkept, MixRow, RunRow, SupersedeAfter
from swarm.server.state.runs import Run, Versions, judge_spec, own_code_faults, patched, settled
from swarm.server.state.sample_pool import drop_flat, drop_group, settle_all
from swarm.server.state.server_state import Restoration, ServerState, Transition
from swarm.server.state.steps import still_open


def create(t: Transition, spec: RunSpec, *, by: str, key: str | None, request_digest: str) -> Run:
    """Start a new run in place of the old one. Codes: server_busy{run_id, holder}, invalid_spec{errors}, engine_failed."""
    state, old = t.state, t.state.run
    if state.situation.engine_failed is not None:
        reason = state.situation.engine_failed.reason
        raise Refusal(ErrorCode.ENGINE_FAILED, f"the engine failed for good: {reason}; restart the server")
    if old is not None and old.row.status == "running":
        detail = f"run {old.run_id} of {old.row.holder} {_what_keeps(t, old)}"
        raise Refusal(ErrorCode.SERVER_BUSY, detail, run_id=old.run_id, holder=old.row.holder)
    judge_spec(spec, state.info, allow_algorithms=state.allow_algorithms)
    spec = settled(spec, state.info)
    if old is not None:
        _release(t, old, "replaced by another run")
    row = RunRow(
        seq=old.row.seq + 1 if old else 1,
        run_id=state.ids.new("run"),
        holder=by,
        started_at=t.now.unix,
        idempotency_key=key,
        request_digest=request_digest,
    )
    config = ConfigRow(
        run_id=row.run_id, config_version=1, at=row.started_at, by=by, patch={}, spec=spec.model_dump(mode="json")
    )
    state.run = Run(row=row, configs=[config])
    state.groups_by_task, state.sessions = {}, {}
    state.versions = Versions()
    state.awaited.clear()
    state.eval_ordinals = {}
    state.flat_groups = 0
    state.situation.checkpoint_wanted = False
    t.changes += [row, config]
    t.say(f"run {row.run_id} started by {by}")
    return state.run


def _what_keeps(t: Transition, run: Run) -> str:
    """Say why another run cannot begin yet, and what to do about it."""
    if run.row.stop_requested_at is None:
        return "is still running; stop it first, or wait until it is complete"
    return f"is stopping: {_drain(t, run)}; `swarm run stop --wait` returns when it has ended"


def _drain(t: Transition, run: Run) -> str:
    """Describe the open episodes that a run waits for after a stop was requested."""
    episodes_open, asked_at = still_open(t.state, run), run.row.stop_requested_at or t.now.unix
    left_s = max(0.0, asked_at + run.spec.limits.drain_limit_s - t.now.unix)
    episodes = f"{episodes_open} open episode{'' if episodes_open == 1 else 's'}"
    waits = f"{episodes} may still end, within {left_s:.0f} s (limits.drain_limit_s)"
    return waits if episodes_open else "no episode is open any more"


def patch(t: Transition, fields: Mapping[str, Any], *, if_match: int | None, by: str) -> None:
    """Change tunable fields of the running run. Codes: over_limit, config_conflict{config_version}, invalid_spec{errors}."""
    state, run = t.state, t.state.run
    assert run is not None
    if run.row.status != "running":
        detail = f"run {run.run_id} is {run.row.status}; only a running run can be changed"
        raise Refusal(ErrorCode.OVER_LIMIT, detail, run_status=run.row.status)
    if if_match is not None and if_match != run.config_version:
        detail = f"the config is at version {run.config_version}, not {if_match}; read it and try again"
        raise Refusal(ErrorCode.CONFIG_CONFLICT, detail, config_version=run.config_version)
    spec = patched(run.spec, fields)
    judge_spec(spec, state.info, allow_algorithms=state.allow_algorithms)
    if spec == run.spec:
        return
    spec = settled(spec, state.info)
    new_rule = spec.batch.rule != run.spec.batch.rule
    config = ConfigRow(
        run_id=run.run_id,
        config_version=run.config_version + 1,
        at=t.now.unix,
        by=by,
        patch=dict(fields),
        spec=spec.model_dump(mode="json"),
    )
    run.configs.append(config)
    run.specs[config.config_version] = spec
    t.changes.append(config)
    if new_rule:
        drop_flat(t)
    settle_all(t)
    t.say(f"config {config.config_version} of {run.run_id} by {by}")


def request_stop(t: Transition) -> None:
    """Request a stop of the newest run. Does nothing if a stop was already requested or no run is served."""
    run = t.state.run
    if run is None or run.row.released or run.row.stop_requested_at is not None:
        return
    run.row.stop_requested_at = t.now.unix
    t.changes.append(run.row)
    t.say(f"run {run.run_id} is being stopped: {_drain(t, run)}")


def complete(t: Transition) -> None:
    """Mark the run as complete. Call this once a limit is reached and a checkpoint holds every step. Eval episodes continue."""
    run = t.state.run
    assert run is not None
    reason = run.limit_reached(t.now.unix)
    run.row.status, run.row.reason, run.row.ended_at = "complete", reason, t.now.unix
    _end_training(t, f"the run {reason}")
    t.changes.append(run.row)
    t.say(f"run {run.run_id} is complete: it {reason}")


def stop(t: Transition) -> None:
    """Stop and release the run, which is drained and has every step in a checkpoint. A complete run stays complete."""
    run = t.state.run
    assert run is not None
    if run.row.status == "running":
        run.row.status, run.row.reason, run.row.ended_at = "stopped", "on request", t.now.unix
        t.say(f"run {run.run_id} is stopped, at step {run.step}")
    _release(t, run, "the run was stopped")


def fail(t: Transition, reason: str) -> None:
    """Fail the run. Steps that no checkpoint holds are lost, and their episodes are dropped."""
    state, run = t.state, t.state.run
    assert run is not None
    run.row.status, run.row.reason, run.row.ended_at = "failed", reason, t.now.unix
    detail = f"trained in no step that was kept: the run failed: {reason}"
    t.changes.append(DropUnkept(run.run_id, run.kept_step, detail))
    state.journalled = None
    _release(t, run, "the run failed")
    t.say(f"run {run.run_id} failed: {reason}", "error")


def _release(t: Transition, run: Run, why: str) -> None:
    state = t.state
    if not run.row.released:
        _end_training(t, why)
        teams.give_up(t, why)
        for live in list(state.live.values()):
            close(t, live, DropReason.RUN_ENDED, why, cause=Cause.SERVER)
        run.row.released = True
        t.changes.append(run.row)
    state.situation.opened_run = None
    state.situation.checkpoint_wanted = False


def _end_training(t: Transition, why: str) -> None:
    state = t.state
    for live in [live for live in state.live.values() if live.row.kind == "train"]:
        close(t, live, DropReason.RUN_ENDED, why, cause=Cause.SERVER)
    teams.give_up(t, why, kind="train")
    for group in state.groups:
        drop_group(t, group, DropReason.RUN_ENDED, why)


# -- going back, and excluding code ---------------------------------------------------------------------------------


def restorable(state: ServerState, wish: Restoration) -> Run:
    """Return the run if it can go back to the requested step. Codes: over_limit, not_found{checkpoints}."""
    run = state.run
    if run is None or run.run_id != wish.run_id:
        detail = f"run {wish.run_id} was replaced by another run; only a server's newest run can be restored"
        raise Refusal(ErrorCode.OVER_LIMIT, detail)
    if run.row.stop_requested_at is not None and not run.row.released:
        raise Refusal(ErrorCode.OVER_LIMIT, f"run {run.run_id} is being stopped; restore it once it has stopped")
    kept = [0, *run.row.checkpoints]
    if wish.step not in kept:
        known = ", ".join(map(str, kept))
        detail = f"run {run.run_id} has no checkpoint of step {wish.step}; it has {known} (0 is the hosted model)"
        raise Refusal(ErrorCode.NOT_FOUND, detail, checkpoints=kept)
    if errors := own_code_faults(run.spec, state.info, allowed=state.allow_algorithms):
        raise Refusal(ErrorCode.OVER_LIMIT, f"run {run.run_id} trained with its own functions: {errors[0].problem}")
    return run


def restore(t: Transition, wish: Restoration, mix: MixRow, ended_evals: Iterable[tuple[str, int]]) -> None:
    """Begin a new branch of the run at a checkpoint. Episodes of the old branch after the checkpoint are superseded.

    The caller must then open the engine at this checkpoint.

    Args:
        t: the transition.
        wish: the request, with the step to go back to.
        mix: the balance between families at that step.
        ended_evals: task and ordinal of each counted evaluation at that step, read from storage.

    Codes: those of `restorable`.
    """
    state, run = t.state, restorable(t.state, wish)
    row = run.row
    detail = f"the run was restored to step {wish.step} on branch {row.branch + 1} by {wish.by}"
    run.step, state.journalled = wish.step, None
    row.branch, row.branched_at, row.restore_key, row.mix = row.branch + 1, wish.step, wish.key, mix
    if wish.key is not None:
        row.restored_by[wish.key] = wish.step
    row.checkpoints = [step for step in row.checkpoints if step <= wish.step]
    row.status, row.reason, row.ended_at = "running", None, None
    row.stop_requested_at, row.released = None, False
    teams.give_up(t, detail, reason=DropReason.SUPERSEDED)
    for live in list(state.live.values()):
        close(t, live, DropReason.SUPERSEDED, detail, cause=Cause.SERVER)
    for group in state.groups:
        drop_group(t, group, DropReason.SUPERSEDED, detail)
    for waiting in [prepared.row for prepared in state.prepared.values()]:  # waiting for another server's decision
        if waiting.run_id == run.run_id and (waiting.kind == "train" or waiting.claimed_step > wish.step):
            waiting.reason = DropReason.SUPERSEDED
            t.changes.append(waiting)
    not_yet_on_disk = [live.row for live in state.closing.values() if live.row.reason is DropReason.EVAL]
    ended = [(one.task_id, one.ordinal) for one in not_yet_on_disk if state.is_at_this_step(one)]
    state.eval_ordinals = {}
    number_evals(state, [*ended_evals, *ended])
    t.changes += [row, SupersedeAfter(run.run_id, wish.step, detail)]
    state.awaited.clear()
    state.flat_groups = 0
    state.situation.opened_run = None
    state.situation.checkpoint_wanted = False
    t.say(f"run {run.run_id}: {detail}")


def number_evals(state: ServerState, ended: Iterable[tuple[str, int]]) -> None:
    """Reserve, for each task, the evaluation ordinals in use at the current step: those in `ended`, and those of open evaluations."""
    rows = [live.row for live in state.live.values()] + [prepared.row for prepared in state.prepared.values()]
    rows = [row for row in rows if row.kind == "eval" and row.reason is None and row.task_id]
    held = [(row.task_id, row.ordinal) for row in rows if state.is_at_this_step(row)]
    for task_id, ordinal in (*ended, *held):
        state.eval_ordinals.setdefault(task_id, set()).add(ordinal)


def want_checkpoint(t: Transition) -> int:
    """Request a checkpoint of the newest step, and return that step."""
    run = t.state.run
    assert run is not None
    t.state.situation.checkpoint_wanted = run.step > run.kept_step
    return run.step


def want_restoration(t: Transition, wish: Restoration) -> None:
    """Ask the training loop to go back to a checkpoint. Codes: server_busy, and those of `restorable`."""
    restorable(t.state, wish)
    known = t.state.situation.restoration
    if known is not None and known != wish:
        detail = f"run {known.run_id} is already being restored to step {known.step}; wait until that is done"
        raise Refusal(ErrorCode.SERVER_BUSY, detail, run_id=known.run_id, holder=known.by)
    t.state.situation.restoration = wish


def restoration_over(t: Transition) -> None:
    """Clear the request for a restoration, once it is done and on disk, or was refused."""
    t.state.situation.restoration = None


def quarantine(t: Transition, client_version: str, *, wanted: bool, reason: str, by: str) -> None:
    """Exclude episodes of this client version from later batches, or allow them again. Repeating the request does nothing.

    Running episodes of an excluded version may end, but are then dropped; it can still claim eval episodes. Codes: over_limit.
    """
    run = t.state.run
    assert run is not None
    if run.row.status != "running":
        detail = f"run {run.run_id} is {run.row.status}, so it no longer trains on any client version"
        raise Refusal(ErrorCode.OVER_LIMIT, detail, run_status=run.row.status)
    if wanted == (client_version in run.row.quarantined):
        return
    if wanted:
        run.row.quarantined[client_version] = f"{reason or 'no reason was given'} (by {by})"
    else:
        del run.row.quarantined[client_version]
    t.changes.append(run.row)
    settle_all(t)
    done = "quarantined" if wanted else "no longer quarantined"
    t.say(f"client version {client_version!r} is {done} by {by}")
