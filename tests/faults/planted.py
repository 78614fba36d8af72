"""Many episodes on one echo server whose clients, graders, agents, network and server fail on purpose, each for a planted cause.

Whoever makes an attempt fail writes its cause down at that moment; the ledger is compared with that. Failures that hit whatever is
open (a kill, a cut network, a stopped client) happen while everybody is known to stand still at one place.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.serving import ServerProcess
from swarm.client import Cause, Episode, GraderFailed, Outcome, Patience, RunSpec, SwarmClient, Task, grading
from swarm.client.losses import CHARGED
from swarm.client.rollouts import RolloutReport
from tests.fakes.proxy import CALM, FaultyProxy

ROOT = Path(__file__).parents[2]
TOGETHER = 4
"""Episodes that are open at once when something hits them all."""
PATIENT = Patience(connect_s=120.0, later_s=600.0, longest_delay_s=0.5)
LIMIT_S = 0.3
SILENT_S = 0.5
SPEC = RunSpec.model_validate(
    {
        "batch": {"tasks": 2, "group_size": TOGETHER, "group_patience_s": 1.0, "partial_min": 1},
        "sampling": {"max_tokens": 16},
        "max_staleness": 4,
    }
)
Rollout = Callable[[Episode, Task], Any]


class Away(Exception):
    """Something that an agent or a grader of the user's own runs into."""


