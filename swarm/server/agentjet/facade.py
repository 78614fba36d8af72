"""AgentJet's routes, built on the service's commands. Errors have the form that AgentJet's clients read: `{"detail": text}`.

A client names the task when it ends an episode or, if it throttles itself, when it claims one. Each claim gets its own id and key,
which expire with the episode; a repeated end counts once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from statistics import fmean
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from foundation.clock import Clock
from foundation.strict import explain
from swarm.engine.seam import EngineInfo
from swarm.protocol.episodes import EpisodeAbort, EpisodeResult, LedgerEntry, Name
from swarm.protocol.errors import ErrorCode, InvalidSpec, Refusal
from swarm.protocol.runspec import RunSpec
from swarm.protocol.status import RunRequest
from swarm.server.agentjet import pool
from swarm.server.agentjet.agreed import AgreedBatches
from swarm.server.agentjet.config import run_spec
from swarm.server.agentjet.prefix import ROLE, Front, Prefixes
from swarm.server.keys import ControlTokens, Role
from swarm.server.routes import wire
from swarm.server.service import Service
from swarm.server.state.leases import LiveEpisode
from swarm.server.state.server_state import Moment
from swarm.server.state.ungrouped import GuestClaim

_log = logging.getLogger(__name__)

CLIENT_VERSION = "ajet"
LONGEST_IDLE_S = 86_400.0
CLAIM_WAIT_S = 20.0
"""Seconds that a claim may wait. AgentJet's clients give up after 30 s."""
THROTTLED_WAIT_S = 1.5
"""Seconds that a throttled claim may wait: short, because such a claim locks its whole client."""
START_TAKES_S = 0.7
"""Seconds before we answer a start: older clients check the status right after it, through a cache that says OFFLINE for 0.5 s."""
MOST_WAITING = 32
"""Maximum number of waiting claims per client: all its requests share 100 connections, and its status requests need one."""
NO_EPISODE = "No available episodes to claim."
SYNCING = "Engine is syncing weights"
POST_ROLLING = "Engine is in post-rolling phase"
# These three texts, and WEIGHT_SYNCING in an error, are part of AgentJet's protocol: clients look for them.
_STATUS = {ErrorCode.STORAGE_FULL: 507, ErrorCode.FORBIDDEN: 403, ErrorCode.UNAUTHORIZED: 403, ErrorCode.NOT_FOUND: 404}

Json = dict[str, Any]
Body = TypeVar("Body", bound=BaseModel)


class SyncTrainConfig(BaseModel):
    yaml_as_string: str


class ThrottlePolicy(BaseModel):
    current_task_id: Name = ""


class ClaimEpisode(BaseModel):
    client_uuid: Name
    episode_type: Literal["train", "eval"] = "train"
    discard_episode_timeout: float = 240.0
    throttle_policy: ThrottlePolicy | None = None


class EpisodeOfClient(BaseModel):
    client_uuid: Name = ""
    episode_uuid: Name = ""


class WorkflowOutput(BaseModel):
    reward: Any = None
    is_success: bool | None = None
    metadata: Json = {}
    log_metrics: Json = {}


class EndEpisode(EpisodeOfClient):
    task_id: Name = ""
    workflow_output: WorkflowOutput = WorkflowOutput()
    declare_client_active: bool = True


class Wrong(Exception):
    """A refused request. The message says what to do."""

    def __init__(self, detail: str, status: int = 400) -> None:
        super().__init__(detail)
        self.detail, self.status = detail, status


