"""`swarm run start|status|patch|stop|checkpoint|restore|quarantine`: training without the researcher."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from typing import Any

from foundation.commandline import UsageError
from foundation.streams import read_or_not
from swarm.cli.options import assign, connect, read_document, valid
from swarm.cli.top import standing_lines
from swarm.client import InvalidSpec, NotFound, OverLimit
from swarm.client.own_algorithms import SourceFault, with_sources
from swarm.client.sync import SwarmClient
from swarm.protocol.errors import ErrorCode, SwarmError
from swarm.protocol.runspec import RunSpec
from swarm.protocol.status import CheckpointReport, MixStatus, RunReport, ServerStatus, StepMetrics, VersionReport

_COLUMNS = (
    ("reward_mean", "reward", ".3f"),
    ("success_rate", "success", ".3f"),
    ("zero_variance_share", "equal", ".2f"),
    ("kl_to_start", "kl", ".4f"),
    ("entropy", "entropy", ".3f"),
    ("grad_norm", "grad", ".3f"),
    ("step_s", "seconds", ".1f"),
)
_RESTART_S = 60.0
"""How long the server may be down while a command watches it, in seconds. A restarted server continues its run."""

_NO_WAIT = "including those of killed clients; `swarm run patch --set limits.drain_limit_s=1` ends the wait"


def _warn(args: argparse.Namespace, report: RunReport) -> None:
    """Print the report's notes to standard error. JSON output already includes them in the report."""
    if not args.json:
        for note in report.notes:
            print(f"warning: {note}", file=sys.stderr)


def exit_code(error: SwarmError) -> int:
    """Return the exit code for an error. An invalid spec counts as bad usage, whether the server or this command refused it."""
    return 2 if isinstance(error, InvalidSpec) else 1


def start_run(args: argparse.Namespace) -> int:
    """Start a run from a spec."""
    document = assign(read_document(args.spec), args.set)
    if isinstance(document.get("algorithm"), dict):
        document["algorithm"] = _with_texts(document["algorithm"])
    spec = valid(RunSpec, document, args.set)
    with connect(args, later_s=60.0) as swarm:
        report = swarm.start_run(spec, args.key)
        if report.status not in ("running", "complete"):
            raise _over(report, args.key)
        _warn(args, report)
        if args.watch:
            return _watch(args, report.run_id, 0)
        done = f"with this key is already complete at step {report.step}" if report.status == "complete" else "started"
        print(report.model_dump_json() if args.json else f"run {report.run_id} {done} on {swarm.url}")
    return 0


def _with_texts(algorithm: dict[str, Any]) -> dict[str, Any]:
    """Return the algorithm with the source of each function that it names. Raises: UsageError."""
    try:
        return with_sources(algorithm)
    except SourceFault as error:
        raise UsageError(str(error)) from error


def show_status(args: argparse.Namespace) -> int:
    """Show the server, the run and its steps. With --watch, show steps as they are made."""
    with connect(args) as swarm:
        status = swarm.status()
        run_id = args.run_id or status.latest_run_id
        if args.watch and run_id is not None:
            return _watch(args, run_id, args.since_step)
        report = None if run_id is None else swarm.run(run_id, args.since_step)
        if args.json:
            run = None if report is None else report.model_dump(mode="json")
            print(json.dumps({"server": status.model_dump(mode="json"), "run": run}))
            return 0
        print(_server_line(status))
        for line in standing_lines(status):
            print(line)
        if report is not None:
            print("\n".join([_run_line(report), *report.notes]))
            print(
                "\n".join(
                    [
                        *_table(report.steps),
                        *_families(status.pool.by_mix),
                        *_versions(report.versions),
                        *_checkpoints(report.checkpoints),
                    ]
                )
            )
    return 0


def patch_run(args: argparse.Namespace) -> int:
    """Merge a patch into the run's tunable fields."""
    patch = assign(read_document(args.patch), args.set)
    if not patch:
        raise UsageError("nothing to change: give a patch file or --set PATH=VALUE")
    with connect(args) as swarm:
        report = swarm.patch_run(args.run_id or swarm.current_run_id(), patch, args.if_version)
        print(
            report.model_dump_json() if args.json else f"run {report.run_id} has config version {report.config_version}"
        )
        _warn(args, report)
    return 0


