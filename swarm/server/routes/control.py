"""The control surface, `/swarm/v1`: runs, episodes, status, ledger. Decode, call the service, encode; decide nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from foundation.strict import FieldError, StrictModel
from swarm.protocol.episodes import (
    EpisodeAbort,
    EpisodeClaim,
    EpisodeGrant,
    EpisodeReceipt,
    EpisodeRenewal,
    EpisodeResult,
    EpisodeTrace,
    LedgerEntry,
    LedgerPage,
    TaskProgress,
)
from swarm.protocol.errors import ErrorCode
from swarm.protocol.problem import invalid_spec
from swarm.protocol.status import (
    CheckpointRef,
    QuarantineRequest,
    RestoreRequest,
    RunCreated,
    RunReport,
    RunRequest,
    ServerStatus,
)
from swarm.protocol.summary import LedgerFilter, LedgerSummary
from swarm.server.keys import ControlTokens, Keyring, Role
from swarm.server.routes import loss, wire
from swarm.server.routes.wire import Operation
from swarm.server.service import Service

_RUN = "/swarm/v1/runs/{run_id}"
_EPISODE = "/swarm/v1/episodes/{episode_id}"


Step = Annotated[int, Field(ge=0, lt=2**63)]
"""A step that the pool can be asked for."""
_IF_MATCH_CHARS = 20
"""No config_version has more digits."""


class NoQuery(StrictModel):
    """Nothing can be asked for in the query string."""


class StatusQuery(StrictModel):
    since: int | None = None
    wait_s: Annotated[float, Field(ge=0, le=120)] = 30.0


class ReportQuery(StrictModel):
    since_step: Step = 0


class TasksQuery(StrictModel):
    run_id: str | None = None
    client_id: str | None = None
    mix: str | None = None


class TraceQuery(StrictModel):
    text: bool = False
    """Whether the text of each token shall come along."""


class LedgerQuery(LedgerFilter):
    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class LeaseRenewed(BaseModel):
    expires_at: float
    """Unix time at which the idle limit ends now."""


class Health(BaseModel):
    status: str = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRoutes:
    """The endpoints, over one service. public_url: what clients are told instead of the host that they asked for."""

    service: Service
    keys: Keyring
    tokens: ControlTokens
    closing: asyncio.Event
    decode: Callable[[list[int]], str]
    """The engine's words for token ids."""
    public_url: str | None = None
    state_dir: Path | None = None

    def operations(self) -> list[Operation]:
        return [*self._episode_operations(), *self._run_operations(), *self._reading_operations()]

    def _episode_operations(self) -> list[Operation]:
        lost = (ErrorCode.NOT_FOUND, ErrorCode.LEASE_LOST)
        refused = (
            ErrorCode.NOT_FOUND,
            ErrorCode.NOT_ROLLING,
            ErrorCode.DRAINING,
            ErrorCode.MIX_FULL,
            ErrorCode.IDEMPOTENCY_CONFLICT,
            ErrorCode.OVER_LIMIT,
        )
        ended = (*lost, ErrorCode.IDEMPOTENCY_CONFLICT)
        return [
            _post("/swarm/v1/episodes:claim", self.claim, "Claim an episode", EpisodeClaim, EpisodeGrant, refused),
            _post(f"{_EPISODE}:end", self.end, "End it with a reward, durably", EpisodeResult, EpisodeReceipt, ended),
            _post(f"{_EPISODE}:abort", self.abort, "Drop it and offer its slot again", EpisodeAbort, LedgerEntry, lost),
            _post(f"{_EPISODE}:renew", self.renew, "Extend its lease", EpisodeRenewal, LeaseRenewed, lost),
            _get(_EPISODE, self.entry, "Its status and fate", LedgerEntry, NoQuery),
            _get(f"{_EPISODE}/trace", self.trace, "Every call, token by token", EpisodeTrace, TraceQuery),
        ]

    def _run_operations(self) -> list[Operation]:
        busy = (ErrorCode.SERVER_BUSY, ErrorCode.IDEMPOTENCY_CONFLICT)
        return [
            _post("/swarm/v1/runs", self.create_run, "Start a run", RunRequest, RunCreated, busy, status=201),
            _get(_RUN, self.report, "Spec, changes and per-step metrics", RunReport, ReportQuery),
            Operation(
                method="PATCH",
                path=_RUN,
                endpoint=self.patch_run,
                summary="Change tunable fields (merge patch)",
                answer=RunReport,
                free_body=True,
                headers=("If-Match",),
                codes=(ErrorCode.NOT_FOUND, ErrorCode.CONFIG_CONFLICT),
            ),
            _post(f"{_RUN}:stop", self.stop_run, "Drain, checkpoint, go idle", None, RunReport, (ErrorCode.NOT_FOUND,)),
            _post(
                f"{_RUN}:restore",
                self.restore,
                "Go back to a checkpoint, on a new branch",
                RestoreRequest,
                RunReport,
                (ErrorCode.NOT_FOUND, *busy, ErrorCode.NOT_ROLLING),
            ),
            _post(
                f"{_RUN}:quarantine",
                self.quarantine,
                "Keep a client version out of training, or let it in again",
                QuarantineRequest,
                RunReport,
                (ErrorCode.NOT_FOUND,),
            ),
            _post(
                f"{_RUN}:checkpoint",
                self.checkpoint,
                "Write a whole checkpoint now",
                None,
                CheckpointRef,
                (ErrorCode.NOT_FOUND, ErrorCode.OVER_LIMIT, ErrorCode.NOT_ROLLING),
            ),
        ]

    def _reading_operations(self) -> list[Operation]:
        unknown = (ErrorCode.NOT_FOUND,)
        return [
            _get("/health", self.health, "Whether the process serves; no authorisation", Health),
            _get(
                "/swarm/v1/status",
                self.status,
                "How the server is; long-polls with since",
                ServerStatus,
                StatusQuery,
                (ErrorCode.NOT_ROLLING,),
            ),
            Operation(
                method="GET",
                path="/swarm/v1/events",
                endpoint=self.events,
                summary="Statuses and log lines as server-sent events",
                media_type="text/event-stream",
                query=NoQuery,
            ),
            Operation(
                method="GET",
                path="/swarm/v1/tasks",
                endpoint=self.tasks,
                summary="How many episodes of each task are ended",
                answer=TaskProgress,
                answer_list=True,
                query=TasksQuery,
                codes=unknown,
            ),
            _get("/swarm/v1/ledger", self.ledger, "What became of each episode", LedgerPage, LedgerQuery, unknown),
            _get(
                "/swarm/v1/ledger/summary",
                self.summary,
                "The same, added up by reason and cause",
                LedgerSummary,
                LedgerFilter,
                unknown,
            ),
        ]

    # -- episodes -------------------------------------------------------------------------------------------------

    async def claim(self, request: Request) -> Response:
        wire.require(self.tokens, request)
        claim = await wire.decode(request, EpisodeClaim)
        granted = await wire.until_gone(request, self.service.claim(claim), self.closing)
        grant = EpisodeGrant.model_construct(
            episode_id=granted.episode_id,
            lease=granted.lease,
            group_id=granted.group_id,
            slot=granted.slot,
            base_url=f"{self._url(request)}/v1",
            api_key=self.keys.api_key(granted.episode_id, granted.lease),
            weights_version=granted.weights_version,
            expires_at=granted.expires_at,
            team_key=self.keys.team_key(granted.episode_id),
        )
        return wire.answer(grant)

    async def end(self, request: Request) -> Response:
        wire.require(self.tokens, request)
        result = await wire.decode(request, EpisodeResult)
        return wire.answer(await self.service.end(request.path_params["episode_id"], result))

    async def abort(self, request: Request) -> Response:
        wire.require(self.tokens, request)
        abort = await wire.decode(request, EpisodeAbort)
        return wire.answer(await self.service.abort(request.path_params["episode_id"], abort))

    async def renew(self, request: Request) -> Response:
        wire.require(self.tokens, request)
        renewal = await wire.decode(request, EpisodeRenewal)
        expires_at = await self.service.renew(request.path_params["episode_id"], renewal)
        return wire.answer(LeaseRenewed(expires_at=expires_at))

    async def entry(self, request: Request) -> Response:
        wire.require(self.tokens, request)
        wire.decode_query(request, NoQuery)
        return wire.answer(await self.service.entry(request.path_params["episode_id"]))

    async def trace(self, request: Request) -> Response:
        wire.require(self.tokens, request)
        query = wire.decode_query(request, TraceQuery)
        trace = await self.service.trace(request.path_params["episode_id"])
        spec = (await self.service.report(trace.entry.run_id, since_step=2**31)).spec
        shown = trace.model_copy(update={"untrained": loss.untrained(trace, spec.algorithm)})
        if query.text:
            shown.vocabulary = loss.vocabulary(trace, self.decode)
        return wire.answer(shown)

    # -- runs -----------------------------------------------------------------------------------------------------

    async def create_run(self, request: Request) -> Response:
        by = wire.require(self.tokens, request, Role.ADMIN)
        wanted = await wire.decode(request, RunRequest)
        created = await self.service.create_run(wanted, by)
        return wire.answer(created, status=201, headers={"Location": f"/swarm/v1/runs/{created.run_id}"})

    async def report(self, request: Request) -> Response:
        wire.require(self.tokens, request)
        query = wire.decode_query(request, ReportQuery)
        return _versioned(await self.service.report(request.path_params["run_id"], query.since_step))

    async def patch_run(self, request: Request) -> Response:
        by = wire.require(self.tokens, request, Role.ADMIN)
        patch = await wire.decode_object(request, strict=True)
        if_match = _if_match(request.headers.get("if-match"))
        return _versioned(await self.service.patch_run(request.path_params["run_id"], patch, if_match, by))

    async def stop_run(self, request: Request) -> Response:
        wire.require(self.tokens, request, Role.ADMIN)
        return _versioned(await self.service.stop_run(request.path_params["run_id"]))

    async def restore(self, request: Request) -> Response:
        by = wire.require(self.tokens, request, Role.ADMIN)
        wish = await wire.decode(request, RestoreRequest)
        restored = self.service.restore_run(request.path_params["run_id"], wish, by)
        return _versioned(await wire.until_gone(request, restored, self.closing))

    async def quarantine(self, request: Request) -> Response:
        by = wire.require(self.tokens, request, Role.ADMIN)
        wish = await wire.decode(request, QuarantineRequest)
        return _versioned(await self.service.quarantine(request.path_params["run_id"], wish, by))

    async def checkpoint(self, request: Request) -> Response:
        wire.require(self.tokens, request, Role.ADMIN)
        await wire.read_body(request, wire.MAX_CONTROL_BYTES)
        written = self.service.request_checkpoint(request.path_params["run_id"])
        return wire.answer(await wire.until_gone(request, written, self.closing))

    # -- reading --------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        return wire.answer(Health())

    async def status(self, request: Request) -> Response:
        wire.require(self.tokens, request)
        query = wire.decode_query(request, StatusQuery)
        if query.since is None:
            return wire.answer(self._placed(await self.service.status()))
        await wire.read_body(request, wire.MAX_CONTROL_BYTES)
        waiting = self.service.status(query.since, query.wait_s)
        return wire.answer(self._placed(await wire.until_gone(request, waiting, self.closing)))

    def _placed(self, status: ServerStatus) -> ServerStatus:
        place = None if self.state_dir is None else str(self.state_dir)
        return status.model_copy(update={"state_dir": place})

    async def events(self, request: Request) -> Response:
        wire.require(self.tokens, request)
        wire.decode_query(request, NoQuery)
        await wire.read_body(request, wire.MAX_CONTROL_BYTES)
        return wire.EventStream(self._event_frames(), closing=self.closing)

    async def _event_frames(self) -> AsyncIterator[bytes]:
        """The status as it is when the subscription begins, then each event as it comes."""
        events = self.service.events()
        coming = asyncio.ensure_future(anext(events))
        try:
            await asyncio.sleep(0)  # the subscription begins now: nothing falls between it and the first status
            yield _frame("status", (await self.service.status()).model_dump(mode="json"))
            while True:
                event = await coming
                yield _frame(event.kind, event.data)
                coming = asyncio.ensure_future(anext(events))
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

    async def tasks(self, request: Request) -> Response:
        wire.require(self.tokens, request)
        query = wire.decode_query(request, TasksQuery)
        found = await self.service.tasks(run_id=query.run_id, client_id=query.client_id, mix=query.mix)
        return wire.answer_list(found)

    async def ledger(self, request: Request) -> Response:
        wire.require(self.tokens, request)
        query = wire.decode_query(request, LedgerQuery)
        return wire.answer(await self.service.ledger(**dict(query)))

    async def summary(self, request: Request) -> Response:
        wire.require(self.tokens, request)
        query = wire.decode_query(request, LedgerFilter)
        return wire.answer(await self.service.summary(query))

    def _url(self, request: Request) -> str:
        return self.public_url or f"{request.url.scheme}://{request.headers.get('host', request.url.netloc)}"


