"""`swarm top` shows servers live: phase, step, pool, clients, rates, last errors and learning curve. `--once` prints this as text."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime

from pydantic import BaseModel

from foundation.commandline import UsageError
from foundation.streams import one_line
from swarm.cli.diagnosis import ClientRecord, client_records
from swarm.cli.options import checked, token_of, url_of
from swarm.client import Patience, SwarmClient
from swarm.protocol.episodes import EpisodeState
from swarm.protocol.errors import SwarmError
from swarm.protocol.status import ServerStatus, StepMetrics
from swarm.protocol.summary import LastFailure, LedgerSummary

LEAST_PAUSE_S = 0.5
"""Minimum pause between two updates, in seconds, however fast the server changes."""
SUMMARY_EVERY_S = 3.0
SUMMARY_SHARE = 0.05
"""Maximum share of the server's time that this watcher's ledger summaries may take."""
RETRY_S = 2.0
WAIT_S = 5.0
STEPS_KEPT = 500
CELLS = 60
CLIENTS_SHOWN = 20
VERSION_CHARS = 12
FAILURES_SHOWN = 5
_BLOCKS = "▁▂▃▄▅▆▇█"
Row = tuple[str, ...]


def watch_servers(args: argparse.Namespace) -> int:
    """Watch servers until q is pressed. With --once, return exit code 1 if a server could not be reached."""
    urls = [checked(url) for url in args.urls] or [url_of(args)]
    if args.json and not args.once:
        raise UsageError("--json requires --once")
    if not args.once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("swarm top needs a terminal; to print the state once, as text or with --json, use --once")
    return asyncio.run(_once(args, urls) if args.once else _live(args, urls))


async def _once(args: argparse.Namespace, urls: list[str]) -> int:
    async with AsyncExitStack() as stack:
        views = await asyncio.gather(*(watch.now() for watch in await _watches(args, urls, stack)))
    if args.json:
        print(json.dumps({"servers": [view.model_dump(mode="json") for view in views]}))
    else:
        print("\n\n".join(server_text(view) for view in views))
    return 1 if any(view.error is not None for view in views) else 0


async def _live(args: argparse.Namespace, urls: list[str]) -> int:
    try:
        from swarm.cli.top_app import Top
    except ModuleNotFoundError as error:
        if error.name != "textual":
            raise
        raise UsageError(
            "swarm top needs Textual: pip install 'swarm-researcher[top]'; or print the state once with --once"
        ) from error
    async with AsyncExitStack() as stack:
        app = Top(await _watches(args, urls, stack))
        await app.run_async()
    return app.return_code or 0


async def _watches(args: argparse.Namespace, urls: list[str], stack: AsyncExitStack) -> list[Watch]:
    token, patience = token_of(args), Patience(connect_s=0.0, later_s=0.0)
    clients = [SwarmClient(url, token, client_id="swarm-top", patience=patience) for url in urls]
    return [Watch(await stack.enter_async_context(client)) for client in clients]


# -- a server, followed ---------------------------------------------------------------------------------------------------


class ServerView(BaseModel):
    """One server's current state. `error` says why the state cannot be read; the other fields then have their last known values."""

    url: str
    error: str | None = None
    status: ServerStatus | None = None
    run_id: str | None = None
    """The newest run, which may be over."""
    run_status: str | None = None
    step: int = 0
    steps_wanted: int | None = None
    config_version: int | None = None
    branch: int | None = None
    """The run's branch. Each restore starts a new one."""
    notes: list[str] = []
    """Warnings about the spec, for the owner of the run."""
    steps: list[StepMetrics] = []
    """The newest steps of the run, in ascending order."""
    clients: list[ClientRecord] = []
    failures: list[LastFailure] = []
    """The last failure of each client and version, newest first."""
    closed: int = 0
    """Number of the run's episodes that are no longer running."""
    episodes_per_s: float | None = None

    @property
    def rewards(self) -> list[float]:
        """The learning curve: the mean reward of each step."""
        return [step.values.get("reward_mean", 0.0) for step in self.steps]


