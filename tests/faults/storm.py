"""Many episodes through one echo server, while the network between fails and everyone is killed at random.

`python -m tests.faults.storm --episodes 10000 --seed 7 [--folder DIR] [--longest-stall-s 35]` is the long run: one JSON
line, exit code 1 when the count does not come out even. The tests run a short one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from swarm.client import RunSpec
from tests.fakes.proxy import Weather
from tests.faults.balance import Balance, count
from tests.faults.clients import Clients
from tests.faults.host import Host
from tests.faults.player import Part

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
        self._rng = random.Random(plan.seed)
        self._host = Host(folder, plan.seed, plan.weather)
        self._clients = Clients("tests.faults.player", folder, self._rng)

    async def rage(self) -> Balance:
        """Raises: ClientFailed, DidNotStart, TimeoutError when the server does not come to rest."""
        async with self._host as host:
            try:
                run_id = await host.start_run(SPEC)
                self._place_strikes()
                await self._clients.play(self._plan.clients, partial(self._part, run_id))
                await host.restarted()
                host.kill()  # what is acknowledged by now must stand this as well
                await host.restarted()
                async with asyncio.timeout(SETTLE_S):
                    await host.stop_run(run_id)
                    entries = await host.ledger(run_id)
                return count(self._clients.notes(), entries, await host.batches())
            except BaseException as failure:
                failure.add_note(await host.plight())
                raise
            finally:
                await self._clients.end()

    @property
    def met(self) -> dict[str, int]:
        """How often each fault came, and who was killed."""
        met = {str(fault): times for fault, times in sorted(self._host.proxy.met.items())}
        return {**met, "client_kills": self._clients.kills, "server_kills": self._host.kills}

    def _part(self, run_id: str, index: int, life: int) -> Part:
        plan = self._plan
        return Part(
            url=self._host.proxy.url,
            run_id=run_id,
            client_id=f"client-{index}",
            seed=plan.seed * 1000 + life,
            tasks=-(-plan.episodes // (plan.clients * GROUP)),
            concurrency=plan.concurrency,
            idle_limit_s=plan.idle_limit_s,
            call_limit_s=plan.call_limit_s,
            journal=str(self._clients.journal(index)),
        )

    def _place_strikes(self) -> None:
        plan = self._plan
        numbers = range(20, max(60, 3 * plan.episodes))  # an episode is at least three requests
        chosen = self._rng.sample(numbers, plan.client_kills + plan.server_kills)
        for number in chosen[: plan.client_kills]:
            self._host.proxy.strikes[number] = self._clients.kill_one
        for number in chosen[plan.client_kills :]:
            self._host.proxy.strikes[number] = self._host.kill


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
