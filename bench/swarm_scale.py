"""How many episodes per second does one server manage with 10 to 5,000 clients at once, and what does its memory grow with?

A client is one keep-alive connection that claims an episode, makes a call through /v1/chat/completions (echo engine) and
ends it with a reward, again and again. Eight episodes share a task, and the server trains on them meanwhile; every process
makes whole tasks, so that none is left half done, and episodes are rounded up to that. At each level a fresh server is
timed from the first claim to the last end; its memory is read with nobody connected, and at its highest. ratio is the rate of
1,000 clients over that of 10.

Then a soak on one more server: --soak episodes by 100 clients. Memory should grow with what is open, not with what has
passed: rss_growth_mb is what the server has at the end beyond what it had after the first tenth, which fills its caches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import quantiles
from typing import Any, Self

from bench.command import run
from bench.connection import Connection
from bench.crowd import portion, together
from bench.serving import ServerProcess
from foundation import arguments

LEVELS = (10, 100, 1000, 5000)
FEW, MANY = 10, 1000
"""Numbers of clients whose rates form the ratio."""
GROUP_SIZE = 8
SOAK_CLIENTS = 100
SOAK_PARTS = 10
"""Number of parts of the soak; the first one fills the caches."""
ACTIONS = ("claim", "call", "end")
_SAMPLE_S = 0.25
_OPENED_AT_ONCE = 64
_PATIENCE_S = 600.0


class Memory:
    """Resident memory of a process in MB: the current value, and the peak since the block began."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self.peak_mb = 0.0

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._watch.join()

    def now_mb(self) -> float:
        kilobytes = next(line for line in self._status.read_text().splitlines() if line.startswith("VmRSS")).split()[1]
        megabytes = int(kilobytes) / 1024
        self.peak_mb = max(self.peak_mb, megabytes)
        return megabytes

    def _look(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self.now_mb()


@dataclass(slots=True)
class Share:
    """Result of one client process: its start and end (system-wide clock), and the latencies of each action."""

    begin: float = 0.0
    finish: float = 0.0
    latencies_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ACTIONS})


class ClientGroup:
    """The clients of one process. Episodes are numbered in the order of their claims, so that groups fill up."""

    def __init__(self, name: str, run_id: str, episodes: int) -> None:
        self._name = name
        self._run_id = run_id
        self._episodes = episodes
        self._numbers = count()
        self.share = Share()

    async def work(self, connection: Connection, client: int) -> None:
        """One client: runs episodes until all of the process's episodes are done."""
        while (number := next(self._numbers)) < self._episodes:
            grant = await self._timed("claim", connection, "/swarm/v1/episodes:claim", self._claim(client, number))
            message = {"role": "user", "content": f"Think about sum {number}, then answer with the number 42"}
            asked = {"model": "echo", "messages": [message], "max_tokens": 32}
            await self._timed("call", connection, "/v1/chat/completions", asked, grant["api_key"])
            result = {"lease": grant["lease"], "reward": float(number % 2), "metrics": {"turns": 1}}
            await self._timed("end", connection, f"/swarm/v1/episodes/{grant['episode_id']}:end", result)

    def _claim(self, client: int, number: int) -> dict[str, Any]:
        return {
            "run_id": self._run_id,
            "client_id": f"{self._name}-{client}",
            "task_id": f"{self._name}-{number // GROUP_SIZE}",
            "idle_limit_s": _PATIENCE_S,
            "wait_s": 120,
            "idempotency_key": f"{self._name}-{number}",
        }

    async def _timed(
        self, action: str, connection: Connection, path: str, body: dict[str, Any], bearer: str = ""
    ) -> dict[str, Any]:
        began = time.monotonic()
        answer = await connection.post(path, body, bearer)
        self.share.latencies_s[action].append(time.monotonic() - began)
        return answer


def run_clients(index: int, address: tuple[str, int], run_id: str, counts: tuple[int, int], barrier: Barrier) -> Share:
    """One client process. counts: number of its clients, and of all their episodes."""

    async def main() -> Share:
        clients, episodes = counts
        gate = asyncio.Semaphore(_OPENED_AT_ONCE)

        async def opened() -> Connection:
            async with gate:
                return await Connection.open(*address)

        connections = await asyncio.gather(*(opened() for _ in range(clients)))
        group = ClientGroup(f"c{index}", run_id, episodes)
        barrier.wait(_PATIENCE_S)
        group.share.begin = time.monotonic()
        await asyncio.gather(*(group.work(connection, number) for number, connection in enumerate(connections)))
        group.share.finish = time.monotonic()
        await asyncio.gather(*(connection.close() for connection in connections))
        return group.share

    return asyncio.run(main())