def stop_run(args: argparse.Namespace) -> int:
    """Ask the server to stop the run. With --wait, return exit code 1 if the engine failed before the run ended."""
    with connect(args) as swarm:
        report = swarm.stop_run(args.run_id or swarm.current_run_id())
        if args.wait:
            report = _released(args, report)
        now = "stopping" if report.ended_at is None else f"over ({report.status})"
        with read_or_not():
            print(report.model_dump_json() if args.json else f"run {report.run_id} is {now}, at step {report.step}")
    return 1 if args.wait and report.ended_at is None else 0


def write_checkpoint(args: argparse.Namespace) -> int:
    """Ask the server to write a checkpoint."""
    with connect(args) as swarm:
        made = swarm.checkpoint(args.run_id or swarm.current_run_id())
        print(made.model_dump_json() if args.json else f"the checkpoint of step {made.step} is in {made.path}")
    return 0


def restore_run(args: argparse.Namespace) -> int:
    """Ask the server to restore a checkpoint."""
    with connect(args) as swarm:
        report = swarm.restore(args.run_id or _going_on(swarm, args.step), args.step)
        line = f"run {report.run_id} continues from step {report.step} on branch {report.branch}"
        print(report.model_dump_json() if args.json else line)
    return 0


def _going_on(swarm: SwarmClient, step: int) -> str:
    """Return the run to restore if none is named: the current one, never a stopped one. Raises: NotFound."""
    status = swarm.status()
    if status.run_id is None:
        name = status.newest_run_id or "RUN"
        text = f"no run is in progress at {swarm.url}; to continue one that has ended: `swarm run restore {step} --run-id {name}`"
        raise NotFound(ErrorCode.NOT_FOUND, text)
    return status.run_id


def quarantine_version(args: argparse.Namespace) -> int:
    """Exclude a client version from training, or admit it again."""
    with connect(args) as swarm:
        run_id = args.run_id or swarm.current_run_id()
        report = swarm.quarantine(run_id, args.client_version, reason=args.reason, quarantined=not args.lift)
        done = "is admitted again" if args.lift else f"is quarantined{_unseen(report, args.client_version)}"
        print(report.model_dump_json() if args.json else f"client version {args.client_version} {done}")
    return 0


def _unseen(report: RunReport, client_version: str) -> str:
    """Return a note if no training episode has had this quarantined version yet, because it may be misspelt; else an empty string."""
    seen = list(dict.fromkeys(version.client_version for version in report.versions))
    if client_version in seen:
        return ""
    return f" in advance: no training episode has had this version yet; seen so far: {', '.join(seen) or 'none'}"


def _over(report: RunReport, key: str) -> SwarmError:
    """Return the error for an idempotency key whose run has already ended."""
    reason = f" ({report.reason})" if report.reason else ""
    detail = (
        f"the run with key {key!r} is over and cannot be started again: {report.run_id} is {report.status}{reason}, at step "
        f"{report.step}; start another with a new key, or restore a checkpoint of this one with "
        f"`swarm run restore STEP --run-id {report.run_id}`"
    )
    return OverLimit(ErrorCode.OVER_LIMIT, detail, run_id=report.run_id)


def _looking_on(args: argparse.Namespace) -> SwarmClient:
    """Return a client that waits for a restarting server."""
    return connect(args, connect_s=_RESTART_S, later_s=_RESTART_S)


def _released(args: argparse.Namespace, report: RunReport) -> RunReport:
    """Wait until the run's server is free for another run or has failed, and return the run's last report.

    Prints what it is waiting for to standard error.
    """
    said, limit_s = "", report.spec.limits.drain_limit_s
    with _looking_on(args) as swarm:
        for status in swarm.statuses():
            report = swarm.run(report.run_id, report.step)
            if report.phase == "failed" or (report.phase == "idle" and report.ended_at):
                break
            left = status.pool.running
            waits = f"{left} open episodes, for at most {limit_s:g} s ({_NO_WAIT})" if left else "its last checkpoint"
            line = f"run {report.run_id} is stopping at step {report.step} ({report.phase}) and waiting for {waits}"
            if line != said:
                print(line, file=sys.stderr, flush=True)
            said = line
    return report


