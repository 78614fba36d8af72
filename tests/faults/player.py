"""One client as a process that may be killed at any moment: `python -m tests.faults.player PARAMETERS.json`.

Ends its share of the episodes through the product's own `run_tasks`, and keeps its own journal. Started again with the same
parameters it goes on. Half of the calls are streams. Calls are repeated under an Idempotency-Key, as an SDK would.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import asdict
from pathlib import Path

import httpx

from swarm.client import Episode, Patience, SwarmClient, Task
from tests.faults.clients import Part
from tests.faults.journal import Journal

TRIES = 6
RETRIES = 50
UNFINISHED = 3


class Player:
    """The rollout, over one connection pool."""

    def __init__(self, part: Part, journal: Journal, http: httpx.AsyncClient) -> None:
        self._part = part
        self._journal = journal
        self._http = http
        self._rng = random.Random(f"{part.seed}/{part.client_id}")

    async def rollout(self, episode: Episode, task: Task) -> None:
        self._journal.write("claimed", episode.id)
        said = await self._say(episode)
        if self._part.said_of_another(said, episode.id):
            self._journal.write("leak", episode.id, said=said)
        reward = float(said == episode.id) + self._rng.random() / 100  # no two rewards are equal
        ending = episode.end(reward=reward, metadata={"of": episode.id})
        self._journal.write("ending", episode.id, reward=reward)
        receipt = await ending
        self._journal.write("acknowledged", episode.id, reward=reward, status=receipt.status)

    async def _say(self, episode: Episode) -> str:
        """What the model repeats. Raises: httpx.HTTPError."""
        body = {
            "model": "policy",
            "messages": [{"role": "user", "content": f"Repeat {episode.id}"}],
            "stream": self._rng.random() < 0.5,
        }
        headers = {"Authorization": f"Bearer {episode.api_key}", "Idempotency-Key": f"call-{episode.id}"}
        url = f"{episode.base_url}/chat/completions"
        for attempt in range(TRIES):
            try:
                return await (self._streamed if body["stream"] else self._whole)(url, headers, body)
            except httpx.TransportError:
                if attempt == TRIES - 1:
                    raise
                await asyncio.sleep(0.05 * 2**attempt)
        raise AssertionError("unreachable")

    async def _whole(self, url: str, headers: dict[str, str], body: dict[str, object]) -> str:
        answer = (await self._http.post(url, headers=headers, json=body)).raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])

    async def _streamed(self, url: str, headers: dict[str, str], body: dict[str, object]) -> str:
        said = ""
        async with self._http.stream("POST", url, headers=headers, json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return said
                if line.startswith("data: "):
                    event = json.loads(data)
                    if "error" in event:
                        raise httpx.ReadError(f"the stream said {data}")
                    said += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        raise httpx.ReadError("the stream ended before it was done")


async def play(part: Part) -> int:
    journal = Journal(Path(part.journal))
    names = (f"{part.client_id}-{number}" for number in range(part.tasks))
    tasks = [Task(id=name, query=name) for name in names]
    patience = Patience(connect_s=300.0, later_s=600.0, longest_delay_s=1.0)
    async with (
        httpx.AsyncClient(timeout=part.call_limit_s, trust_env=False) as http,
        SwarmClient(part.urls[0], client_id=part.client_id, patience=patience) as swarm,
    ):
        report = await swarm.run_tasks(
            tasks,
            Player(part, journal, http).rollout,
            run_id=part.run_ids[0],
            concurrency=part.concurrency,
            retries=RETRIES,
            idle_limit_s=part.idle_limit_s,
            progress=False,
        )
    journal.close()
    print(json.dumps(asdict(report)))  # noqa: T201 - the log of this process
    return UNFINISHED if report.given_up or report.run_over else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(play(Part.load(Path(sys.argv[1])))))
