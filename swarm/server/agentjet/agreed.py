"""Batches that clients close: with two of AgentJet's methods, a step trains what was collected once any, or all, active clients agree.

Such a run asks for as many groups as its pool can hold. On agreement we patch `batch.tasks` down to the number of groups that can be
trained now, and patch it back once they are in a step. A full pool is closed without agreement, because nobody could claim otherwise.
Agreements are kept only in memory: after a restart, clients see a weight sync and agree again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from foundation.clock import Clock
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.server.agentjet import pool
from swarm.server.agentjet.config import CLOSED_BY_CLIENTS, METHOD_LABEL, all_the_pool_holds
from swarm.server.service import Service
from swarm.server.state.runs import Run
from swarm.server.state.server_state import ServerState

_log = logging.getLogger(__name__)

ACTIVE_S = 600.0
"""Seconds without a claim, a call or an ended episode after which a client no longer counts as active."""
SHOWN_S = 7.0
"""Seconds for which we report a weight sync after each step: AgentJet's clients poll every 5 s and see a status up to 1 s old."""
_BY = "agentjet: clients agreed"


@dataclass(slots=True)
class _Client:
    """An active client. Times are monotonic."""

    active_at: float
    agreed: bool = False


class AgreedBatches:
    """Tracks which clients are active and which agreed, and closes batches. Checks the state on each request, since clients poll."""

    def __init__(self, service: Service, clock: Clock) -> None:
        self._service = service
        self._clock = clock
        self._clients: dict[str, _Client] = {}
        self._lock = asyncio.Lock()
        self._known_run = ""
        self._closing_after: int | None = None
        """The newest step when closing began; the batch being closed becomes the step after it. None while no batch is being closed."""
        self._shown_until = 0.0

    def began(self, run_id: str) -> None:
        """Forget the previous run and its clients, because a new run began."""
        self._known_run, self._closing_after, self._shown_until = run_id, None, 0.0
        self._clients.clear()

    @property
    def shows_sync(self) -> bool:
        """Whether to report WEIGHT_SYNCING, whatever the engine is doing."""
        return self._closing_after is not None or self._clock.monotonic() < self._shown_until

    def played(self, client_id: str, *, declares: bool = False) -> None:
        """Record that a client claimed or ended an episode. With `declares`, it counts as active from now on."""
        known = self._clients.get(client_id)
        if known is not None:
            known.active_at = self._clock.monotonic()
        elif declares and self._method() is not None:
            self._clients[client_id] = _Client(self._clock.monotonic())

    async def agree(self, client_id: str) -> str | None:
        """Record a client's agreement. Return why it is rejected, or None if it is accepted."""
        await self.look()
        method = self._method()
        if method is None:
            return f"clients cannot close batches: set ajet.swarm_mode_sample_collection_method to {' or '.join(CLOSED_BY_CLIENTS)}"
        known = self._clients.get(client_id)
        if known is None:
            return "the client is not active: it has ended no training episode since the last step"
        known.agreed = True
        await self.look()
        return None

    async def look(self) -> None:
        """If it is time, close this batch or start the next. Does nothing unless clients close this run's batches."""
        async with self._lock:
            run = pool.current_run(self._service.state)
            if run is not None and self._method() is not None and self._service.state.serving:
                await self._look(run)

    async def _look(self, run: Run) -> None:
        state, tasks, whole = self._service.state, run.spec.batch.tasks, all_the_pool_holds(run.spec.batch)
        if run.run_id != self._known_run:
            # This process is younger than the run: clients may be waiting for a step that they agreed to.
            self._known_run, self._shown_until = run.run_id, self._clock.monotonic() + SHOWN_S
        if self._closing_after is not None:
            await self._follow(run, self._closing_after)
        elif tasks != whole and state.journalled is None:
            await self._ask_for(run, whole)
        elif (full := len(state.pooled) >= run.spec.batch.max_pool_episodes) or self._agreed():
            await self._close(run, full=full)

    async def _close(self, run: Run, *, full: bool) -> None:
        """Put all trainable groups into a step. If there are none, clients go on collecting; a full pool drops episodes
        that no group needs."""
        found = _trainable(self._service.state)
        self._clients.clear()
        if full:
            _log.warning(
                "the pool is full (%d episodes): training a step before clients agree", len(self._service.state.pooled)
            )
        if found or full:
            self._closing_after = run.step
            await self._ask_for(run, max(1, found))
        else:
            _log.warning("clients agreed to a step, but no group can be trained yet; they go on collecting")
            self._shown_until = self._clock.monotonic() + SHOWN_S

    async def _follow(self, run: Run, after: int) -> None:
        """Start collecting the next batch once this one is in the journal. Do not wait for groups that have become too stale."""
        state, tasks, whole = self._service.state, run.spec.batch.tasks, all_the_pool_holds(run.spec.batch)
        made, fixed = run.step > after, state.journalled is not None
        wanted = whole if made or fixed else min(tasks, _trainable(state)) or whole
        if wanted != tasks:
            await self._ask_for(run, wanted)
        if made or (not fixed and wanted == whole):
            self._closing_after, self._shown_until = None, self._clock.monotonic() + SHOWN_S

    async def _ask_for(self, run: Run, tasks: int) -> None:
        """Patch the number of groups per step. If the patch cannot be stored now, the next request tries again."""
        try:
            await self._service.patch_run(run.run_id, {"batch": {"tasks": tasks}}, None, _BY)
        except Refusal as refusal:
            if refusal.code not in (ErrorCode.OVER_LIMIT, ErrorCode.NOT_FOUND, ErrorCode.STORAGE_FULL):
                raise
            _log.info("batch.tasks stays as it is for now: %s", refusal)

    def active_clients(self) -> list[dict[str, Any]]:
        """Return the active clients, in the format of the pool information. Forgets clients that were silent for too long."""
        now, unix = self._clock.monotonic(), self._clock.now()
        heard = {client_id: max(one.active_at, self._called_at(client_id)) for client_id, one in self._clients.items()}
        self._clients = {name: one for name, one in self._clients.items() if now - heard[name] < ACTIVE_S}
        return [
            {
                "client_uuid": name,
                "last_activity_at": unix - (now - heard[name]),
                "allowed_sync_weight": one.agreed,
            }
            for name, one in self._clients.items()
        ]

    def _called_at(self, client_id: str) -> float:
        """Return the monotonic time of the last request for any of the client's open episodes; 0 if it has none."""
        state, now = self._service.state, self._clock.monotonic()
        mine = [live for live in state.live.values() if live.row.client_id == client_id]
        return max((now - pool.quiet_s(state, live, now) for live in mine), default=0.0)

    def _agreed(self) -> bool:
        words = [one["allowed_sync_weight"] for one in self.active_clients()]
        rule = any if self._method() == CLOSED_BY_CLIENTS[0] else all
        return bool(words) and rule(words)

    def _method(self) -> str | None:
        """Return the method by which clients close the current run's batches; None if clients do not close them."""
        run = pool.current_run(self._service.state)
        method = run.spec.labels.get(METHOD_LABEL) if run is not None else None
        return method if method in CLOSED_BY_CLIENTS else None


def _trainable(state: ServerState) -> int:
    """Return the number of groups that are ready, or would be if no further episode could join them."""
    groups = [group for group in state.groups if not group.useless]
    cut_short = [
        group
        for group in groups
        if group.open and not group.running and not state.groups.awaits(group) and group.worth_training()
    ]
    return sum(not group.open for group in groups) + len(cut_short)
