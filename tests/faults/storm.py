"""Many episodes through one echo server, while the network between fails and everyone is killed at random.

`python -m tests.faults.storm --episodes 10000 --seed 7 [--folder DIR] [--longest-stall-s 35]` is the long run: one JSON
line, exit code 1 when the count does not come out even. The tests run a short one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from bench.serving import ServerProcess
from swarm.client import RunSpec, SwarmClient
from swarm.protocol.episodes import LedgerEntry
from tests.fakes.proxy import CALM, FaultyProxy, Weather
from tests.faults import journal
from tests.faults.balance import Balance, batches_of, count
from tests.faults.player import Part

ROOT = Path(__file__).parents[2]
GROUP = 4
SETTLE_S = 120.0
SPEC = RunSpec.model_validate(
    {
        "batch": {"tasks": 4, "group_size": GROUP, "group_patience_s": 5.0},
        "sampling": {"max_tokens": 64},
        "checkpoint": {"every_steps": 3},
        "limits": {"drain_limit_s": 10.0},
    }
)


class ClientFailed(Exception):
    """A client ended by itself before its work was done; the text is its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How bad it gets. Kills fall on requests chosen by the seed."""

    episodes: int
    seed: int
    clients: int = 3
    concurrency: int = 6
    client_kills: int
    server_kills: int
    weather: Weather
    idle_limit_s: float = 5.0
    call_limit_s: float = 10.0

    @classmethod
    def of(cls, episodes: int, seed: int, longest_stall_s: float = 2.0) -> Plan:
        weather = replace(Weather(), longest_stall_s=longest_stall_s)
        client_kills, server_kills = max(4, episodes // 150), max(3, episodes // 400)
        return cls(
            episodes=episodes,
            seed=seed,
            clients=3
            if episodes < 1000
            else 12,  # a client makes its claims in order: one that stalls holds up the rest
            weather=weather,
            client_kills=client_kills,
            server_kills=server_kills,
        )


class Storm:
    """One run of a plan in one folder."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._rng = random.Random(plan.seed)
        self._proxy = FaultyProxy(plan.seed, plan.weather)
        self._server: ServerProcess | None = None
        self._clients: dict[int, asyncio.subprocess.Process] = {}
        self._restarting: asyncio.Task[None] | None = None
        self.kills: Counter[str] = Counter()

    async def rage(self) -> Balance:
        """Raises: ClientFailed, DidNotStart, TimeoutError when the server does not come to rest."""
        async with self._proxy:
            try:
                await self._start_server()
                async with SwarmClient(self._url, client_id="storm") as swarm:
                    run = await swarm.start_run(SPEC)
                self._place_strikes()
                await self._play(run.run_id)
                await self._restarted()
                self._kill_server()  # what is acknowledged by now must stand this as well
                await self._restarted()
                return await self._settle(run.run_id)
            finally:
                await self._end()

    @property
    def met(self) -> dict[str, int]:
        """How often each fault came, and who was killed."""
        return {**{str(fault): times for fault, times in sorted(self._proxy.met.items())}, **self.kills}

    # -- the server ---------------------------------------------------------------------------------------------------

    @property
    def _url(self) -> str:
        assert self._server is not None
        return self._server.url

    async def _start_server(self) -> None:
        arguments = ("--log-level", "warning", "--echo-tokens-per-s", "1000")
        self._server = await asyncio.to_thread(ServerProcess, self._folder / "state", *arguments)
        self._proxy.target = httpx.URL(self._server.url).port

    def _kill_server(self) -> None:
        if self._server is None or (self._restarting is not None and not self._restarting.done()):
            return
        self._proxy.target = None
        self._server.kill()
        self.kills["server_kills"] += 1
        self._restarting = asyncio.create_task(self._start_server())

    async def _restarted(self) -> None:
        if self._restarting is not None:
            await self._restarting

    # -- the clients --------------------------------------------------------------------------------------------------

    def _journal(self, index: int) -> Path:
        return self._folder / f"client-{index}.journal"

    async def _play(self, run_id: str) -> None:
        """All clients, each started again as often as it is killed. Raises: ClientFailed."""
        async with asyncio.TaskGroup() as group:
            for index in range(self._plan.clients):
                group.create_task(self._keep_playing(index, run_id))

    async def _keep_playing(self, index: int, run_id: str) -> None:
        plan = self._plan
        share = -(-plan.episodes // (plan.clients * GROUP))
        lives = 0
        while True:
            parameters = self._folder / f"client-{index}.json"
            Part(
                url=self._proxy.url,
                run_id=run_id,
                client_id=f"client-{index}",
                seed=plan.seed * 1000 + lives,
                tasks=share,
                concurrency=plan.concurrency,
                idle_limit_s=plan.idle_limit_s,
                call_limit_s=plan.call_limit_s,
                journal=str(self._journal(index)),
            ).save(parameters)
            lives += 1
            code = await self._live(index, parameters)
            if code == 0:
                return
            if code != -signal.SIGKILL:
                raise ClientFailed(f"client {index} ended with {code}:\n{self._log(index).read_text()[-4000:]}")

    async def _live(self, index: int, parameters: Path) -> int:
        with self._log(index).open("a") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.faults.player", str(parameters), cwd=ROOT, stdout=log, stderr=log
            )
        self._clients[index] = process
        code = await process.wait()
        del self._clients[index]
        return code

    def _log(self, index: int) -> Path:
        return self._folder / f"client-{index}.log"

    def _kill_client(self) -> None:
        if self._clients:
            self._clients[self._rng.choice(sorted(self._clients))].kill()
            self.kills["client_kills"] += 1

    def _place_strikes(self) -> None:
        plan = self._plan
        numbers = range(20, max(60, 3 * plan.episodes))  # an episode is at least three requests
        chosen = self._rng.sample(numbers, plan.client_kills + plan.server_kills)
        for number in chosen[: plan.client_kills]:
            self._proxy.strikes[number] = self._kill_client
        for number in chosen[plan.client_kills :]:
            self._proxy.strikes[number] = self._kill_server

    # -- afterwards ---------------------------------------------------------------------------------------------------

    async def _settle(self, run_id: str) -> Balance:
        self._proxy.weather = CALM
        self._proxy.strikes.clear()
        async with SwarmClient(self._url, client_id="storm") as swarm, asyncio.timeout(SETTLE_S):
            await swarm.stop_run(run_id)
            async for status in swarm.statuses(wait_s=1.0):
                if status.phase == "idle" and not status.pool.running:
                    break
            entries: list[LedgerEntry] = [entry async for entry in swarm.ledger(run_id=run_id)]
        assert self._server is not None
        await asyncio.to_thread(self._server.stop)
        (pool,) = (self._folder / "state").rglob("pool.sqlite")
        notes: list[dict[str, Any]] = []
        for index in range(self._plan.clients):
            notes += journal.read(self._journal(index))
        return count(notes, entries, batches_of(pool))

    async def _end(self) -> None:
        for process in list(self._clients.values()):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await self._restarted()
        if self._server is not None and self._server.process.poll() is None:
            await asyncio.to_thread(self._server.kill)


def main() -> int:
    """The long run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    parser.add_argument("--longest-stall-s", type=float, default=35.0)
    parser.add_argument("--folder", type=Path, help="kept; without it a temporary one is removed when all is well")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # either ends it in good order: nobody is left running
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    folder = args.folder or Path(tempfile.mkdtemp(prefix="storm-"))
    folder.mkdir(parents=True, exist_ok=True)
    storm, began = Storm(Plan.of(args.episodes, seed, args.longest_stall_s), folder), time.monotonic()
    balance = asyncio.run(storm.rage())
    told = {"seed": seed, "episodes": args.episodes, "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps({**told, **storm.met, **asdict(balance)}))  # noqa: T201 - a command's answer
    if args.folder is None and not balance.faults:
        shutil.rmtree(folder)
    return 1 if balance.faults else 0


if __name__ == "__main__":
    sys.exit(main())