class Watch:
    """Follows one server. The client should not retry, so that an unreachable server is shown as such."""

    def __init__(self, swarm: SwarmClient) -> None:
        self._swarm = swarm
        self._view = ServerView(url=swarm.url)
        self._summary_at: float | None = None
        self._summary_took_s = 0.0

    @property
    def url(self) -> str:
        return self._swarm.url

    async def now(self) -> ServerView:
        """Return the current view. If the server cannot be reached, the view contains the error."""
        try:
            await self._take(await self._swarm.status())
        except SwarmError as error:
            self._view = self._view.model_copy(update={"error": str(error)})
        return self._view

    async def views(self) -> AsyncIterator[ServerView]:
        """Yield the current view, then a new one after each change, forever."""
        clock = self._swarm.clock
        while True:
            yield await self.now()
            if self._view.error is not None or self._view.status is None:
                await clock.sleep(RETRY_S)
                continue
            await clock.sleep(LEAST_PAUSE_S)
            try:
                await self._swarm.status(self._view.status.revision, WAIT_S)
            except SwarmError as error:
                self._view = self._view.model_copy(update={"error": str(error)})

    async def _take(self, status: ServerStatus) -> None:
        before = self._view
        run_id = status.latest_run_id
        changed: dict[str, object] = {"status": status, "error": None}
        if before.status is None or before.run_id != run_id:
            before = ServerView(url=before.url)
            self._summary_at = None
        if run_id is not None:
            steps = before.steps
            report = await self._swarm.run(run_id, steps[-1].step if steps else 0)
            if steps and report.branch != before.branch:
                # After a restore, fetch all steps again, because some are no longer valid.
                steps, report = [], await self._swarm.run(run_id)
            changed |= {
                "run_id": run_id,
                "step": report.step,
                "steps": [*steps, *report.steps][-STEPS_KEPT:],
                "run_status": report.status,
                "steps_wanted": report.spec.limits.steps,
                "config_version": report.config_version,
                "branch": report.branch,
                "notes": report.notes,
            }
            now = self._swarm.clock.monotonic()
            pause_s = max(SUMMARY_EVERY_S, self._summary_took_s / SUMMARY_SHARE)
            if self._summary_at is None or now - self._summary_at >= pause_s:
                summary = await self._swarm.summary(run_id=run_id)
                self._summary_took_s = self._swarm.clock.monotonic() - now
                changed |= self._summarised(before, summary, now)
        self._view = before.model_copy(update=changed)

    def _summarised(self, before: ServerView, summary: LedgerSummary, now: float) -> dict[str, object]:
        closed = sum(count.episodes for count in summary.counts if count.state is not EpisodeState.RUNNING)
        rate = None
        if self._summary_at is not None and now > self._summary_at:
            rate = max(0, closed - before.closed) / (now - self._summary_at)
        self._summary_at = now
        return {
            "clients": client_records(summary),
            "failures": summary.failures,
            "closed": closed,
            "episodes_per_s": rate,
        }


# -- as text --------------------------------------------------------------------------------------------------------------


def server_text(view: ServerView) -> str:
    """Return the text that `swarm top --once` prints for one server."""
    lines = [headline(view)]
    if view.error is not None:
        lines.append(f"  {view.error}")
    if view.status is None:
        return "\n".join(lines)
    lines += [f"  {line}" for line in (*view.notes, pool_line(view), rate_line(view), *standing_lines(view.status))]
    lines += [f"  mix {'  '.join(row)}" for row in mix_rows(view)]
    if view.steps:
        lines.append(f"  {curve_line(view)}")
    lines += [f"  client {'  '.join(row)}" for row in client_rows(view)]
    lines += [f"  last {line}" for line in failure_lines(view)]
    return "\n".join(lines)


def headline(view: ServerView) -> str:
    """Return a line with the server's URL, phase, model and run."""
    status = view.status
    if status is None:
        return f"{view.url}  not reached yet" if view.error is None else f"{view.url}  unreachable"
    phase = "unreachable" if view.error else str(status.phase)
    reason = f" ({status.trouble})" if status.trouble else ""
    run = "no run"
    if view.run_id is not None:
        wanted = "" if view.steps_wanted is None else f"/{view.steps_wanted}"
        run = f"run {view.run_id} {view.run_status}  step {view.step}{wanted}  config {view.config_version}"
    return f"{view.url}  {phase}{reason}  {status.model} on {status.engine.computes}  {run}"