def _frame(kind: str, data: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


def _versioned(report: RunReport) -> Response:
    return wire.answer(report, headers={"ETag": f'"{report.config_version}"'})


def _if_match(header: str | None) -> int | None:
    if header is None or header.strip() == "*":
        return None
    text = header.strip().removeprefix("W/").strip('"')
    if not text.isdecimal() or len(text) > _IF_MATCH_CHARS:
        problem = f"must be a config_version, got {header[:80]!r}"
        raise invalid_spec([FieldError(field="If-Match", problem=problem)])
    return int(text)


def _get(
    path: str,
    endpoint: wire.Endpoint,
    summary: str,
    answer: type[BaseModel],
    query: type[StrictModel] | None = None,
    codes: tuple[ErrorCode, ...] = (),
) -> Operation:
    codes = (ErrorCode.NOT_FOUND,) if "{" in path else codes
    return Operation(
        method="GET", path=path, endpoint=endpoint, summary=summary, answer=answer, query=query, codes=codes
    )


def _post(
    path: str,
    endpoint: wire.Endpoint,
    summary: str,
    body: type[BaseModel] | None,
    answer: type[BaseModel],
    codes: tuple[ErrorCode, ...],
    *,
    status: int = 200,
) -> Operation:
    return Operation(
        method="POST",
        path=path,
        endpoint=endpoint,
        summary=summary,
        body=body,
        answer=answer,
        codes=codes,
        status=status,
    )
