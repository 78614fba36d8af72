"""One person at one run: how episodes are claimed for people, and how long anybody waits for them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from foundation.ids import derived_seed
from swarm.client.client import SwarmClient
from swarm.client.episode import Episode
from swarm.client.errors import Draining
from swarm.client.join.person import Person
from swarm.client.tasks import Task
from swarm.protocol.episodes import Cause, EpisodeKind
from swarm.protocol.errors import SwarmError

T = TypeVar("T")
PAIR_CLAIMS = 4
"""In one try: so many bring two slots of one group together, where nobody else claims meanwhile."""
PAIR_TRIES = 8
MATE_S = 5.0
"""So long a try waits for the other slot of its group, which two who each hold one would wait for until they were thrown out."""
PAUSES_S = (0.2, 3.0)
"""Between two tries, at random: else both begin anew at once."""


class TooLate(SwarmError):
    """The person took longer than the episode may: it was given up, and its slot is on offer again."""

    cause = Cause.LIMIT


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a sitting came to."""

    ended: int = 0
    given_up: int = 0
    rewards: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sitting:
    """Where episodes of one person come from.

    max_episode_s: nobody waits longer than this, neither the step that needs the group nor other clients.
    idle_limit_s: how soon the server notices that the person's machine is gone; while it is there, leases are renewed.
    """

    swarm: SwarmClient
    person: Person
    run_id: str
    max_episode_s: float = 300.0
    idle_limit_s: float = 30.0
    wait_s: float = 30.0
    mix: str | None = None
    kind: EpisodeKind = "train"
    tally: Tally = field(default_factory=Tally)

    def episode(self, task: Task) -> Episode:
        return self.swarm.episode(
            task_id=task.id,
            run_id=self.run_id,
            mix=self.mix,
            kind=self.kind,
            idle_limit_s=self.idle_limit_s,
            max_episode_s=self.max_episode_s,
            wait_s=self.wait_s,
        )

    async def pair(self, task: Task, stack: AsyncExitStack) -> tuple[Episode, Episode]:
        """Two episodes of one group, which are given back when `stack` closes, unless they were ended.

        Raises: TooLate when others take the slots between ours again and again.
        """
        for _ in range(PAIR_TRIES):
            async with AsyncExitStack() as claimed:
                found = await self._pair(task, claimed)
                if found is not None:
                    await stack.enter_async_context(claimed.pop_all())
                    return found
            await self.swarm.clock.sleep(random.uniform(*PAUSES_S))
        raise TooLate(f"others take the slots of task {task.id} one by one; try again")

    async def _pair(self, task: Task, claimed: AsyncExitStack) -> tuple[Episode, Episode] | None:
        """One try; None: all that it held is given back when `claimed` closes. Raises: TooLate."""
        held: dict[str | None, Episode] = {}
        for _ in range(PAIR_CLAIMS):
            try:
                async with asyncio.timeout(MATE_S if held else None):
                    episode = await claimed.enter_async_context(self.episode(task))
            except TimeoutError:
                break
            except Draining as error:
                raise TooLate(f"others are at task {task.id}: {error}") from error
            mate = held.pop(episode.grant.group_id, None)
            if mate is not None:
                for spare in held.values():
                    spare.abort("its group had one slot left; a pair needs two", cause=Cause.PERSON)
                return mate, episode
            held[episode.grant.group_id] = episode
        for spare in held.values():
            spare.abort("no two slots of one group were free", cause=Cause.PERSON)
        return None

    async def in_time(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled after max_episode_s. Raises: TooLate."""
        playing = asyncio.ensure_future(work)
        limit = asyncio.ensure_future(self.swarm.clock.sleep(self.max_episode_s))
        try:
            await asyncio.wait({playing, limit}, return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                return playing.result()
            raise TooLate(f"nobody waits longer than {self.max_episode_s:g} s for a person (--max-episode-s)")
        finally:
            limit.cancel()
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)

    def order(self, *ids: str) -> list[int]:
        """A random order that is always the same for the same ids."""
        return random.Random(derived_seed(*ids)).sample(range(len(ids)), len(ids))