class AgentJet:
    """The AgentJet facade of one server."""

    def __init__(
        self,
        *,
        service: Service,
        info: EngineInfo,
        tokens: ControlTokens,
        clock: Clock,
        closing: asyncio.Event,
        public_url: str | None = None,
    ) -> None:
        self._service = service
        self._info = info
        self._tokens = tokens
        self._clock = clock
        self._closing = closing
        self._public_url = public_url
        self._spec: RunSpec | None = None
        """Spec of the newest configuration that a client sent; None before the first."""
        self._agreed = AgreedBatches(service, clock)
        self._waiting: Counter[str] = Counter()
        """Number of waiting claims per client."""

    def before(self, server: ASGIApp, prefixes: Prefixes) -> ASGIApp:
        """Return the server with this facade in front of it."""
        app = self._app()
        paths = {route.path for route in app.routes if isinstance(route, Route)}
        # The server has its own /health, which needs no authorisation.
        return Front(server, app, prefixes, paths - {"/health"})

    def _app(self) -> Starlette:
        """Build the application for the routes under a prefix, except `/v1`."""
        endpoints: list[tuple[str, str, Callable[[Request], Awaitable[Json]]]] = [
            ("GET", "/health", self.health),
            ("GET", "/get_engine_status", self.status),
            ("GET", "/get_current_batch_rollout_pool_information", self.pool_information),
            ("POST", "/get_episode_buffer", self.buffer),
            ("POST", "/sync_train_config", self.sync_config),
            ("POST", "/sync_train_code", self.sync_code),
            ("POST", "/start_engine", self.start),
            ("POST", "/stop_engine", self.stop),
            ("POST", "/claim_episode", self.claim),
            ("POST", "/end_episode", self.end),
            ("POST", "/abort_episode", self.abort),
            ("POST", "/can_continue_episode", self.can_continue),
            ("POST", "/agree_sync_weight", self.agree),
        ]
        app = Starlette(
            routes=[Route(path, self._guarded(endpoint), methods=[method]) for method, path, endpoint in endpoints],
            exception_handlers={
                Wrong: _wrong,
                Refusal: _refused,
                wire.ClientGone: _gone,
                HTTPException: _unroutable,
                Exception: _failed,
            },
        )
        app.router.redirect_slashes = False
        app.state.public_url = self._public_url
        return app

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Json]]) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            if request.scope[ROLE] is None:  # at the root of a server without tokens
                request.state.by = wire.require(self._tokens, request)
            else:
                request.state.by = f"agentjet@{request.client.host}" if request.client else "agentjet"
            await self._agreed.look()
            return wire.answer_json(await endpoint(request))

        return serve

    # -- the server -----------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Json:
        return {"status": "ok"}

    async def status(self, request: Request) -> Json:
        return pool.status_report(self._service.state, self._status())

    async def pool_information(self, request: Request) -> Json:
        state = self._service.state
        active = {"swarm_client_instruction": {"active_clients": self._agreed.active_clients()}}
        return pool.pool_information(state, self._now()) | pool.status_report(state, self._status()) | active

    async def buffer(self, request: Request) -> Json:
        return {"buffer": pool.episode_buffer(self._service.state, self._now())}

    async def sync_config(self, request: Request) -> Json:
        """Check a job's configuration and keep it for the next start."""
        _require_admin(request)
        wanted = await _decoded(request, SyncTrainConfig)
        self._require_offline("a configuration is accepted")
        self._spec = await asyncio.to_thread(run_spec, wanted.yaml_as_string, self._info)
        return {"success": True}

    async def sync_code(self, request: Request) -> Json:
        raise Wrong("this server does not run its clients' code: put what the job may choose into its configuration")

    async def start(self, request: Request) -> Json:
        _require_admin(request)
        self._require_offline("a run is started")
        if self._spec is None:
            raise Wrong("no configuration has been sent: call sync_train_config first")
        created = await self._service.create_run(RunRequest(spec=self._spec), request.state.by)
        self._agreed.began(created.run_id)
        await self._clock.sleep(START_TAKES_S)
        return {"success": True, "pid": os.getpid()}

    async def stop(self, request: Request) -> Json:
        """Stop the run: it drains and writes a checkpoint, and then the status becomes OFFLINE."""
        _require_admin(request)
        run = pool.current_run(self._service.state)
        if run is not None:
            await self._service.stop_run(run.run_id)
        return {"success": True, "failure_reason": ""}

    def _require_offline(self, what: str) -> None:
        status = self._status()
        if status != pool.OFFLINE:
            raise Wrong(f"the engine is {status}; {what} only while it is {pool.OFFLINE}: stop the run first")

    def _status(self) -> str:
        status = pool.engine_status(self._service.state)
        return pool.WEIGHT_SYNCING if status == pool.ROLLING and self._agreed.shows_sync else status

    def _now(self) -> Moment:
        return Moment(self._clock.now(), self._clock.monotonic())

    # -- episodes -------------------------------------------------------------------------------------------------------

    async def claim(self, request: Request) -> Json:
        """Claim an episode. The status is always 200; the body says whether the claim was granted."""
        wanted = await _decoded(request, ClaimEpisode)
        try:
            granted = await self._claimed(request, wanted)
        except Refusal as refusal:
            why, where, key, episode_id = self._fail_cause(refusal), "", "", ""
        else:
            own_url = f"{request.url.scheme}://{request.headers.get('host', request.url.netloc)}"
            why, where = "", f"{self._public_url or own_url}/v1"
            episode_id, key = granted
        return {
            "success": not why,
            "client_uuid": wanted.client_uuid,
            "episode_uuid": episode_id,
            "openai_base_url": where,
            "openai_api_key": key,
            "fail_cause": why,
        }

    async def _claimed(self, request: Request, wanted: ClaimEpisode) -> tuple[str, str]:
        """Claim an episode; return its id and API key."""
        run = pool.current_run(self._service.state)
        if run is None:
            raise Refusal(ErrorCode.OVER_LIMIT, "no run is active: sync a configuration and start the engine")
        client, policy = wanted.client_uuid, wanted.throttle_policy
        self._agreed.played(client)
        wait_s = CLAIM_WAIT_S if policy is None else THROTTLED_WAIT_S
        claim = GuestClaim(
            run_id=run.run_id,
            client_id=client,
            client_version=CLIENT_VERSION,
            kind=wanted.episode_type,
            task_id="" if policy is None else policy.current_task_id,
            idle_limit_s=min(max(1.0, wanted.discard_episode_timeout), LONGEST_IDLE_S),
            wait_s=wait_s if self._waiting[client] < MOST_WAITING else 0.0,
        )
        self._waiting[client] += 1
        try:
            granted = await wire.until_gone(request, self._service.claim(claim), self._closing)
        finally:
            self._waiting -= Counter([client])
        return granted.episode_id, granted.api_key

    def _fail_cause(self, refusal: Refusal) -> str:
        """Return the reason for a refused claim. If a retry may succeed, use a text on which AgentJet's client waits."""
        if refusal.code not in (ErrorCode.DRAINING, ErrorCode.NOT_ROLLING, ErrorCode.MIX_FULL):
            return refusal.detail
        status = self._status()
        if status == pool.ROLLING_POST:
            return POST_ROLLING
        return NO_EPISODE if status == pool.ROLLING and refusal.code != ErrorCode.NOT_ROLLING else SYNCING

    async def end(self, request: Request) -> Json:
        wanted = await _decoded(request, EndEpisode)
        episode_id, output = wanted.episode_uuid, wanted.workflow_output
        if not wanted.task_id:
            raise Wrong("task_id is empty: name the task, because episodes are grouped by it")
        if output.metadata.get("task_id", wanted.task_id) != wanted.task_id:
            raise Wrong("task_id in metadata differs from the request's task_id: send the same one in both")
        live = self._open(wanted)
        if live is None:
            return await self._late_end(wanted)
        if live.row.task_id not in ("", wanted.task_id):
            raise Wrong(f"the episode was claimed for task {live.row.task_id!r}: end it for that task, or abort it")
        try:
            await self._service.end(episode_id, _result(output, live.lease), task_id=wanted.task_id)
        except Refusal as refusal:
            if refusal.code is not ErrorCode.LEASE_LOST:
                raise
            return await self._late_end(wanted)
        self._agreed.played(wanted.client_uuid, declares=wanted.declare_client_active and live.row.kind == "train")
        return {"success": True}

    async def _late_end(self, wanted: EndEpisode) -> Json:
        """Answer an end for an episode that is not open. If its end was stored earlier, answer with success, so that
        AgentJet's executor does not rerun the episode."""
        entry = await self._entry(wanted)
        if entry.reward is None:
            why = entry.reason or entry.state
            raise Wrong(
                f"the episode is closed: {why}{f' ({entry.detail})' if entry.detail else ''}; nothing of it was kept"
            )
        return {"success": True}

    async def abort(self, request: Request) -> Json:
        """Abort an episode. Always succeeds, even if there is nothing to abort."""
        wanted = await _decoded(request, EndEpisode)
        try:
            live = self._open(wanted)
            if live is not None:
                wish = EpisodeAbort(lease=live.lease, reason="its client aborted it")
                await self._service.abort(live.row.episode_id, wish)
                declares = wanted.declare_client_active and live.row.kind == "train"
                self._agreed.played(wanted.client_uuid, declares=declares)
        except (Wrong, Refusal) as error:
            _log.info("an abort had no effect: %s", error)
        return {"success": True}

    async def can_continue(self, request: Request) -> Json:
        wanted = await _decoded(request, EpisodeOfClient)
        live = self._service.state.live.get(wanted.episode_uuid)
        mine = live is not None and live.guest and live.row.client_id == wanted.client_uuid and live.expiry is None
        return {"can_continue": mine and pool.current_run(self._service.state) is not None}

    async def agree(self, request: Request) -> Json:
        """Record that a client agrees to the next step, in a run whose clients close its batches."""
        wanted = await _decoded(request, EpisodeOfClient)
        why = await self._agreed.agree(wanted.client_uuid)
        return {"success": why is None, "failure_reason": why or ""}

    def _open(self, wanted: EpisodeOfClient) -> LiveEpisode | None:
        """Return the open episode that this client claimed; None if it is not open. Raises: Wrong for another client's episode."""
        live = self._service.state.live.get(wanted.episode_uuid)
        if live is not None and not (live.guest and live.row.client_id == wanted.client_uuid):
            raise Wrong("the episode belongs to another client", 404)
        return live

    async def _entry(self, wanted: EndEpisode) -> LedgerEntry:
        try:
            entry = await self._service.entry(wanted.episode_uuid)
        except Refusal as refusal:
            if refusal.code is ErrorCode.NOT_FOUND:
                raise Wrong("no such episode on this server") from refusal
            raise
        if entry.client_id != wanted.client_uuid:
            raise Wrong("the episode belongs to another client", 404)
        return entry


