"""The typed client of one swarm server. It covers the whole protocol, with retries and idempotency keys."""

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
"""For unattended work: retry for as long as the server says to try later, and give people time to free space on a full disk."""
ABORT_PATIENCE = Patience(connect_s=5.0, later_s=5.0)
"""Patience for aborts. Short, because a client that is leaving should not wait; without the abort, the lease runs out."""


class _Tasks(RootModel[list[TaskProgress]]):
    """The server's response to `tasks`."""


class _Renewed(BaseModel):
    """The server's response to `renew`."""

    expires_at: float


class SwarmClient:
    """One client's connection to one server. Use as an async context manager.

    Args:
        url: the server's address, such as http://127.0.0.1:8642.
        token: the server's token, if it requires one.
        client_id: the name under which the server counts this client's episodes. Reuse it to continue where an earlier process
            stopped. Random by default.
        client_version: version of the agent's code. Episodes of different versions are never compared.
        patience: how long to retry requests.
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
        """Distinguishes this process from other processes with the same client_id; see `fence`."""
        self._begun: set[str] = set()
        """Ids of the runs in which this session has been registered."""
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
        """Wait until the server has answered this client at least once.

        Waits at most `connect_s` seconds, and never longer than this client's own patience. Raises: ServerUnreachable.
        """
        if not self._wire.heard:
            patience = replace(self._wire.patience, connect_s=min(connect_s, self._wire.patience.connect_s))
            await self._wire.request("GET", "/health", patience=patience)

    # -- status -------------------------------------------------------------------------------------------------------

    async def status(self, since: int | None = None, wait_s: float = 30.0) -> ServerStatus:
        """Return the server's status. If `since` is given, wait up to `wait_s` seconds for a revision other than `since`."""
        params = {} if since is None else _given({"since": since, "wait_s": wait_s})
        raw = await self._wire.request("GET", f"{API}/status", params=params, wait_s=wait_s)
        return read(ServerStatus, raw)

    async def statuses(self, wait_s: float = 30.0) -> AsyncIterator[ServerStatus]:
        """Yield the current status, then a new one after each change or every `wait_s` seconds without a change."""
        status = await self.status()
        while True:
            yield status
            status = await self.status(since=status.revision, wait_s=wait_s)

    # -- runs ---------------------------------------------------------------------------------------------------------

    async def start_run(self, spec: RunSpec, idempotency_key: str | None = None) -> RunReport:
        """Start a run, or return the existing run with this `idempotency_key`.

        Raises: ServerBusy, InvalidSpec, IdempotencyConflict.
        """
        request = RunRequest(spec=spec, idempotency_key=idempotency_key or self.ids.new("run-key"))
        raw = await self._post(f"{API}/runs", request)
        return await self.run(read(RunCreated, raw).run_id)

    async def run(self, run_id: str, since_step: int = 0) -> RunReport:
        """Return a report on the run, with the metrics of all steps after `since_step`."""
        raw = await self._wire.request("GET", f"{API}/runs/{run_id}", params={"since_step": since_step})
        return read(RunReport, raw)

    async def patch_run(self, run_id: str, patch: dict[str, Any], config_version: int | None = None) -> RunReport:
        """Merge `patch` into the spec's tunable fields.

        `config_version` is the version that the patch was written for; None means the newest.
        Raises: ConfigConflict if someone else has changed the config since that version.
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
        """Ask the server to stop the run: it drains, writes a checkpoint and goes idle.

        Returns before the run has stopped; watch `statuses` to see when it has.
        """
        return read(RunReport, await self._post(f"{API}/runs/{run_id}:stop"))

    async def checkpoint(self, run_id: str) -> CheckpointRef:
        """Write a full checkpoint now. Returns when it has been written."""
        raw = await self._wire.request("POST", f"{API}/runs/{run_id}:checkpoint", wait_s=600.0)
        return read(CheckpointRef, raw)

    async def restore(self, run_id: str, step: int, idempotency_key: str | None = None) -> RunReport:
        """Restore the checkpoint of `step` on a new branch of the run, and wait until that is done. Step 0 is the original model.

        Raises: NotFound if that checkpoint no longer exists, OverLimit if the run was replaced or is being stopped.
        """
        wish = RestoreRequest(step=step, idempotency_key=idempotency_key or self.ids.new("restore"))
        return read(RunReport, await self._post(f"{API}/runs/{run_id}:restore", wish, wait_s=600.0))

    async def quarantine(
        self, run_id: str, client_version: str, *, reason: str = "", quarantined: bool = True
    ) -> RunReport:
        """Exclude episodes of a client version from training from now on, or admit them again with `quarantined=False`."""
        wish = QuarantineRequest(client_version=client_version, quarantined=quarantined, reason=reason)
        return read(RunReport, await self._post(f"{API}/runs/{run_id}:quarantine", wish))

    # -- what happened ------------------------------------------------------------------------------------------------

    async def ledger(self, *, after: str | None = None, **wanted: Unpack[LedgerFields]) -> AsyncIterator[LedgerEntry]:
        """Yield the ledger entry of each episode in claim order, fetching pages as needed.

        `after` is the `next` of an earlier page; None starts at the beginning. `wanted` filters the entries.
        """
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
        """Return one page of the ledger, with at most 1000 episodes. Pass its `next` as `after` to get the following page."""
        params = {**_query(wanted), **_given({"after": after, "limit": limit})}
        return read(LedgerPage, await self._wire.request("GET", f"{API}/ledger", params=params))

    async def entry(self, episode_id: str, patience: Patience | None = None) -> LedgerEntry:
        """Return the ledger entry of one episode. If the episode was lost, the entry includes the cause."""
        raw = await self._wire.request("GET", f"{API}/episodes/{episode_id}", patience=patience)
        return read(LedgerEntry, raw)

    async def summary(self, **wanted: Unpack[LedgerFields]) -> LedgerSummary:
        """Return totals over the episodes that match `wanted`, by reason, cause, client and version."""
        raw = await self._wire.request("GET", f"{API}/ledger/summary", params=_query(wanted))
        return read(LedgerSummary, raw)

    async def trace(self, episode_id: str, *, text: bool = False) -> EpisodeTrace:
        """Return every recorded call of an episode, token by token. If `text` is true, include the text of each token."""
        params: dict[str, str | int | float] = {"text": "true"} if text else {}
        raw = await self._wire.request("GET", f"{API}/episodes/{episode_id}/trace", params=params)
        return read(EpisodeTrace, raw)

    async def tasks(
        self, *, run_id: str | None = None, client_id: str | None = None, mix: str | None = None
    ) -> list[TaskProgress]:
        """Return the number of ended episodes of each task. If `run_id` is None, use the current run."""
        params = _given({"run_id": run_id, "client_id": client_id, "mix": mix})
        raw = await self._wire.request("GET", f"{API}/tasks", params=params)
        return read(_Tasks, raw).root

    # -- episodes, call by call -----------------------------------------------------------------------------------------

    async def claim(self, claim: EpisodeClaim, patience: Patience | None = None) -> EpisodeGrant:
        """Claim an episode for an attempt at a task, and wait until the server grants it.

        Raises: OverLimit if the run is over, NotFound if the server has another run, EngineFailed, TryLater if patience ran out.
        """
        if claim.idempotency_key is None:
            claim = claim.model_copy(update={"idempotency_key": self.ids.new("claim")})
        raw = await self._post(f"{API}/episodes:claim", claim, wait_s=claim.wait_s, patience=patience)
        return read(EpisodeGrant, raw)

    async def fence(self, run_id: str, client_id: str, reason: str, *, session: str | None = None) -> list[str]:
        """Shut out every `run_tasks` of a client, in any process, except the one with this `session` (None: all of them).

        Aborts their open episodes with `reason`, blames the client for the loss, and returns the episode ids. If those processes
        send results or claims afterwards, they get LeaseLost.
        """
        session = session or self.ids.new("session")
        request = SessionRequest(run_id=run_id, client_id=client_id, session=session, reason=sendable(reason))
        return read(SessionBegun, await self._post(f"{API}/sessions", request)).closed

    async def end(self, episode_id: str, result: EpisodeResult) -> EpisodeReceipt:
        """End an episode with a result. When this returns, the result is stored durably. Raises: LeaseLost."""
        require_finite_metadata(result.metadata)
        if result.idempotency_key is None:
            result = result.model_copy(update={"idempotency_key": f"end-{episode_id}"})
        return read(EpisodeReceipt, await self._post(f"{API}/episodes/{episode_id}:end", result))

    async def abort(self, episode_id: str, lease: str, reason: str, cause: Cause | None = None) -> LedgerEntry:
        """Drop an episode and offer its slot again. `cause` says who is to blame; None means the rollout.

        The returned entry has the server's view of the cause, which may differ, because the server also knows about its own failures.
        Raises: LeaseLost.
        """
        abort = EpisodeAbort(lease=lease, reason=sendable(reason), cause=cause)
        raw = await self._post(f"{API}/episodes/{episode_id}:abort", abort, patience=ABORT_PATIENCE)
        return read(LedgerEntry, raw)

    async def prepare(self, episode_id: str, preparation: EpisodePreparation) -> TeamReceipt:
        """Bind an episode durably to the decision of its team.

        Raises: LeaseLost, Forbidden if the server does not accept the decider's address.
        """
        return read(TeamReceipt, await self._post(f"{API}/episodes/{episode_id}:prepare", preparation))

    async def commit(self, episode_id: str, lease: str, patience: Patience | None = None) -> TeamReceipt:
        """Commit the team on the decider, or tell another member's server that the team is committed.

        Raises: LeaseLost if the team was aborted.
        """
        path = f"{API}/episodes/{episode_id}:commit"
        return read(TeamReceipt, await self._post(path, EpisodeCommit(lease=lease), patience=patience))

    async def resolve(self, episode_id: str, resolution: EpisodeResolution) -> TeamReceipt:
        """Settle a prepared episode whose decider is gone for good. Needs the admin token."""
        return read(TeamReceipt, await self._post(f"{API}/episodes/{episode_id}:resolve", resolution))

    async def renew(self, episode_id: str, lease: str) -> float:
        """Extend a lease by its idle limit. Returns the Unix time at which it now expires. Raises: LeaseLost."""
        raw = await self._post(f"{API}/episodes/{episode_id}:renew", EpisodeRenewal(lease=lease))
        return read(_Renewed, raw).expires_at

    # -- episodes, whole ----------------------------------------------------------------------------------------------

    async def current_run_id(self) -> str:
        """Return the id of the newest run on this server, which may be over. Raises: NotFound if no run was ever started."""
        status = await self.status()
        if status.latest_run_id is None:
            raise NotFound(ErrorCode.NOT_FOUND, f"{self.url} has had no run yet; start one with `swarm run start`")
        return status.latest_run_id

    def episode(
        self, *, task_id: str, idempotency_key: str | None = None, **options: Unpack[EpisodeOptions]
    ) -> Episode:
        """Return an episode, which is an async context manager. If `run_id` is None, it looks up the current run on entry.

        Inside the block, use `base_url`, `api_key` and `end(reward=...)`. An exception aborts the episode with its message.
        Raises: InvalidSpec for a misspelt keyword or an invalid value.
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
        """Run `rollout` on every task, many concurrently, until the task stream or the run ends.

        Continues where this client_id stopped, and shuts out its earlier processes (see `fence`). If an attempt fails because of the
        rollout, the grader or a limit, it is retried `retries` times, counted across restarts of the client; then the task is skipped.
        A task is also skipped after this client died three times while playing it. If the server, the network or a person is to blame,
        attempts are retried without limit. Unless the client has its own `patience`, it retries for as long as the server says to try
        later, and waits two minutes for space on the server's disk.
        Raises: RolloutsFailing if many tasks in a row fail; Refusal, ServerUnreachable.
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
        """Return a copy of this client, over the same connections, with the patience of `run_tasks`.

        If the client has its own patience, return the client itself.
        """
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
    """Return a ledger filter as query parameters. Raises: InvalidSpec for a misspelt field or one that cannot be filtered on."""
    return _given(LedgerFilter(**wanted).model_dump(mode="json"))


def _require_known(options: Iterable[str], known: type[EpisodeOptions]) -> None:
    """Raise InvalidSpec for a misspelt keyword, and suggest the nearest known one."""
    names = known.__annotations__
    faults = [
        FieldError(field=name, problem="unknown keyword", nearest=nearest(name, names))
        for name in options
        if name not in names
    ]
    if faults:
        raise invalid_spec(faults)
