"""How many episodes per second can one server grant and close durably?

32 clients in several processes, each with its own keep-alive connection (HTTP/1.1 over asyncio streams; a client costs a few
hundredths of a millisecond, so the bench measures the server). Three phases, with barriers between them:

    claim   every client claims its episodes, one after the other           timed
    call    three calls of each through /v1/chat/completions, echo engine   not timed
    end     every client ends its episodes, one after the other             timed

The server answers a claim or an end with 200 after it has fsync'd the commit. per_s is episodes / (claim seconds + end seconds),
each phase from the first client's start to the last client's end, by one system-wide clock. ratio is per_s over that of a single
client, measured first on a server of its own: the gain when many clients share a commit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import quantiles

from bench.command import run
from bench.connection import Connection
from bench.crowd import portion, together
from bench.serving import ServerProcess
from foundation.arguments import count, whole

PHASES = ("claim", "call", "end")
GROUP_SIZE = 8
CALLS = 3


@dataclass(slots=True)
class Episode:
    path: str
    lease: str
    api_key: str


@dataclass(slots=True)
class PhaseTimes:
    """Start and end of a phase in this process (seconds, system-wide clock), and the latency of each request."""

    begin: float = 0.0
    finish: float = 0.0
    latencies_s: list[float] = field(default_factory=list)


class Client:
    """One of the 32: claims, calls and ends its own episodes in turn."""

    def __init__(self, name: str, connection: Connection, run_id: str, episodes: int) -> None:
        self.name = name
        self.connection = connection
        self._run_id = run_id
        self._count = episodes
        self._open: list[Episode] = []

    async def claim(self, latencies_s: list[float]) -> None:
        for number in range(self._count):
            body = {
                "run_id": self._run_id,
                "client_id": self.name,
                "task_id": f"{self.name}-{number // GROUP_SIZE}",
                "idle_limit_s": 600,
                "idempotency_key": f"{self.name}-{number}",
            }
            began = time.monotonic()
            grant = await self.connection.post("/swarm/v1/episodes:claim", body)
            latencies_s.append(time.monotonic() - began)
            self._open.append(Episode(f"/swarm/v1/episodes/{grant['episode_id']}", grant["lease"], grant["api_key"]))

    async def call(self, latencies_s: list[float]) -> None:
        for number, episode in enumerate(self._open):
            messages = [{"role": "user", "content": f"Think about sum {number}, then answer with the number 42"}]
            for _ in range(CALLS):
                body = {"model": "echo", "messages": messages, "max_tokens": 32}
                began = time.monotonic()
                answer = await self.connection.post("/v1/chat/completions", body, episode.api_key)
                latencies_s.append(time.monotonic() - began)
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "Once more: 42"}]

    async def end(self, latencies_s: list[float]) -> None:
        for number, episode in enumerate(self._open):
            body = {"lease": episode.lease, "reward": float(number % 2), "metrics": {"turns": CALLS}}
            began = time.monotonic()
            await self.connection.post(f"{episode.path}:end", body)
            latencies_s.append(time.monotonic() - began)


def run_clients(
    index: int, address: tuple[str, int], run_id: str, counts: tuple[int, int], barrier: Barrier
) -> dict[str, PhaseTimes]:
    """One client process. counts: number of its clients, and of episodes per client."""

    async def main() -> dict[str, PhaseTimes]:
        clients, episodes = counts
        connections = [await Connection.open(*address) for _ in range(clients)]
        players = [Client(f"c{index}-{number}", each, run_id, episodes) for number, each in enumerate(connections)]
        phases: tuple[Callable[[Client, list[float]], Awaitable[None]], ...] = (Client.claim, Client.call, Client.end)
        times = {}
        for name, phase in zip(PHASES, phases, strict=True):
            spent = times[name] = PhaseTimes()
            barrier.wait()
            spent.begin = time.monotonic()
            await asyncio.gather(*(phase(client, spent.latencies_s) for client in players))
            spent.finish = time.monotonic()
        for connection in connections:
            await connection.close()
        return times

    return asyncio.run(main())


def measure(server: ServerProcess, clients: int, processes: int, episodes: int) -> dict[str, dict[str, float]]:
    """Seconds and latencies by phase, over all processes."""
    total = clients * episodes
    groups = clients * -(-episodes // GROUP_SIZE)
    with server.client() as http:
        spec = {
            "batch": {"tasks": groups + 1, "group_size": GROUP_SIZE, "max_pool_episodes": 10 * total},
            "sampling": {"max_tokens": 32},
        }
        created = http.post("/swarm/v1/runs", json={"spec": spec}).raise_for_status()
        run_id = created.json()["run_id"]
    host, port = server.url.removeprefix("http://").split(":")
    shares = [
        (index, (host, int(port)), run_id, (portion(clients, processes, index), episodes)) for index in range(processes)
    ]
    gathered: list[dict[str, PhaseTimes]] = together(run_clients, shares)
    return {name: _summed([times[name] for times in gathered]) for name in PHASES}


def _summed(times: list[PhaseTimes]) -> dict[str, float]:
    latencies_ms = [1e3 * latency for part in times for latency in part.latencies_s]
    cuts = quantiles(latencies_ms, n=100)
    seconds = max(part.finish for part in times) - min(part.begin for part in times)
    return {
        "n": len(latencies_ms),
        "seconds": round(seconds, 3),
        "per_s": round(len(latencies_ms) / seconds),
        "p50_ms": round(cuts[49], 2),
        "p99_ms": round(cuts[98], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=count, default=32)
    parser.add_argument(
        "--processes", type=count, default=4, help="that the clients are in; no more than there are clients"
    )
    parser.add_argument("--episodes", type=whole(2), default=128, help="per client")
    parser.add_argument("--state-dir", type=Path, help="default: a fresh folder in the temporary directory")
    args = parser.parse_args()
    processes = min(args.processes, args.clients)
    with tempfile.TemporaryDirectory() as scratch:
        with ServerProcess(Path(scratch) / "alone", "--log-level", "warning") as server:
            alone = timed(measure(server, 1, 1, args.episodes))
        with ServerProcess(args.state_dir or Path(scratch) / "state", "--log-level", "warning") as server:
            phases = measure(server, args.clients, processes, args.episodes)
    for name in PHASES:
        print(json.dumps({"phase": name, **phases[name]}))
    n = args.clients * args.episodes
    seconds = timed(phases)
    rates = {"per_s": round(n / seconds), "alone_per_s": round(args.episodes / alone)}
    summary = {"bench": "episode_end", "n": n, "seconds": round(seconds, 3)} | rates
    summary |= {"ratio": round(n / seconds * alone / args.episodes, 2)}
    print(json.dumps(summary | {"clients": args.clients, "processes": processes, "calls_per_episode": CALLS}))


def timed(phases: dict[str, dict[str, float]]) -> float:
    """Total seconds of the timed phases."""
    return phases["claim"]["seconds"] + phases["end"]["seconds"]


if __name__ == "__main__":
    sys.exit(run(main))