@dataclass
class Fuzz:
    """One run over `folder`. Use as an async context manager; nothing is left running."""

    folder: Path
    seed: int
    planted: Counter[Cause] = field(default_factory=Counter)
    by_task: Counter[tuple[str, Cause]] = field(default_factory=Counter)
    attempts: int = 0
    rounds: Counter[str] = field(default_factory=Counter)

    async def __aenter__(self) -> Fuzz:
        self._rng = random.Random(self.seed)
        self._http = httpx.AsyncClient(timeout=30.0, trust_env=False)
        self._proxy = FaultyProxy(self.seed, CALM)
        await self._proxy.__aenter__()
        await self._start()
        async with self._client("admin") as swarm:
            self.run_id = (await swarm.start_run(SPEC)).run_id
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()
        await self._proxy.__aexit__(*exception)
        await asyncio.to_thread(self._server.kill)

    async def play(self, episodes: int) -> None:
        """Rounds of all kinds, each at least once, until so many attempts were made."""
        kinds = [self._storm, self._restart, self._cut, self._stopped, self._limit, self._killed]
        weights = [12, 1, 1, 2, 2, 1]
        first = list(kinds)
        self._rng.shuffle(first)
        while self.attempts < episodes or first:
            kind = first.pop() if first else self._rng.choices(kinds, weights)[0]
            self.rounds[kind.__name__] += 1
            await kind(f"{kind.__name__}-{sum(self.rounds.values())}")

    async def ledger(self) -> tuple[dict[Cause, int], Counter[tuple[str, Cause]], int]:
        """Attempts lost by cause, the same by task, and all attempts, as the server has them."""
        async with self._client("reader") as swarm:
            summary = await swarm.summary(run_id=self.run_id)
            entries = [entry async for entry in swarm.ledger(run_id=self.run_id)]
        by_task = Counter((entry.task_id, entry.cause) for entry in entries if entry.cause is not None)
        assert sum(lost.episodes for lost in summary.lost) == sum(summary.causes.values()) or len(summary.lost) == 1_000
        return summary.causes, by_task, len(entries)

    # -- rounds -------------------------------------------------------------------------------------------------------

    async def _storm(self, name: str) -> None:
        """Attempts that fail one by one, for reasons of their own, or end."""

        async def rollout(episode: Episode, task: Task) -> Outcome | float | None:
            self.attempts += 1
            fate = self._rng.choice([None, None, None, *_FATES])
            if fate is not None:
                self._plant(task, fate[0])
            if fate is None or fate[1] is not _no_call:
                await self._say(episode)
            return 1.0 if fate is None else await fate[1](episode)

        tasks = [Task(f"{name}-{number}", "") for number in range(4)]
        report = await self._run_tasks(name, tasks, rollout, kind="train", retries=100)
        assert (report.ended, report.given_up) == (4 * TOGETHER, 0), report

    async def _restart(self, name: str) -> None:
        """The server is killed while episodes are open."""
        await self._all_at_once(name, Cause.SERVER, self._kill_server)

    async def _cut(self, name: str) -> None:
        """Nothing comes through to the server for a while."""
        failed = asyncio.Barrier(TOGETHER)

        async def agent(episode: Episode) -> None:
            try:
                await self._say(episode)
            except httpx.TransportError:
                async with failed:  # only then is the network mended, so that the abort comes through
                    self._proxy.target = httpx.URL(self._server.url).port
                raise

        async def cut() -> None:
            self._proxy.target = None

        await self._all_at_once(name, Cause.NETWORK, cut, agent)

    async def _all_at_once(
        self, name: str, cause: Cause, strike: Callable[[], Any], agent: Callable[[Episode], Any] | None = None
    ) -> None:
        there, struck = asyncio.Barrier(TOGETHER), asyncio.Event()
        first = set[str]()

        async def rollout(episode: Episode, task: Task) -> float:
            self.attempts += 1
            if len(first) < TOGETHER:
                first.add(episode.id)
                self._plant(task, cause)
                if await there.wait() == 0:
                    await strike()
                    struck.set()
                await struck.wait()
                await (agent or self._say)(episode)
                raise AssertionError("nothing was struck")
            await self._say(episode)
            return 0.5

        tasks = [Task(f"{name}-{number}", "") for number in range(TOGETHER)]
        report = await self._run_tasks(name, tasks, rollout, retries=0)
        assert (report.ended, report.causes) == (TOGETHER, {cause: TOGETHER}), report

    async def _stopped(self, name: str) -> None:
        """Somebody stops the client."""
        there = asyncio.Barrier(TOGETHER + 1)

        async def rollout(episode: Episode, task: Task) -> float:
            self.attempts += 1
            self._plant(task, Cause.PERSON)
            await there.wait()
            await asyncio.Event().wait()
            return 0.0

        tasks = [Task(f"{name}-{number}", "") for number in range(TOGETHER)]
        working = asyncio.create_task(self._run_tasks(name, tasks, rollout))
        await there.wait()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    async def _limit(self, name: str) -> None:
        """Episodes that take longer than they may; their task is set aside."""

        async def rollout(episode: Episode, task: Task) -> float:
            self.attempts += 1
            self._plant(task, Cause.LIMIT)
            await asyncio.Event().wait()
            return 0.0

        tasks = [Task(f"{name}-{number}", "") for number in range(2)]
        limits = {"max_episode_s": LIMIT_S, "idle_limit_s": 3 * LIMIT_S}
        report = await self._run_tasks(name, tasks, rollout, retries=1, **limits)
        assert (report.set_aside, report.causes) == (2, {Cause.LIMIT: 4}), report

    async def _killed(self, name: str) -> None:
        """A client is killed: what it held runs out, or is given back when it is started again."""
        again = self._rng.random() < 0.5
        part = {"url": self._proxy.url, "run_id": self.run_id, "client_id": name, "tasks": TOGETHER}
        part["idle_limit_s"] = 600.0 if again else SILENT_S
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.faults.planted", json.dumps(part), cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        assert client.stdout is not None
        for _ in range(TOGETHER):
            task_id = (await client.stdout.readline()).decode().strip()
            self.attempts += 1
            self._plant(Task(task_id, ""), Cause.CLIENT)
        client.send_signal(signal.SIGKILL)
        await client.wait()
        if not again:
            async with self._client("watcher") as swarm:
                async for status in swarm.statuses(wait_s=1.0):
                    if not status.pool.running:
                        return

        async def rollout(episode: Episode, task: Task) -> float:
            self.attempts += 1
            await self._say(episode)
            return 0.5

        report = await self._run_tasks(
            name, [Task(f"{name}-{n}", "") for n in range(TOGETHER)], rollout, idle_limit_s=600.0
        )
        assert report.ended == TOGETHER, report

    # -- what they do -------------------------------------------------------------------------------------------------

    def _plant(self, task: Task, cause: Cause) -> None:
        self.planted[cause] += 1
        self.by_task[task.id, cause] += 1

    async def _run_tasks(self, name: str, tasks: list[Task], rollout: Rollout, **options: Any) -> RolloutReport:
        stated = {"kind": "eval", "concurrency": TOGETHER, "run_id": self.run_id, **options}
        async with self._client(name) as swarm:
            return await swarm.run_tasks(tasks, rollout, progress=False, **stated)

    async def _say(self, episode: Episode) -> None:
        answer = await self._http.post(
            f"{episode.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {episode.api_key}"},
            json={"model": "policy", "messages": [{"role": "user", "content": "Say red"}]},
        )
        answer.raise_for_status()

    def _client(self, client_id: str) -> SwarmClient:
        return SwarmClient(self._proxy.url, client_id=client_id, patience=PATIENT)

    async def _start(self) -> None:
        self._server = await asyncio.to_thread(ServerProcess, self.folder / "state", "--log-level", "warning")
        self._proxy.target = httpx.URL(self._server.url).port

    async def _kill_server(self) -> None:
        self._proxy.target = None
        await asyncio.to_thread(self._server.kill)
        await self._start()


