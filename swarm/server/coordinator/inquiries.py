"""Asks deciders on behalf of prepared episodes whose clients are silent, until each is settled. Knows asyncio, not HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from foundation.clock import Clock
from swarm.protocol.errors import ErrorCode, Refusal, SwarmError
from swarm.protocol.teams import TeamDecision
from swarm.server.coordinator.clerk import Clerk
from swarm.server.pool.rows import TeamRow

_log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
AT_ONCE = 16
"""Questions under way at one time."""
COMPLAIN_AFTER = 5
"""Unanswered questions about one episode before people are told that it may need them."""


class DeciderSilent(SwarmError):
    """The decider gave no answer that can be believed. Nothing may be concluded from it."""


Ask = Callable[[TeamRow], Awaitable[TeamDecision]]
"""Asks the decider that the row names. Raises: DeciderSilent."""


class Inquiries:
    """One per server. `run` until cancelled."""

    def __init__(self, clerk: Clerk, ask: Ask, *, clock: Clock) -> None:
        self._clerk = clerk
        self._ask = ask
        self._clock = clock
        self._permits = asyncio.Semaphore(AT_ONCE)
        self._under_way: set[str] = set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                self._clerk.doubt.clear()
                for episode_id in self._clerk.book.teams.in_doubt():
                    if episode_id not in self._under_way:
                        self._under_way.add(episode_id)
                        group.create_task(self._settle(episode_id), name=f"ask for {episode_id}")
                await self._clerk.doubt.wait()

    async def _settle(self, episode_id: str) -> None:
        """Ask until there is an answer, or no more need for one."""
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
        prepared = self._clerk.book.state.prepared.get(episode_id)
        return prepared.team if prepared is not None and prepared.asks else None

    async def _ask_once(self, team: TeamRow) -> bool:
        """Whether the decider answered."""
        try:
            async with self._permits:
                decision = await self._ask(team)
        except DeciderSilent as error:
            _log.info("episode %s is in doubt: %s", team.episode_id, error)
            return False
        try:
            await self._clerk.carry_out(lambda book: book.teams.told(team.episode_id, decision))
        except Refusal as refusal:
            if refusal.code is not ErrorCode.STORAGE_FULL:
                raise  # else the episode is prepared as before, and asks again
        return True

    def _complain(self, team: TeamRow) -> None:
        line = (
            f"episode {team.episode_id} is prepared and its decider at {team.decider_url} does not answer; its slot stays held. "
            f"If that server is gone for good: swarm episode resolve {team.episode_id}"
        )
        _log.warning("%s", line)
        self._clerk.feed.log(line)
