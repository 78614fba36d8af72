"""One client of teams as a process that may be killed at any moment: `python -m tests.faults.team_player PARAMETERS.json`.

Each of its tasks is tried by teams over two servers until enough of them are known to count. What it knows of each team goes
into its own journal before it acts on it; started again with the same parameters it goes on.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections import Counter
from pathlib import Path

import httpx

from swarm.client import Episode, Patience, SwarmClient, SwarmError, TeamAborted, team
from tests.faults.clients import Part
from tests.faults.journal import Journal, read

LIMITS = Patience(connect_s=300.0, later_s=600.0, longest_delay_s=1.0)
AGAIN_AFTER_S = 0.1
PATIENCE_S = 4.0


class TeamPlayer:
    """Makes teams, over one client of each server."""

    def __init__(self, part: Part, journal: Journal, swarms: list[SwarmClient], http: httpx.AsyncClient) -> None:
        self._part = part
        self._journal = journal
        self._swarms = swarms
        self._http = http
        self._rng = random.Random(f"{part.seed}/{part.client_id}")

    async def attempt(self, task_id: str) -> bool:
        """One team. Whether it is known to count."""
        part = self._part
        one, other = (
            swarm.episode(task_id=task_id, run_id=run_id, idle_limit_s=part.idle_limit_s)
            for swarm, run_id in zip(self._swarms, part.run_ids, strict=True)
        )
        said_all = False
        both = team(one=one, other=other, patience_s=PATIENCE_S)
        try:
            async with both:
                names = {"task_id": task_id, "other": other.id}
                self._journal.write("claimed", one.id, **names)
                await asyncio.gather(self._say(one), self._say(other))
                rewards = {"one": self._rng.random(), "other": self._rng.random()}
                both.end(rewards=rewards, metadata={"of": one.id, "with": other.id})
                self._journal.write("ending", one.id, **names, rewards=[rewards["one"], rewards["other"]])
                said_all = True
        except (SwarmError, httpx.HTTPError, ExceptionGroup) as error:
            if one.claimed and other.claimed:
                certain = not said_all or isinstance(error, TeamAborted)
                self._journal.write("aborted" if certain else "undecided", one.id, error=type(error).__name__)
            return False
        self._journal.write("committed", one.id, task_id=task_id)
        return True

    async def _say(self, episode: Episode) -> None:
        """One call. Raises: httpx.HTTPError, which costs the team."""
        answer = await self._http.post(
            f"{episode.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {episode.api_key}", "Idempotency-Key": f"call-{episode.id}"},
            json={"model": "policy", "messages": [{"role": "user", "content": f"Repeat {episode.id}"}]},
        )
        said = answer.raise_for_status().json()["choices"][0]["message"]["content"]
        if self._part.said_of_another(said, episode.id):
            self._journal.write("leak", episode.id, said=said)


async def play(part: Part) -> None:
    counted = Counter(note["task_id"] for note in read(Path(part.journal)) if note["note"] == "committed")
    wanted = [f"{part.client_id}-{n}" for n in range(part.tasks)]
    left = [task_id for task_id in wanted for _ in range(part.of_each - counted[task_id])]
    journal = Journal(Path(part.journal))
    async with (
        httpx.AsyncClient(timeout=part.call_limit_s, trust_env=False) as http,
        SwarmClient(part.urls[0], client_id=part.client_id, patience=LIMITS) as one,
        SwarmClient(part.urls[1], client_id=part.client_id, patience=LIMITS) as other,
    ):
        player = TeamPlayer(part, journal, [one, other], http)

        async def hand() -> None:
            while left:
                task_id = left.pop(0)
                if not await player.attempt(task_id):
                    left.append(task_id)
                    await asyncio.sleep(AGAIN_AFTER_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(part.concurrency):
                group.create_task(hand())
    journal.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(play(Part.load(Path(sys.argv[1]))))
