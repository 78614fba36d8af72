"""The control API, `/swarm/v1`: runs, episodes, teams, status, ledger. Endpoints call the service and decide nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
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
    SessionBegun,
    SessionRequest,
    TaskProgress,
)
from swarm.protocol.errors import ErrorCode, Refusal
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
from swarm.protocol.teams import EpisodeCommit, EpisodePreparation, EpisodeResolution, TeamDecision, TeamReceipt
from swarm.server.keys import Keyring, Role, bearer
from swarm.server.routes import loss, wire
from swarm.server.routes.operations import NoQuery, Operation
from swarm.server.service import Service
from swarm.server.team_resolver import Peers

_RUN = "/swarm/v1/runs/{run_id}"
_EPISODE = "/swarm/v1/episodes/{episode_id}"
_UNKNOWN = (ErrorCode.NOT_FOUND,)
_BUSY = (ErrorCode.SERVER_BUSY, ErrorCode.IDEMPOTENCY_CONFLICT)
_LOST = (ErrorCode.NOT_FOUND, ErrorCode.LEASE_LOST)
_TWICE = (*_LOST, ErrorCode.IDEMPOTENCY_CONFLICT)
_NO_SLOT = (ErrorCode.NOT_ROLLING, ErrorCode.DRAINING, ErrorCode.MIX_FULL)
_IF_MATCH_CHARS = 20
"""Maximum number of digits in a config_version."""

Step = Annotated[int, Field(ge=0, lt=2**63)]


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
    """Whether to add the text of each token."""


class LedgerQuery(LedgerFilter):
    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class LeaseRenewed(BaseModel):
    expires_at: float
    """Unix time at which the idle limit now ends."""


class Health(BaseModel):
    status: str = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRoutes:
    """Routes to claim, end and trace episodes. `public_url` replaces the request's host in the base_url of a grant."""

    service: Service
    keys: Keyring
    closing: asyncio.Event
    decode: Callable[[list[int]], str]
    """Decodes token ids with the engine's tokenizer."""
    public_url: str | None = None

    @Operation(
        "POST", "/swarm/v1/sessions", "Make one process the only one that acts as its client", SessionBegun,
        body=SessionRequest, codes=_UNKNOWN,
    )  # fmt: skip
    async def begin_session(self, request: Request, wanted: SessionRequest) -> SessionBegun:
        return await self.service.begin_session(wanted)

    @Operation(
        "POST", "/swarm/v1/episodes:claim", "Claim an episode", EpisodeGrant,
        body=EpisodeClaim, codes=(*_TWICE, *_NO_SLOT, ErrorCode.OVER_LIMIT),
    )  # fmt: skip
    async def claim(self, request: Request, claim: EpisodeClaim) -> EpisodeGrant:
        granted = await wire.until_gone(request, self.service.claim(claim), self.closing)
        own_url = f"{request.url.scheme}://{request.headers.get('host', request.url.netloc)}"
        team_key = self.keys.team_key(granted.episode_id)
        return granted.model_copy(update={"base_url": f"{self.public_url or own_url}/v1", "team_key": team_key})

    @Operation(
        "POST",
        f"{_EPISODE}:end",
        "End it with a reward, and store that durably",
        EpisodeReceipt,
        body=EpisodeResult,
        codes=_TWICE,
    )
    async def end(self, request: Request, result: EpisodeResult) -> EpisodeReceipt:
        return await self.service.end(_episode(request), result)

    @Operation(
        "POST", f"{_EPISODE}:abort", "Drop it and offer its slot again", LedgerEntry, body=EpisodeAbort, codes=_LOST
    )
    async def abort(self, request: Request, abort: EpisodeAbort) -> LedgerEntry:
        return await self.service.abort(_episode(request), abort)

    @Operation("POST", f"{_EPISODE}:renew", "Extend its lease", LeaseRenewed, body=EpisodeRenewal, codes=_LOST)
    async def renew(self, request: Request, renewal: EpisodeRenewal) -> LeaseRenewed:
        return LeaseRenewed(expires_at=await self.service.renew(_episode(request), renewal))

    @Operation("GET", _EPISODE, "Its state, and how it ended", LedgerEntry, query=NoQuery, codes=_UNKNOWN)
    async def entry(self, request: Request) -> LedgerEntry:
        return await self.service.entry(_episode(request))

    @Operation("GET", f"{_EPISODE}/trace", "Every call, token by token", EpisodeTrace, query=TraceQuery, codes=_UNKNOWN)
    async def trace(self, request: Request, query: TraceQuery) -> EpisodeTrace:
        trace = await self.service.trace(_episode(request))
        spec = (await self.service.report(trace.entry.run_id, since_step=2**31)).spec
        shown = trace.model_copy(update={"untrained": loss.untrained(trace, spec)})
        shown.restricted = loss.restricted(shown, spec)
        if query.text:
            shown.vocabulary = loss.vocabulary(trace, self.decode)
        return shown


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRoutes:
    """Routes to start, change and stop runs."""

    service: Service
    closing: asyncio.Event

    @Operation(
        "POST", "/swarm/v1/runs", "Start a run", RunCreated,
        body=RunRequest, codes=_BUSY, status=201, role=Role.ADMIN,
    )  # fmt: skip
    async def create_run(self, request: Request, wanted: RunRequest) -> Response:
        created = await self.service.create_run(wanted, request.state.by)
        return wire.answer(created, status=201, headers={"Location": f"/swarm/v1/runs/{created.run_id}"})

    @Operation("GET", _RUN, "Spec, changes and per-step metrics", RunReport, query=ReportQuery, codes=_UNKNOWN)
    async def report(self, request: Request, query: ReportQuery) -> Response:
        return _versioned(await self.service.report(_run(request), query.since_step))

    @Operation(
        "PATCH", _RUN, "Change tunable fields (merge patch)", RunReport,
        body="object", headers=("If-Match",), codes=(*_UNKNOWN, ErrorCode.CONFIG_CONFLICT), role=Role.ADMIN,
    )  # fmt: skip
    async def patch_run(self, request: Request, patch: dict[str, Any]) -> Response:
        if_match = _if_match(request.headers.get("if-match"))
        return _versioned(await self.service.patch_run(_run(request), patch, if_match, request.state.by))

    @Operation("POST", f"{_RUN}:stop", "Drain, checkpoint, go idle", RunReport, codes=_UNKNOWN, role=Role.ADMIN)
    async def stop_run(self, request: Request) -> Response:
        return _versioned(await self.service.stop_run(_run(request)))

    @Operation(
        "POST", f"{_RUN}:restore", "Go back to a checkpoint, on a new branch", RunReport,
        body=RestoreRequest, codes=(*_UNKNOWN, *_BUSY, ErrorCode.NOT_ROLLING), role=Role.ADMIN,
    )  # fmt: skip
    async def restore(self, request: Request, wish: RestoreRequest) -> Response:
        restored = self.service.restore_run(_run(request), wish, request.state.by)
        return _versioned(await wire.until_gone(request, restored, self.closing))

    @Operation(
        "POST", f"{_RUN}:quarantine", "Exclude a client version from training, or allow it again", RunReport,
        body=QuarantineRequest, codes=_UNKNOWN, role=Role.ADMIN,
    )  # fmt: skip
    async def quarantine(self, request: Request, wish: QuarantineRequest) -> Response:
        return _versioned(await self.service.quarantine(_run(request), wish, request.state.by))

    @Operation(
        "POST", f"{_RUN}:checkpoint", "Write a full checkpoint now", CheckpointRef,
        codes=(*_UNKNOWN, ErrorCode.OVER_LIMIT, ErrorCode.NOT_ROLLING), role=Role.ADMIN,
    )  # fmt: skip
    async def checkpoint(self, request: Request) -> CheckpointRef:
        await wire.read_body(request, wire.MAX_CONTROL_BYTES)
        return await wire.until_gone(request, self.service.request_checkpoint(_run(request)), self.closing)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRoutes:
    """Routes for the server's status and the ledger of its episodes."""

    service: Service
    closing: asyncio.Event
    state_dir: Path | None = None

    @Operation("GET", "/health", "Whether the process serves; no authorisation", Health, role=None)
    async def health(self, request: Request) -> Health:
        return Health()

    @Operation(
        "GET", "/swarm/v1/status", "The server's status; long-polls with `since`", ServerStatus,
        query=StatusQuery, codes=(ErrorCode.NOT_ROLLING,),
    )  # fmt: skip
    async def status(self, request: Request, query: StatusQuery) -> ServerStatus:
        if query.since is None:
            status = await self.service.status()
        else:
            await wire.read_body(request, wire.MAX_CONTROL_BYTES)
            changed = self.service.status(query.since, query.wait_s)
            status = await wire.until_gone(request, changed, self.closing)
        return status.model_copy(update={"state_dir": None if self.state_dir is None else str(self.state_dir)})

    @Operation(
        "GET", "/swarm/v1/events", "Statuses and log lines as server-sent events",
        query=NoQuery, media_type="text/event-stream",
    )  # fmt: skip
    async def events(self, request: Request) -> Response:
        await wire.read_body(request, wire.MAX_CONTROL_BYTES)
        return wire.EventStream(self._event_frames(), closing=self.closing)

    async def _event_frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the status at the time of subscription, then each event as it arrives."""
        events = self.service.events()
        coming = asyncio.ensure_future(anext(events))
        try:
            await asyncio.sleep(0)  # subscribe before reading the status, so that no event is lost in between
            yield _frame("status", (await self.service.status()).model_dump(mode="json"))
            while True:
                event = await coming
                yield _frame(event.kind, event.data)
                coming = asyncio.ensure_future(anext(events))
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

    @Operation(
        "GET", "/swarm/v1/tasks", "How many episodes of each task have ended", TaskProgress,
        answer_list=True, query=TasksQuery, codes=_UNKNOWN,
    )  # fmt: skip
    async def tasks(self, request: Request, query: TasksQuery) -> list[TaskProgress]:
        return await self.service.tasks(run_id=query.run_id, client_id=query.client_id, mix=query.mix)

    @Operation(
        "GET", "/swarm/v1/ledger", "What happened to each episode", LedgerPage, query=LedgerQuery, codes=_UNKNOWN
    )
    async def ledger(self, request: Request, query: LedgerQuery) -> LedgerPage:
        return await self.service.ledger(**dict(query))

    @Operation(
        "GET", "/swarm/v1/ledger/summary", "Totals of the ledger, by reason and cause", LedgerSummary,
        query=LedgerFilter, codes=_UNKNOWN,
    )  # fmt: skip
    async def summary(self, request: Request, query: LedgerFilter) -> LedgerSummary:
        return await self.service.summary(query)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamRoutes:
    """Routes for the two-phase commit of a team's episodes on several servers."""

    service: Service
    keys: Keyring
    peers: Peers

    @Operation(
        "POST", f"{_EPISODE}:prepare", "Bind it durably to its team's decision", TeamReceipt,
        body=EpisodePreparation, codes=_TWICE,
    )  # fmt: skip
    async def prepare(self, request: Request, wish: EpisodePreparation) -> TeamReceipt:
        episode_id = _episode(request)
        if wish.decider.episode_id != episode_id:
            self.peers.vouch(wish.decider)
        return await self.service.prepare(episode_id, wish, self.keys.seal(wish.decider.key))

    @Operation(
        "POST", f"{_EPISODE}:commit", "On the decider: decide for the team; elsewhere: learn the decision",
        TeamReceipt, body=EpisodeCommit, codes=_LOST,
    )  # fmt: skip
    async def commit(self, request: Request, commit: EpisodeCommit) -> TeamReceipt:
        return await self.service.commit(_episode(request), commit)

    @Operation(
        "GET", f"{_EPISODE}/decision", "The team's decision, for servers that hold the episode's team key", TeamDecision,
        codes=_UNKNOWN, role=None,
    )  # fmt: skip
    async def decision(self, request: Request) -> TeamDecision:
        # Checked even on a server without tokens: the key proves that the team chose this server as its decider.
        if not self.keys.is_team_key(bearer(request.headers.get("authorization")), _episode(request)):
            detail = "this server did not issue this key: send the team_key from the decider's grant"
            raise Refusal(ErrorCode.UNAUTHORIZED, detail)
        return await self.service.decision(_episode(request))

    @Operation(
        "POST", f"{_EPISODE}:resolve", "Decide in place of a decider that is permanently gone", TeamReceipt,
        body=EpisodeResolution, codes=_LOST, role=Role.ADMIN,
    )  # fmt: skip
    async def resolve(self, request: Request, resolution: EpisodeResolution) -> TeamReceipt:
        return await self.service.resolve(_episode(request), resolution)


def _episode(request: Request) -> str:
    return str(request.path_params["episode_id"])


def _run(request: Request) -> str:
    return str(request.path_params["run_id"])


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