def _watch(args: argparse.Namespace, run_id: str, since_step: int) -> int:
    """Print steps as they are made until the run ends. Returns exit code 0 if the run is complete, else 1."""
    if not args.json:
        print(_heading(), flush=True)
    report, shown = None, list[str]()
    with _looking_on(args) as swarm:
        for status in swarm.statuses():
            standing = standing_lines(status)
            for line in standing:
                if line not in shown:
                    print(line, file=sys.stderr, flush=True)
            shown = standing
            report, steps = _gone_on(swarm, run_id, since_step, report)
            for step in steps:
                print(step.model_dump_json() if args.json else _row(step), flush=True)
            if report.status != "running":
                with read_or_not():
                    print(report.model_copy(update={"steps": []}).model_dump_json() if args.json else _run_line(report))
                return 0 if report.status == "complete" else 1
    return 1


def _gone_on(
    swarm: SwarmClient, run_id: str, since_step: int, before: RunReport | None
) -> tuple[RunReport, list[StepMetrics]]:
    """Return the run and its new steps after `since_step`. After a restore, these include the steps that were trained again."""
    report = swarm.run(run_id, since_step if before is None else max(since_step, before.step))
    if before is None or report.branch == before.branch:
        return report, report.steps
    report = swarm.run(run_id, since_step)
    return report, [step for step in report.steps if step.branch > before.branch or step.step > before.step]


def _server_line(status: ServerStatus) -> str:
    pool = status.pool
    reason = f" ({status.trouble})" if status.trouble else ""
    return (
        f"server {status.server_id}  {status.phase}{reason}  model {status.model}  engine {status.engine.backend} on "
        f"{status.engine.computes}  pool {pool.running} running, {pool.ended} ended, "
        f"{pool.groups_ready} of {pool.groups_needed} groups ready"
    )


def _run_line(report: RunReport) -> str:
    limit = report.spec.limits.steps
    reason = f" ({report.reason})" if report.reason else ""
    steps = f"{report.step}" if limit is None else f"{report.step} of {limit}"
    return f"run {report.run_id}  {report.status}{reason}  step {steps}  config {report.config_version}"


def _table(steps: Iterable[StepMetrics]) -> list[str]:
    rows = [_row(step) for step in steps]
    return [_heading(), *rows] if rows else ["no steps yet"]


def _families(by_mix: dict[str, MixStatus]) -> list[str]:
    """Return one line per family of tasks."""
    return [
        f"mix {name}: {family.trained_groups} groups trained, debt {family.debt:+.2f}, {family.running} running, "
        f"{family.ended} ended{', the others proceed without it' if family.passed else ''}"
        for name, family in by_mix.items()
    ]


def _versions(versions: list[VersionReport]) -> list[str]:
    """Return one line per client version, if there is anything to compare or report."""
    if len(versions) < 2 and not any(version.quarantined for version in versions):
        return []
    return [_version_line(version) for version in versions]


def _checkpoints(kept: list[CheckpointReport]) -> list[str]:
    """Return a line about the existing checkpoints, if there are any."""
    named = [f"{one.step}{_held_out(one)}" for one in kept]
    return [f"checkpoints: {', '.join(named)}"] if named else []


def _held_out(checkpoint: CheckpointReport) -> str:
    if checkpoint.held_out is None:
        return ""
    return f" (held-out {checkpoint.held_out:.3f}{', best' if checkpoint.best else ''})"


def _version_line(version: VersionReport) -> str:
    family = f" of mix {version.mix}" if version.mix else ""
    mean = "-" if version.reward_mean is None else f"{version.reward_mean:.3f}"
    line = f"client version {version.client_version}{family}: {version.episodes} episodes, reward {mean}"
    if version.shift is not None and version.shift_stderr is not None:
        line += f", {version.shift:+.3f} ± {version.shift_stderr:.3f} against {version.before}"
    return line if version.quarantined is None else f"{line}, quarantined: {version.quarantined}"


def _heading() -> str:
    return "  ".join(["  step", *(f"{title:>8}" for _, title, _ in _COLUMNS)])


def _row(step: StepMetrics) -> str:
    def cell(name: str, form: str) -> str:
        value: Any = step.values.get(name)
        return f"{'-' if value is None else format(value, form):>8}"

    return "  ".join([f"{step.step:>6}", *(cell(name, form) for name, _, form in _COLUMNS)])
