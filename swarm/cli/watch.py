"""What one watches of a server: status, steps, clients, failures, rates. Follows by long poll; draws nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

from pydantic import BaseModel

from swarm.cli.diagnosis import ClientRecord, client_records
from swarm.client.client import SwarmClient
from swarm.protocol.episodes import EpisodeState
from swarm.protocol.errors import SwarmError
from swarm.protocol.status import ServerStatus, StepMetrics
from swarm.protocol.summary import LastFailure, LedgerSummary

LEAST_PAUSE_S = 0.5
"""Between two looks, however fast the server changes."""
SUMMARY_EVERY_S = 3.0
SUMMARY_SHARE = 0.05
"""Of the server's time that may be spent on adding up its ledger for this watcher."""
RETRY_S = 2.0
WAIT_S = 5.0
STEPS_KEPT = 500


class ServerView(BaseModel):
    """One server as it is now. error: why it cannot be seen; the rest is then as it was last."""

    url: str
    error: str | None = None
    status: ServerStatus | None = None
    run_status: str | None = None
    steps_wanted: int | None = None
    config_version: int | None = None
    branch: int | None = None
    """Of the run: a restore begins a new one."""
    notes: list[str] = []
    """What the owner of the run should know of its spec."""
    steps: list[StepMetrics] = []
    """The newest of the run, ascending."""
    clients: list[ClientRecord] = []
    failures: list[LastFailure] = []
    """The last one of each client and version, newest first."""
    closed: int = 0
    """Episodes of the run that are not running any more."""
    episodes_per_s: float | None = None

    @property
    def rewards(self) -> list[float]:
        """The learning curve."""
        return [step.values.get("reward_mean", 0.0) for step in self.steps]


class Watch:
    """One server, followed. The client should not be patient: a server that is away is shown as away."""

    def __init__(self, swarm: SwarmClient) -> None:
        self._swarm = swarm
        self._view = ServerView(url=swarm.url)
        self._summary_at: float | None = None
        self._summary_took_s = 0.0

    @property
    def url(self) -> str:
        return self._swarm.url

    async def now(self) -> ServerView:
        """One look; an unreachable server is a view with its error."""
        try:
            await self._take(await self._swarm.status())
        except SwarmError as error:
            self._view = self._view.model_copy(update={"error": str(error)})
        return self._view

    async def views(self) -> AsyncIterator[ServerView]:
        """The server as it is, and again after each change, for ever."""
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
        same_run = before.status is not None and before.status.run_id == status.run_id
        changed: dict[str, object] = {"status": status, "error": None}
        if not same_run:
            before = ServerView(url=before.url)
            self._summary_at = None
        if status.run_id is not None:
            steps = before.steps
            report = await self._swarm.run(status.run_id, steps[-1].step if steps else 0)
            if steps and report.branch != before.branch:  # which of them still stand is for the server to say
                steps, report = [], await self._swarm.run(status.run_id)
            changed |= {
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
                summary = await self._swarm.summary(run_id=status.run_id)
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
