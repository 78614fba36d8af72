"""Settles prepared episodes whose clients are silent: asks each team's deciding server until that server has decided.

The address comes from a client, so we only ask servers that the operator allows, follow no redirects, and show the answer to
nobody. We only accept an answer that is a decision on the requested episode. A server that does not know the team key answers
`unauthorized`, and we conclude nothing from that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from foundation.addresses import is_loopback
from foundation.clock import Clock
from foundation.strict import FieldError
from swarm.protocol.errors import ErrorCode, Refusal, SwarmError
from swarm.protocol.problem import invalid_spec
from swarm.protocol.teams import Decider, TeamDecision
from swarm.server.keys import KeyRefused, Keyring
from swarm.server.service import Service
from swarm.server.state import teams
from swarm.server.state.rows import TeamRow

_log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
AT_ONCE = 16
"""Maximum number of concurrent requests to deciders."""
COMPLAIN_AFTER = 5
"""After this many unanswered requests for one episode, a log line asks an operator to decide."""


class DeciderSilent(SwarmError):
    """The decider gave no valid answer, so we must not conclude anything about its decision."""


Ask = Callable[[TeamRow], Awaitable[TeamDecision]]
"""Asks the decider that the row names. Raises: DeciderSilent."""


class TeamResolver:
    """A server's team resolver. `run` runs until it is cancelled."""

    def __init__(self, service: Service, ask: Ask, *, clock: Clock) -> None:
        self._service = service
        self._ask = ask
        self._clock = clock
        self._permits = asyncio.Semaphore(AT_ONCE)
        self._under_way: set[str] = set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                self._service.doubt.clear()
                for episode_id in teams.in_doubt(self._service.state):
                    if episode_id not in self._under_way:
                        self._under_way.add(episode_id)
                        group.create_task(self._settle(episode_id), name=f"ask for {episode_id}")
                await self._service.doubt.wait()

    async def _settle(self, episode_id: str) -> None:
        """Ask until the decision has been applied or is no longer needed."""
        try:
            pause_s, unanswered = FIRST_PAUSE_S, 0
            while (team := self._team(episode_id)) is not None:
                answered = await self._ask_once(team)
                unanswered = 0 if answered else unanswered + 1
                if unanswered == COMPLAIN_AFTER:
                    self._complain(team)
                await self._clock.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self._under_way.discard(episode_id)

    def _team(self, episode_id: str) -> TeamRow | None:
        prepared = self._service.state.prepared.get(episode_id)
        return prepared.team if prepared is not None and prepared.asks else None

    async def _ask_once(self, team: TeamRow) -> bool:
        """Ask the decider once, and apply its decision. Return whether it answered."""
        try:
            async with self._permits:
                decision = await self._ask(team)
        except DeciderSilent as error:
            _log.debug("episode %s is in doubt: %s", team.episode_id, error)
            return False
        try:
            await self._service.carry_out(lambda t: teams.hear_decision(t, team.episode_id, decision))
        except Refusal as refusal:
            if refusal.code is not ErrorCode.STORAGE_FULL:
                raise  # if the disk is full, the episode stays prepared, and we ask again
        return True

    def _complain(self, team: TeamRow) -> None:
        line = (
            f"episode {team.episode_id} is prepared, but its decider at {team.decider_url} does not answer; its slot stays occupied. "
            f"If that server is gone for good: swarm episode resolve {team.episode_id}"
        )
        self._service.log(line)


ANSWER_LIMIT_S = 10.0


class Peers:
    """The servers that we may ask for decisions: those at `urls` and, with `any_loopback`, every server on this machine.

    `any_loopback` is only for servers without tokens.
    """

    def __init__(
        self,
        keys: Keyring,
        urls: tuple[str, ...] = (),
        *,
        any_loopback: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._keys = keys
        self._urls = frozenset(_normal(url) for url in urls)
        self._any_loopback = any_loopback
        self._transport = transport

    def vouch(self, decider: Decider) -> None:
        """Check that this server may ask a decider. Raises: Refusal(forbidden) if not; Refusal(invalid_spec) for an invalid URL."""
        try:
            asked = httpx.URL(decider.url)
        except httpx.InvalidURL as error:
            raise invalid_spec([FieldError(field="decider.url", problem=f"is not a valid URL: {error}")]) from error
        if _normal(decider.url) in self._urls or (self._any_loopback and is_loopback(asked.host)):
            return
        detail = (
            f"this server may not ask a decider at {decider.url}; its operator must start it with --peer {decider.url}"
        )
        raise Refusal(ErrorCode.FORBIDDEN, detail)

    async def ask(self, team: TeamRow) -> TeamDecision:
        """Ask the decider for its decision. Raises: DeciderSilent."""
        url = f"{team.decider_url}/swarm/v1/episodes/{quote(team.decider_id, safe='')}/decision"
        try:
            key = self._keys.unseal(team.episode_id, team.sealed_key)
        except KeyRefused as error:  # the state directory lost its secret, so an operator must resolve the episode
            raise DeciderSilent(f"cannot ask {team.decider_url}: {error}") from error
        try:
            async with httpx.AsyncClient(
                timeout=ANSWER_LIMIT_S,
                trust_env=not is_loopback(httpx.URL(team.decider_url).host),
                transport=self._transport,
            ) as http:
                answer = await http.get(url, headers={"Authorization": f"Bearer {key}"})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # The client chose the episode's id, which may not fit into a URL.
            raise DeciderSilent(f"{team.decider_url}: {str(error) or type(error).__name__}") from error
        if answer.status_code != 200:
            raise DeciderSilent(f"{team.decider_url} answered HTTP {answer.status_code}")
        try:
            decision = TeamDecision.model_validate_json(answer.content)
        except ValidationError as error:
            raise DeciderSilent(f"{team.decider_url} answered, but not with a decision") from error
        if decision.episode_id != team.decider_id:
            raise DeciderSilent(f"{team.decider_url} answered for another episode")
        return decision


def _normal(url: str) -> str:
    return str(httpx.URL(url)).rstrip("/")
