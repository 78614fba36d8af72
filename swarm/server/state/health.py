"""Records reports from the engine, the training loop and the disk."""

from __future__ import annotations

from swarm.engine.seam import EngineHealth
from swarm.protocol.status import Failure, Hang, Phase
from swarm.server.state.rows import LIVED_AT, PutMeta
from swarm.server.state.server_state import Transition
from swarm.server.state.status import who_is_waited_for

UNNOTICED_S = 600.0
"""Maximum number of seconds between the moment a client gives up and the moment we notice that the engine hangs."""


def enter_phase(t: Transition, phase: Phase) -> None:
    """Record the training loop's new phase."""
    t.state.situation.phase = phase


def engine_opened(t: Transition, run_id: str | None, directory: str = "") -> None:
    """Note that the engine serves the weights of this run's newest step; None means that it serves no run's weights."""
    situation = t.state.situation
    if run_id != situation.opened_run:
        situation.collecting_since = t.now.monotonic
    situation.quiet_since, situation.waiting_for = t.now.unix, None
    situation.opened_run = run_id
    situation.run_directory = directory
    situation.serve_again = False


def engine_health(t: Transition, health: EngineHealth) -> None:
    """Record the engine's health. While the engine is not ready, lease time stands still."""
    situation = t.state.situation
    situation.engine_failures = health.failures
    situation.replicas = health.replicas
    _note_hang(t, health)
    if health.ready:
        situation.lease_clock.go(t.now.monotonic)
        situation.engine_failed = None
    else:
        situation.lease_clock.stop(t.now.monotonic)
        situation.serve_again = situation.opened_run is not None
        if health.failed_for_good:
            reason = health.reason or "the engine gave no reason"
            if situation.engine_failed is None:
                t.say(f"the engine failed for good: {reason}", "error")
            situation.engine_failed = Failure(reason=reason, since=t.now.unix)
    situation.engine_ready = health.ready


def _note_hang(t: Transition, health: EngineHealth) -> None:
    situation, known, now = t.state.situation, t.state.situation.hang, t.now.unix
    if health.hung_since is not None and (known is None or known.since != health.hung_since):
        reason = health.reason or "a process of the engine hangs"
        situation.hang = Hang(reason=reason, phase=situation.shown_phase, since=health.hung_since, found_at=now)
    elif health.ready and health.hung_since is None and known is not None and known.over_at is None:
        situation.hang = known.model_copy(update={"over_at": now})


def engine_lived(t: Transition, at: float) -> None:
    """Note that the engine was alive at this Unix time, so a hang cannot be why clients gave up earlier.

    This is written to disk only if a client gave up.
    """
    situation = t.state.situation
    if situation.lived_at < situation.suspected_at <= at:
        situation.lived_at = at
        t.changes.append(PutMeta(LIVED_AT, repr(at)))


def look_around(t: Transition) -> None:
    """Find out what the run waits for, and clear old suspicions of a hang if the engine is ready. Call this every few seconds."""
    situation = t.state.situation
    found = who_is_waited_for(t.state, t.now)
    if found is not None and situation.waiting_for is None:
        who = f"client {found.client_id}" if found.client_id is not None else "a client: its slots are free"
        t.say(f"the run waits for {who}, task {found.task_id!r}")
    situation.waiting_for = found
    if situation.engine_ready and situation.suspected_at <= t.now.unix - UNNOTICED_S:
        engine_lived(t, situation.suspected_at)


def storage(t: Transition, what: str, problem: str | None) -> None:
    """Record that `what` could not be written because of `problem` or, if that is None, that it was written."""
    known = t.state.situation.no_room
    if problem is None:
        known.pop(what, None)
    elif what not in known:
        known[what] = Failure(reason=problem, since=t.now.unix)