async def _raise(episode: Episode) -> None:
    raise Away("no such tool")


async def _leave(episode: Episode) -> None:
    """The rollout forgets the reward."""


async def _give_up(episode: Episode) -> None:
    episode.abort("the sandbox did not start")


async def _no_call(episode: Episode) -> float:
    return 1.0


async def _grader_raises(episode: Episode) -> None:
    with grading():
        raise Away("the judge is down")


async def _grader_says_so(episode: Episode) -> None:
    raise GraderFailed("the unit tests timed out")


async def _no_number(episode: Episode) -> float:
    return float("nan")


async def _words(episode: Episode) -> Any:
    return "good"


async def _no_json(episode: Episode) -> None:
    episode.end(reward=1.0, metadata={"seen": object()})


async def _decline(episode: Episode) -> None:
    episode.abort("not today", cause=Cause.PERSON)


async def _engine_down(episode: Episode) -> None:
    request = httpx.Request("POST", f"{episode.base_url}/chat/completions")
    raise httpx.HTTPStatusError("503", request=request, response=httpx.Response(503, request=request))


_FATES: list[tuple[Cause, Callable[[Episode], Any]]] = [
    (Cause.ROLLOUT, _raise),
    (Cause.ROLLOUT, _leave),
    (Cause.ROLLOUT, _give_up),
    (Cause.ROLLOUT, _no_call),
    (Cause.ROLLOUT, _words),
    (Cause.GRADER, _grader_raises),
    (Cause.GRADER, _grader_says_so),
    (Cause.GRADER, _no_number),
    (Cause.GRADER, _no_json),
    (Cause.PERSON, _decline),
    (Cause.SERVER, _engine_down),
]
assert {cause for cause, _ in _FATES} & CHARGED


async def hold(part: dict[str, Any]) -> None:
    """A client that names the tasks it holds, and then waits to be killed."""

    async def rollout(episode: Episode, task: Task) -> float:
        sys.stdout.write(f"{task.id}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()
        return 0.0

    async with SwarmClient(part["url"], client_id=part["client_id"]) as swarm:
        tasks = [Task(f"{part['client_id']}-{number}", "") for number in range(part["tasks"])]
        await swarm.run_tasks(
            tasks,
            rollout,
            run_id=part["run_id"],
            kind="eval",
            concurrency=len(tasks),
            idle_limit_s=part["idle_limit_s"],
        )


if __name__ == "__main__":
    asyncio.run(hold(json.loads(sys.argv[1])))