def pool_line(view: ServerView) -> str:
    """Return a line about the episodes and groups in the pool."""
    assert view.status is not None
    pool = view.status.pool
    return (
        f"pool: {pool.running} running, {pool.ended} ended; groups: {pool.groups_open} open, "
        f"{pool.groups_ready} of {pool.groups_needed} ready"
    )


def rate_line(view: ServerView) -> str:
    """Return a line about the server's speed."""
    assert view.status is not None
    engine = view.status.engine
    episodes = "-" if view.episodes_per_s is None else f"{view.episodes_per_s:.1f}"
    step_s = view.steps[-1].values.get("step_s") if view.steps else None
    step = "" if step_s is None else f", last step {step_s:.1f} s"
    failures = f", engine failures {engine.failures}" if engine.failures else ""
    return f"rates: {engine.tokens_per_s:.0f} tokens/s, {episodes} episodes/s{step}{failures}"


def standing_lines(status: ServerStatus) -> list[str]:
    """Return lines about what the run is waiting for, the engine's latest hang, and replicas that are down. Empty if all is well."""
    lines = []
    if (waiting := status.waiting_for) is not None:
        who = "no client plays it" if waiting.client_id is None else f"client {one_line(waiting.client_id)}"
        lines.append(f"waiting for task {one_line(waiting.task_id)} ({who}) since {clock_time(waiting.since)}")
    if (hang := status.engine.hang) is not None:
        over = "not over yet" if hang.over_at is None else f"over at {clock_time(hang.over_at)}"
        lines.append(f"hung since {clock_time(hang.since)} while {hang.phase}, {over}: {one_line(hang.reason)}")
    away = [replica for replica in status.engine.replicas if status.engine.warm and not replica.ready]
    for replica in away:
        until = "for good" if replica.failed_for_good else "and restarting"
        lines.append(f"replica {replica.device} is down {until}: {one_line(replica.reason or 'no reason given')}")
    return lines


def clock_time(at: float) -> str:
    """Format a Unix time as a time of day in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S UTC")


def curve_line(view: ServerView) -> str:
    """Return the learning curve as a line, from the oldest to the newest step."""
    rewards = view.rewards
    return f"reward {sparkline(rewards)} {rewards[0]:.3f} → {rewards[-1]:.3f}"


def mix_rows(view: ServerView) -> list[Row]:
    """Return a row for each family: name, running, ended, trained groups and debt."""
    assert view.status is not None
    return [
        (
            name,
            f"{mix.running} running",
            f"{mix.ended} ended",
            f"{mix.trained_groups} groups trained",
            f"debt {mix.debt:+.2f}",
        )
        for name, mix in sorted(view.status.pool.by_mix.items())
    ]


def client_rows(view: ServerView) -> list[Row]:
    """Return a row for each client and version, with its episodes, mean reward and failures."""
    return [
        (
            one_line(one.client_id),
            f"version {_short(one.client_version)}",
            f"{one.episodes} episodes",
            "reward -" if one.reward_mean is None else f"reward {one.reward_mean:.3f}",
            f"{one.failed} failed",
        )
        for one in view.clients[:CLIENTS_SHOWN]
    ]


def _short(version: str) -> str:
    """Return the version for display. A digest is cut to its first characters."""
    line = one_line(version)
    return f"{line[:VERSION_CHARS]}…" if re.fullmatch(r"[0-9a-f]{32,}", line) else line


def failure_lines(view: ServerView) -> list[str]:
    """Return one line for each client's last failure."""
    lines = []
    for failure in view.failures[:FAILURES_SHOWN]:
        said = (failure.detail or "").strip().splitlines()
        last = one_line(said[-1]) if said else ""
        lines.append(f"{failure.reason} {failure.episode_id} {one_line(failure.client_id)}: {last}")
    return lines


def sparkline(values: Sequence[float], cells: int = CELLS) -> str:
    """Draw the values as a line of at most `cells` blocks. Each block is a mean of neighbouring values, scaled from lowest to highest."""
    if not values:
        return ""
    width = max(1, -(-len(values) // cells))
    means = [sum(part) / len(part) for part in (values[at : at + width] for at in range(0, len(values), width))]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int((mean - low) / span * len(_BLOCKS)))] for mean in means)