class Load:
    """A run on a server, and client processes that use it."""

    def __init__(self, server: ServerProcess, clients: int, processes: int) -> None:
        self._clients = clients
        self._processes = min(processes, clients)
        host, port = server.url.removeprefix("http://").split(":")
        self._address = host, int(port)
        groups = whole_groups(clients) + self._processes
        spec = {
            "batch": {"tasks": groups, "group_size": GROUP_SIZE, "max_pool_episodes": 4 * groups * GROUP_SIZE},
            "sampling": {"max_tokens": 32},
        }
        with server.client() as http:
            self._run_id = http.post("/swarm/v1/runs", json={"spec": spec}).raise_for_status().json()["run_id"]
        self._parts = 0

    def work(self, groups: int) -> list[Share]:
        """Run `groups` more groups of episodes to their end. Raises: RuntimeError when a client process fails."""
        shares = []
        for index in range(self._processes):
            clients = portion(self._clients, self._processes, index)
            episodes = GROUP_SIZE * portion(groups, self._processes, index)
            shares.append((self._parts, self._address, self._run_id, (clients, episodes)))
            self._parts += 1
        return together(run_clients, shares)


def whole_groups(episodes: int) -> int:
    """Smallest number of groups that hold `episodes` episodes."""
    return -(-episodes // GROUP_SIZE)


def summed(shares: list[Share]) -> dict[str, float]:
    """Rate and latencies over all processes."""
    seconds = max(share.finish for share in shares) - min(share.begin for share in shares)
    n = sum(len(share.latencies_s["end"]) for share in shares)
    found: dict[str, float] = {"n": n, "seconds": round(seconds, 2), "per_s": round(n / seconds)}
    for action in ACTIONS:
        cuts = quantiles([1e3 * latency for share in shares for latency in share.latencies_s[action]], n=100)
        found |= {f"{action}_p50_ms": round(cuts[49], 1), f"{action}_p99_ms": round(cuts[98], 1)}
    return found


def level(clients: int, processes: int, episodes: int, state_dir: Path) -> dict[str, float]:
    """Measure a fresh server under `clients` clients at once."""
    with ServerProcess(state_dir, "--log-level", "warning") as server, Memory(server.pid) as memory:
        idle_mb = memory.now_mb()
        found = summed(Load(server, clients, processes).work(whole_groups(episodes)))
    return {"clients": clients} | found | {"rss_idle_mb": round(idle_mb, 1), "rss_peak_mb": round(memory.peak_mb, 1)}


def soak(episodes: int, clients: int, processes: int, state_dir: Path) -> dict[str, float]:
    """Run the soak on one server, in parts of at least one group, and measure memory after each part."""
    groups = max(SOAK_PARTS, whole_groups(episodes))
    with ServerProcess(state_dir, "--log-level", "warning") as server, Memory(server.pid) as memory:
        load, done, warm_mb = Load(server, clients, processes), 0, 0.0
        for part in range(SOAK_PARTS):
            share = summed(load.work(portion(groups, SOAK_PARTS, part)))
            done += int(share["n"])
            now_mb = memory.now_mb()
            warm_mb = warm_mb or now_mb
            pool_mb = sum(file.stat().st_size for file in state_dir.rglob("pool.sqlite*")) / 2**20
            told = {"soak": done, "per_s": share["per_s"], "rss_mb": round(now_mb, 1), "pool_mb": round(pool_mb, 1)}
            print(json.dumps(told), flush=True)
    return {"n": done, "rss_growth_mb": round(now_mb - warm_mb, 1)}


def allow_open_files(wanted: int) -> None:
    """Raise the file limit of this process and its children. Raises: SystemExit when the system's limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (-1, resource.RLIM_INFINITY) and hard < wanted:
        raise SystemExit(
            f"{wanted} open files are needed, the limit is {hard}: raise it (ulimit -Hn), or take fewer --levels"
        )
    if soft not in (-1, resource.RLIM_INFINITY) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=arguments.count, nargs="*", default=LEVELS, help="clients at once")
    parser.add_argument("--processes", type=arguments.count, default=4)
    parser.add_argument(
        "--episodes", type=arguments.count, default=2000, help="at each level at least; two per client where more"
    )
    parser.add_argument("--soak", type=arguments.whole(0), default=100_000, help="episodes; 0 for none")
    args = parser.parse_args()
    allow_open_files(max([*args.levels, SOAK_CLIENTS]) + 512)
    rates: dict[int, float] = {}
    growth = {}
    with tempfile.TemporaryDirectory() as scratch:
        for clients in args.levels:
            episodes = max(args.episodes, 2 * clients)
            found = level(clients, args.processes, episodes, Path(scratch) / f"level-{clients}")
            rates[clients] = found["per_s"]
            print(json.dumps(found), flush=True)
        if args.soak:
            growth = soak(args.soak, SOAK_CLIENTS, args.processes, Path(scratch) / "soak")
    summary = {"bench": "swarm_scale", "n": growth.get("n", 0), "per_s_1000": rates.get(MANY)}
    if {FEW, MANY} <= rates.keys():
        summary["ratio"] = round(rates[MANY] / rates[FEW], 2)
    print(json.dumps(summary | {"rss_growth_mb": growth.get("rss_growth_mb")}))


if __name__ == "__main__":
    sys.exit(run(main))
