"""The client of one swarm server: the whole protocol, typed, with retries and idempotency keys."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, Unpack

import httpx
from pydantic import BaseModel, RootModel

from foundation.clock import Clock, SystemClock
from foundation.ids import Ids, RandomIds, derived_seed
from foundation.nearest import nearest
from foundation.strict import FieldError
from swarm.client.episode import Episode
from swarm.client.errors import InvalidSpec, NotFound
from swarm.client.rollouts import RolloutReport, Rollouts
from swarm.client.tasks import Rollout, TaskStream
from swarm.client.wire import Patience, Wire, read, require_finite_metadata, sendable, written
from swarm.protocol.episodes import (
    Cause,
    EpisodeAbort,
    EpisodeClaim,
    EpisodeGrant,
    EpisodeOptions,
    EpisodeReceipt,
    EpisodeRenewal,
    EpisodeResult,
    EpisodeTrace,
    LedgerEntry,
    LedgerPage,
    RolloutOptions,
    SessionBegun,
    SessionRequest,
    TaskProgress,
)
from swarm.protocol.errors import ErrorCode
from swarm.protocol.problem import invalid_spec
from swarm.protocol.runspec import RunSpec
from swarm.protocol.status import (
    CheckpointRef,
    QuarantineRequest,
    RestoreRequest,
    RunCreated,
    RunReport,
    RunRequest,
    ServerStatus,
)
from swarm.protocol.summary import LedgerFields, LedgerFilter, LedgerSummary
from swarm.protocol.teams import EpisodeCommit, EpisodePreparation, EpisodeResolution, TeamReceipt

API = "/swarm/v1"
LEDGER_PAGE = 1000
ROLLOUT_PATIENCE = Patience(later_s=math.inf, full_s=120.0)
"""For unattended work: wait as long as the server says later, and give people time to clear a full disk."""
ABORT_PATIENCE = Patience(connect_s=5.0, later_s=5.0)
"""Short: a lost abort does no harm, because the lease runs out, and a leaving client should not wait for it."""


class _Tasks(RootModel[list[TaskProgress]]):
    """The answer to `tasks`."""


class _Renewed(BaseModel):
    """The answer to `renew`."""

    expires_at: float


class SwarmClient:
    """One client's connection to one server. Use as an async context manager.

    client_id: the server counts episodes by it; use the same one again to continue where this client stopped.
    client_version: the version of the agent's code; episodes of different versions are never compared.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        client_id: str | None = None,
        client_version: str = "0",
        patience: Patience | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock | None = None,
        ids: Ids | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self.ids = ids or RandomIds()
        self.client_id = client_id or self.ids.new("client")
        self.client_version = client_version
        self._session = self.ids.new("session")
        """Distinguishes this process of the client from others; see `fence`."""
        self._begun: set[str] = set()
        """Runs in which this session has begun."""
        self._has_own_patience = patience is not None
        self._wire = Wire(
            url,
            token,
            patience=patience or Patience(),
            clock=self.clock,
            jitter=random.Random(derived_seed(self.client_id)),
            transport=transport,
        )

    @property
    def url(self) -> str:
        return self._wire.url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._wire.close()

    async def meet(self, connect_s: float) -> None:
        """Wait until the server has answered this client at least once. Raises: ServerUnreachable after `connect_s`.

        Never waits longer than this client's own patience.
        """
        if not self._wire.heard:
            patience = replace(self._wire.patience, connect_s=min(connect_s, self._wire.patience.connect_s))
            await self._wire.request("GET", "/health", patience=patience)

    # -- status -------------------------------------------------------------------------------------------------------

    async def status(self, since: int | None = None, wait_s: float = 30.0) -> ServerStatus:
        """How the server is doing. With `since`, waits up to `wait_s` for a revision that differs from it."""
        params = {} if since is None else _given({"since": since, "wait_s": wait_s})
        raw = await self._wire.request("GET", f"{API}/status", params=params, wait_s=wait_s)
        return read(ServerStatus, raw)

    async def statuses(self, wait_s: float = 30.0) -> AsyncIterator[ServerStatus]:
        """The status now, and again after each change, or after `wait_s` without one."""
        status = await self.status()
        while True:
            yield status
            status = await self.status(since=status.revision, wait_s=wait_s)

    # -- runs ---------------------------------------------------------------------------------------------------------

    async def start_run(self, spec: RunSpec, idempotency_key: str | None = None) -> RunReport:
        """Start a run, or find it again under the same key. Raises: ServerBusy, InvalidSpec, IdempotencyConflict."""
        request = RunRequest(spec=spec, idempotency_key=idempotency_key or self.ids.new("run-key"))
        raw = await self._post(f"{API}/runs", request)
        return await self.run(read(RunCreated, raw).run_id)

    async def run(self, run_id: str, since_step: int = 0) -> RunReport:
        """The run, with metrics of the steps after `since_step`."""
        raw = await self._wire.request("GET", f"{API}/runs/{run_id}", params={"since_step": since_step})
        return read(RunReport, raw)

    async def patch_run(self, run_id: str, patch: dict[str, Any], config_version: int | None = None) -> RunReport:
        """Merge `patch` into the spec's tunable fields. config_version: the one it is meant for; None: the newest.

        Raises: ConfigConflict when someone else changed it meanwhile.
        """
        try:
            body = json.dumps(patch, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidSpec(ErrorCode.INVALID_SPEC, f"the patch cannot be sent as JSON: {error}") from error
        if config_version is None:
            config_version = (await self.run(run_id)).config_version
        raw = await self._wire.request(
            "PATCH",
            f"{API}/runs/{run_id}",
            body=body,
            headers={"If-Match": f'"{config_version}"'},
            repeatable=False,
        )
        return read(RunReport, raw)

    async def stop_run(self, run_id: str) -> RunReport:
        """Ask for a stop: drain, checkpoint, idle. Answers before it is done; follow `statuses`."""
        return read(RunReport, await self._post(f"{API}/runs/{run_id}:stop"))

    async def checkpoint(self, run_id: str) -> CheckpointRef:
        """Write a whole checkpoint now; returns when it is written."""
        raw = await self._wire.request("POST", f"{API}/runs/{run_id}:checkpoint", wait_s=600.0)
        return read(CheckpointRef, raw)

    async def restore(self, run_id: str, step: int, idempotency_key: str | None = None) -> RunReport:
        """Go back to the checkpoint of `step` (0: the hosted model) on a new branch of the run; waits until it is done.

        Raises: NotFound when no such checkpoint is kept, OverLimit when the run was replaced or is being stopped.
        """
        wish = RestoreRequest(step=step, idempotency_key=idempotency_key or self.ids.new("restore"))
        return read(RunReport, await self._post(f"{API}/runs/{run_id}:restore", wish, wait_s=600.0))

    async def quarantine(
        self, run_id: str, client_version: str, *, reason: str = "", quarantined: bool = True
    ) -> RunReport:
        """Keep episodes of this client version out of training from now on, or let them in again (quarantined=False)."""
        wish = QuarantineRequest(client_version=client_version, quarantined=quarantined, reason=reason)
        return read(RunReport, await self._post(f"{API}/runs/{run_id}:quarantine", wish))

    # -- what happened ------------------------------------------------------------------------------------------------

    async def ledger(self, *, after: str | None = None, **wanted: Unpack[LedgerFields]) -> AsyncIterator[LedgerEntry]:
        """The ledger's entry of each episode, in the order of the claims. Fetches page after page. after: the `next` of a page."""
        while True:
            page = await self.ledger_page(after=after, limit=LEDGER_PAGE, **wanted)
            for entry in page.entries:
                yield entry
            if page.next is None:
                return
            after = page.next

    async def ledger_page(
        self, *, after: str | None = None, limit: int = 100, **wanted: Unpack[LedgerFields]
    ) -> LedgerPage:
        """One page of `ledger`, of at most 1000 episodes; its `next` is the following page's `after`."""
        params = {**_query(wanted), **_given({"after": after, "limit": limit})}
        return read(LedgerPage, await self._wire.request("GET", f"{API}/ledger", params=params))

    async def entry(self, episode_id: str, patience: Patience | None = None) -> LedgerEntry:
        """The ledger's entry of one episode, with the cause if it was lost."""
        raw = await self._wire.request("GET", f"{API}/episodes/{episode_id}", patience=patience)
        return read(LedgerEntry, raw)

    async def summary(self, **wanted: Unpack[LedgerFields]) -> LedgerSummary:
        """Totals over many episodes, by reason, cause, client and version."""
        raw = await self._wire.request("GET", f"{API}/ledger/summary", params=_query(wanted))
        return read(LedgerSummary, raw)

    async def trace(self, episode_id: str, *, text: bool = False) -> EpisodeTrace:
        """Every recorded call of an episode, token by token. text: with the text of each token."""
        params: dict[str, str | int | float] = {"text": "true"} if text else {}
        raw = await self._wire.request("GET", f"{API}/episodes/{episode_id}/trace", params=params)
        return read(EpisodeTrace, raw)

    async def tasks(
        self, *, run_id: str | None = None, client_id: str | None = None, mix: str | None = None
    ) -> list[TaskProgress]:
        """Number of ended episodes of each task. run_id None: the current run."""
        params = _given({"run_id": run_id, "client_id": client_id, "mix": mix})
        raw = await self._wire.request("GET", f"{API}/tasks", params=params)
        return read(_Tasks, raw).root

    # -- episodes, call by call -----------------------------------------------------------------------------------------

    async def claim(self, claim: EpisodeClaim, patience: Patience | None = None) -> EpisodeGrant:
        """Claim an attempt at a task; waits until there is one.

        Raises: OverLimit (the run is over), NotFound (another run), EngineFailed, TryLater when patience ran out.
        """
        if claim.idempotency_key is None:
            claim = claim.model_copy(update={"idempotency_key": self.ids.new("claim")})
        raw = await self._post(f"{API}/episodes:claim", claim, wait_s=claim.wait_s, patience=patience)
        return read(EpisodeGrant, raw)

    async def fence(self, run_id: str, client_id: str, reason: str, *, session: str | None = None) -> list[str]:
        """Shut out every `run_tasks` of a client, in any process, except the one with this session (None: all of them).

        Aborts their open episodes with `reason`, as lost by the client, and returns the ids. Results and claims that they send
        afterwards are refused (LeaseLost).
        """
        session = session or self.ids.new("session")
        request = SessionRequest(run_id=run_id, client_id=client_id, session=session, reason=sendable(reason))
        return read(SessionBegun, await self._post(f"{API}/sessions", request)).closed

    async def end(self, episode_id: str, result: EpisodeResult) -> EpisodeReceipt:
        """End an episode with a result. When this returns, it is stored durably. Raises: LeaseLost."""
        require_finite_metadata(result.metadata)
        if result.idempotency_key is None:
            result = result.model_copy(update={"idempotency_key": f"end-{episode_id}"})
        return read(EpisodeReceipt, await self._post(f"{API}/episodes/{episode_id}:end", result))

    async def abort(self, episode_id: str, lease: str, reason: str, cause: Cause | None = None) -> LedgerEntry:
        """Drop an episode; its slot is offered again. cause: who lost it; None means the rollout. Raises: LeaseLost.

        The entry names the cause as the server sees it, which also knows its own failures.
        """
        abort = EpisodeAbort(lease=lease, reason=sendable(reason), cause=cause)
        raw = await self._post(f"{API}/episodes/{episode_id}:abort", abort, patience=ABORT_PATIENCE)
        return read(LedgerEntry, raw)

    async def prepare(self, episode_id: str, preparation: EpisodePreparation) -> TeamReceipt:
        """Bind an episode durably to the decision of its team. Raises: LeaseLost, Forbidden (the decider's address)."""
        return read(TeamReceipt, await self._post(f"{API}/episodes/{episode_id}:prepare", preparation))

    async def commit(self, episode_id: str, lease: str, patience: Patience | None = None) -> TeamReceipt:
        """On the decider: commit the team. Elsewhere: report that it is committed. Raises: LeaseLost if it was aborted."""
        path = f"{API}/episodes/{episode_id}:commit"
        return read(TeamReceipt, await self._post(path, EpisodeCommit(lease=lease), patience=patience))

    async def resolve(self, episode_id: str, resolution: EpisodeResolution) -> TeamReceipt:
        """Decide a prepared episode whose decider is gone for good. Needs the admin token."""
        return read(TeamReceipt, await self._post(f"{API}/episodes/{episode_id}:resolve", resolution))

    async def renew(self, episode_id: str, lease: str) -> float:
        """Extend a lease by its idle limit; returns the Unix time at which it now ends. Raises: LeaseLost."""
        raw = await self._post(f"{API}/episodes/{episode_id}:renew", EpisodeRenewal(lease=lease))
        return read(_Renewed, raw).expires_at

    # -- episodes, whole ----------------------------------------------------------------------------------------------

    async def current_run_id(self) -> str:
        """The id of the newest run on this server, which may be over. Raises: NotFound if there was none yet."""
        status = await self.status()
        if status.latest_run_id is None:
            raise NotFound(ErrorCode.NOT_FOUND, f"{self.url} has had no run yet; start one with `swarm run start`")
        return status.latest_run_id

    def episode(
        self, *, task_id: str, idempotency_key: str | None = None, **options: Unpack[EpisodeOptions]
    ) -> Episode:
        """An episode as an async context manager. run_id None: the current run, looked up on entry.

        Inside the block: `base_url`, `api_key`, `end(reward=...)`. An exception aborts the episode with its message.
        Raises: InvalidSpec for a misspelt keyword or a value that does not fit.
        """
        _require_known(options, EpisodeOptions)
        sampling = options.pop("sampling", None)
        run_id = options.get("run_id") or ""
        fields: dict[str, Any] = {
            **options,
            "run_id": run_id,
            "idempotency_key": idempotency_key or self.ids.new("claim"),
            "session": self._session if run_id in self._begun else None,
            "task_id": task_id,
            "client_id": self.client_id,
            "client_version": self.client_version,
        }
        return Episode(self, EpisodeClaim(**fields), clock=self.clock, sampling=sampling)

    async def run_tasks(self, tasks: TaskStream, rollout: Rollout, **options: Unpack[RolloutOptions]) -> RolloutReport:
        """Run `rollout` on every task, many at a time, until the stream or the run ends.

        Continues where this client_id stopped, and shuts out its earlier processes (see `fence`). Attempts lost by rollout, grader or
        a limit are retried `retries` times, across restarts of the client; then the task is skipped. A task is also skipped after this
        client died three times while playing it. Attempts lost by server, network or a person are retried without limit. Without its
        own `patience`, the client waits as long as the server says later, and two minutes for room on the server's disk.
        Raises: RolloutsFailing when task after task fails; Refusal, ServerUnreachable.
        """
        _require_known(options, RolloutOptions)
        run_id = options.get("run_id") or await self.current_run_id()
        swarm = self._enduring()
        rollouts = Rollouts(swarm, rollout, run_id, options)
        if run_id not in self._begun:
            await swarm.fence(run_id, self.client_id, "the client was restarted", session=self._session)
            self._begun.add(run_id)
        return await rollouts.work(tasks)

    def _enduring(self) -> SwarmClient:
        """This client over the same connections, with the patience of `run_tasks` unless it has its own."""
        if self._has_own_patience:
            return self
        other = copy.copy(self)
        other._wire = self._wire.with_patience(ROLLOUT_PATIENCE)
        return other

    async def _post(
        self, path: str, body: BaseModel | None = None, *, wait_s: float = 0.0, patience: Patience | None = None
    ) -> bytes:
        content = None if body is None else written(body)
        return await self._wire.request("POST", path, body=content, wait_s=wait_s, patience=patience)


def _given(params: dict[str, Any]) -> dict[str, str | int | float]:
    return {key: value for key, value in params.items() if value not in (None, "")}


def _query(wanted: LedgerFields) -> dict[str, str | int | float]:
    """The filter as query parameters. Raises: InvalidSpec for a field that is misspelt or cannot be searched for."""
    return _given(LedgerFilter(**wanted).model_dump(mode="json"))


def _require_known(options: Iterable[str], known: type[EpisodeOptions]) -> None:
    """Raises: InvalidSpec for a misspelt keyword, with the nearest one."""
    names = known.__annotations__
    faults = [
        FieldError(field=name, problem="unknown keyword", nearest=nearest(name, names))
        for name in options
        if name not in names
    ]
    if faults:
        raise invalid_spec(faults)
