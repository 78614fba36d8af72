"""The face of the coordinator: what routes, gateway and conductor ask of the book. Knows asyncio, but neither HTTP nor torch.

Every answer to a change is given after it is on disk. Waits are events, limits are timers on the Clock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from foundation.clock import Clock
from foundation.ids import Ids
from swarm.engine.seam import EngineInfo
from swarm.protocol.episodes import (
    DropReason,
    EpisodeAbort,
    EpisodeClaim,
    EpisodeKind,
    EpisodeReceipt,
    EpisodeRenewal,
    EpisodeResult,
    EpisodeState,
    EpisodeTrace,
    LedgerEntry,
    LedgerPage,
    RecordedCall,
    TaskProgress,
    WeightsVersion,
)
from swarm.protocol.runspec import RunSpec
from swarm.protocol.status import CheckpointRef, RunCreated, RunReport, RunRequest, ServerStatus
from swarm.server.coordinator.calls import OpenCall


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedLease:
    """A claim that was granted; the route adds base_url and api_key."""

    episode_id: str
    lease: str
    group_id: str | None
    slot: int | None
    weights_version: WeightsVersion
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvent:
    """One thing that a subscriber hears: the status after a change, or a log line."""

    kind: Literal["status", "log"]
    data: dict[str, Any]


class Desk:
    """One per server. All methods are called from one event loop.

    Raises: Refusal with its code. After STORAGE_FULL nothing has changed, in memory or on disk.
    """

    @classmethod
    def open(cls, state_dir: Path, info: EngineInfo, *, clock: Clock, ids: Ids) -> Desk:
        """The desk over the pool in `state_dir` (made when missing). Episodes that were open are closed as server_restarted."""
        raise NotImplementedError

    async def start(self) -> None:
        """Begin to watch limits. Needs the running event loop."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop the timers, finish the writes under way, close the pool. Waiting claims get not_rolling."""
        raise NotImplementedError

    # -- runs -----------------------------------------------------------------------------------------------------

    async def create_run(self, request: RunRequest, by: str) -> RunCreated:
        """Start a run. Codes: server_busy{run_id, holder}, invalid_spec{errors}, idempotency_conflict, engine_failed."""
        raise NotImplementedError

    async def report(self, run_id: str, since_step: int = 0) -> RunReport:
        """The run, with metrics of the steps after `since_step`. Codes: not_found."""
        raise NotImplementedError

    async def patch_run(self, run_id: str, patch: Mapping[str, Any], if_match: int | None, by: str) -> RunReport:
        """Change tunable fields. Codes: not_found, config_conflict{config_version}, invalid_spec{errors}, over_limit."""
        raise NotImplementedError

    async def stop_run(self, run_id: str) -> RunReport:
        """Ask for a stop: drain, checkpoint, idle. Answers once the wish is durable; follow `status` to see it done. Again: nothing."""
        raise NotImplementedError

    async def request_checkpoint(self, run_id: str) -> CheckpointRef:
        """A whole checkpoint of the newest step; waits until it is written. Codes: not_found, over_limit, engine_failed."""
        raise NotImplementedError

    # -- episodes -------------------------------------------------------------------------------------------------

    async def claim(self, claim: EpisodeClaim) -> GrantedLease:
        """A slot to try the task. Waits up to `wait_s`.

        Codes: not_found (another run), over_limit (complete or stopped), engine_failed, and after the wait not_rolling or
        draining, both with retry_after_s; idempotency_conflict.
        """
        raise NotImplementedError

    async def end(self, episode_id: str, result: EpisodeResult) -> EpisodeReceipt:
        """Store reward and calls durably. Codes: not_found, lease_lost, idempotency_conflict, storage_full."""
        raise NotImplementedError

    async def abort(self, episode_id: str, abort: EpisodeAbort) -> LedgerEntry:
        """Drop the episode and offer its slot again. Codes: not_found, lease_lost."""
        raise NotImplementedError

    async def renew(self, episode_id: str, renewal: EpisodeRenewal) -> float:
        """Extend the lease; returns expires_at (Unix time). Codes: not_found, lease_lost."""
        raise NotImplementedError

    # -- calls (the gateway's) --------------------------------------------------------------------------------------

    def open_call(self, episode_id: str, lease: str) -> OpenCall:
        """Begin a call. Refreshes the lease, whose idle limit stands still until `close_call`. Codes: not_found, lease_lost."""
        raise NotImplementedError

    def close_call(self, call: OpenCall, recorded: RecordedCall | Sequence[RecordedCall] | None) -> bool:
        """End a call with what was sampled (several records for n > 1, None for nothing). Call exactly once per `open_call`.

        Returns False when the lease was lost or the episode ended meanwhile: the record was discarded.
        """
        raise NotImplementedError

    # -- what happened ----------------------------------------------------------------------------------------------

    async def entry(self, episode_id: str) -> LedgerEntry:
        """Codes: not_found."""
        raise NotImplementedError

    async def trace(self, episode_id: str) -> EpisodeTrace:
        """Every recorded call, token by token; none where old calls were freed. Codes: not_found."""
        raise NotImplementedError

    async def ledger(
        self,
        *,
        run_id: str | None = None,
        step: int | None = None,
        client_id: str | None = None,
        task_id: str | None = None,
        kind: EpisodeKind | None = None,
        reason: DropReason | None = None,
        state: EpisodeState | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> LedgerPage:
        """Episodes in the order of their claims. `after`: the `next` of the page before."""
        raise NotImplementedError

    async def tasks(
        self, *, run_id: str | None = None, client_id: str | None = None, mix: str | None = None
    ) -> list[TaskProgress]:
        """Ended episodes by task (and, for eval, by step of the weights). run_id None: the current run."""
        raise NotImplementedError

    # -- status -----------------------------------------------------------------------------------------------------

    async def status(self, since: int | None = None, wait_s: float = 0.0) -> ServerStatus:
        """How the server is doing. With `since`, waits up to `wait_s` for a revision that differs from it."""
        raise NotImplementedError

    def events(self) -> AsyncIterator[ServerEvent]:
        """Statuses and log lines from now on. A slow reader loses the oldest. Close the iterator to unsubscribe."""
        raise NotImplementedError

    def log(self, line: str) -> None:
        """Show a line to subscribers of `events`."""
        raise NotImplementedError

    # -- shorthands ---------------------------------------------------------------------------------------------------

    def spec(self, run_id: str) -> RunSpec:
        """The current run's spec at its newest config version. Codes: not_found for any other run."""
        raise NotImplementedError
