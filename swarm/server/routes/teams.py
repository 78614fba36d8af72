"""The control surface's calls for teams: prepare, commit, decision, resolve. Decode, call the service, encode; decide nothing."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.teams import EpisodeCommit, EpisodePreparation, EpisodeResolution, TeamDecision, TeamReceipt
from swarm.server.keys import ControlTokens, Keyring, Role, bearer
from swarm.server.routes import wire
from swarm.server.routes.wire import Operation
from swarm.server.service import Service
from swarm.server.team_resolver import Peers

_EPISODE = "/swarm/v1/episodes/{episode_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamRoutes:
    """The endpoints, over one service."""

    service: Service
    keys: Keyring
    tokens: ControlTokens
    peers: Peers

    def operations(self) -> list[Operation]:
        lost = (ErrorCode.NOT_FOUND, ErrorCode.LEASE_LOST)
        return [
            Operation(
                method="POST",
                path=f"{_EPISODE}:prepare",
                endpoint=self.prepare,
                summary="Bind it to the decision of its team, durably",
                body=EpisodePreparation,
                answer=TeamReceipt,
                codes=(*lost, ErrorCode.IDEMPOTENCY_CONFLICT),
            ),
            Operation(
                method="POST",
                path=f"{_EPISODE}:commit",
                endpoint=self.commit,
                summary="On the decider: decide for the team; elsewhere: hear that it is decided",
                body=EpisodeCommit,
                answer=TeamReceipt,
                codes=lost,
            ),
            Operation(
                method="GET",
                path=f"{_EPISODE}/decision",
                endpoint=self.decision,
                summary="What was decided, for servers that hold the episode's team key",
                answer=TeamDecision,
            ),
            Operation(
                method="POST",
                path=f"{_EPISODE}:resolve",
                endpoint=self.resolve,
                summary="Decide in place of a decider that is gone for good",
                body=EpisodeResolution,
                answer=TeamReceipt,
                codes=lost,
            ),
        ]

    async def prepare(self, request: Request) -> Response:
        wire.require(self.tokens, request)
        wish = await wire.decode(request, EpisodePreparation)
        episode_id = request.path_params["episode_id"]
        if wish.decider.episode_id != episode_id:
            self.peers.vouch(wish.decider)
        sealed = self.keys.seal(episode_id, wish.decider.key)
        return wire.answer(await self.service.prepare(episode_id, wish, sealed))

    async def commit(self, request: Request) -> Response:
        wire.require(self.tokens, request)
        commit = await wire.decode(request, EpisodeCommit)
        return wire.answer(await self.service.commit(request.path_params["episode_id"], commit))

    async def decision(self, request: Request) -> Response:
        episode_id = request.path_params["episode_id"]
        # Asked for even where no tokens are: it proves that this is the server which the team chose.
        if not self.keys.is_team_key(bearer(request.headers.get("authorization")), episode_id):
            raise Refusal(
                ErrorCode.UNAUTHORIZED, "send the team_key of the decider's grant; this server made no such key"
            )
        return wire.answer(await self.service.decision(episode_id))

    async def resolve(self, request: Request) -> Response:
        wire.require(self.tokens, request, Role.ADMIN)
        resolution = await wire.decode(request, EpisodeResolution)
        return wire.answer(await self.service.resolve(request.path_params["episode_id"], resolution))