# -- reading requests ---------------------------------------------------------------------------------------------------


def _require_admin(request: Request) -> None:
    if request.scope[ROLE] is Role.CLIENT:
        raise Wrong("only the admin's address allows this, not the client's", 403)


async def _decoded(request: Request, model: type[Body]) -> Body:
    """Parse the body as `model`. Ignores unknown fields, because releases of AgentJet's client differ. Raises: Wrong, Refusal."""
    raw = await wire.read_body(request, wire.MAX_CONTROL_BYTES)
    try:
        return model.model_validate(await wire.read_json(raw or b"{}"))
    except ValidationError as error:
        raise Wrong("; ".join(map(str, explain(error, model)))) from error


def _result(output: WorkflowOutput, lease: str) -> EpisodeResult:
    """Build our episode result from AgentJet's output. Raises: Wrong."""
    reward, metrics = _reward(output.reward), _metrics(output.log_metrics)
    try:
        return EpisodeResult(
            lease=lease, reward=reward, success=output.is_success, metrics=metrics, metadata=output.metadata
        )
    except InvalidSpec as error:
        raise Wrong(error.detail) from error


def _reward(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise Wrong(f"reward must be one number, got {json.dumps(given)[:80]}; abort an episode that has no reward")
    return float(given)


def _metrics(given: Json) -> dict[str, float]:
    """Read metrics from a JSON object: numbers as they are, lists as their means, nested objects as `name/inner`. Ignore other
    values."""
    found: dict[str, float] = {}
    for name, value in given.items():
        if isinstance(value, dict):
            found |= {f"{name}/{inner}": number for inner, number in _metrics(value).items()}
            continue
        numbers = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int | float)]
        if numbers:
            found[name] = fmean(map(float, numbers))
    return found


# -- errors -------------------------------------------------------------------------------------------------------------


async def _wrong(request: Request, error: Exception) -> Response:
    assert isinstance(error, Wrong)
    return wire.answer_json({"detail": error.detail}, status=error.status)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return wire.answer_json({"detail": error.detail}, status=_STATUS.get(error.code, 400))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _unroutable(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return wire.answer_json({"detail": f"{request.url.path} is not served here"}, status=error.status_code)


async def _failed(request: Request, error: Exception) -> Response:
    _log.error("AgentJet's %s failed", request.url.path, exc_info=error)
    return wire.answer_json({"detail": "internal error; the server's log has the details"}, status=500)
