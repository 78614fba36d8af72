"""Other swarm servers, as a server in doubt asks them: which may be asked, and what their answers are worth.

A client names the address, so a server asks only where its operator allows it, follows no redirect, and shows nobody what
came back. An answer is believed only when it is a decision about the episode that was asked for: a server that does not
know the team key says `unauthorized`, whatever stands at the address now, and nothing is concluded from it.
"""

from __future__ import annotations

from urllib.parse import quote

import httpx
from pydantic import ValidationError

from foundation.addresses import is_loopback
from foundation.strict import FieldError
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.problem import invalid_spec
from swarm.protocol.teams import Decider, TeamDecision
from swarm.server.coordinator.inquiries import DeciderSilent
from swarm.server.keys import KeyRefused, Keyring
from swarm.server.pool.rows import TeamRow

ANSWER_LIMIT_S = 10.0


class Peers:
    """urls: servers that may be asked. any_loopback: and every one on this machine (a server without tokens)."""

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
        """Raises: Refusal(forbidden) for a decider that this server would not ask, invalid_spec where nobody can be asked."""
        try:
            asked = httpx.URL(decider.url)
        except httpx.InvalidURL as error:
            raise invalid_spec([FieldError(field="decider.url", problem=f"is no address: {error}")]) from error
        if _normal(decider.url) in self._urls or (self._any_loopback and is_loopback(asked.host)):
            return
        detail = f"this server asks no decider at {decider.url}; have its operator start it with --peer {decider.url}"
        raise Refusal(ErrorCode.FORBIDDEN, detail)

    async def ask(self, team: TeamRow) -> TeamDecision:
        """What the decider says. Raises: DeciderSilent."""
        url = f"{team.decider_url}/swarm/v1/episodes/{quote(team.decider_id, safe='')}/decision"
        try:
            key = self._keys.unseal(team.episode_id, team.sealed_key)
        except KeyRefused as error:  # the state directory lost its secret: an operator must resolve it
            raise DeciderSilent(f"{team.decider_url} cannot be asked: {error}") from error
        try:
            async with httpx.AsyncClient(
                timeout=ANSWER_LIMIT_S,
                trust_env=not is_loopback(httpx.URL(team.decider_url).host),
                transport=self._transport,
            ) as http:
                answer = await http.get(url, headers={"Authorization": f"Bearer {key}"})
        except (httpx.HTTPError, httpx.InvalidURL) as error:  # the client named the episode: it may fit in no url
            raise DeciderSilent(f"{team.decider_url}: {str(error) or type(error).__name__}") from error
        if answer.status_code != 200:
            raise DeciderSilent(f"{team.decider_url} answered HTTP {answer.status_code}")
        try:
            decision = TeamDecision.model_validate_json(answer.content)
        except ValidationError as error:
            raise DeciderSilent(f"{team.decider_url} answered with something that is no decision") from error
        if decision.episode_id != team.decider_id:
            raise DeciderSilent(f"{team.decider_url} answered for another episode")
        return decision


def _normal(url: str) -> str:
    return str(httpx.URL(url)).rstrip("/")
