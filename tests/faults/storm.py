"""Many episodes, or teams over two servers, while networks fail and clients and servers are killed at random.

`python -m tests.faults.storm --episodes 10000 --seed 7 [--folder DIR] [--longest-stall-s 35]`, or `--teams 1000`, is the long run: one
JSON line, exit code 1 when the count does not come out even. The tests run short ones.
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
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from swarm.client import RunSpec
from tests.fakes.proxy import Weather
from tests.faults.balance import Balance, Side, count
from tests.faults.clients import Clients, Part
from tests.faults.host import Host
from tests.faults.team_balance import TeamBalance, count_teams

SETTLE_S = 300.0
Counted = TypeVar("Counted", bound="Balance | TeamBalance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Generic[Counted]):
    """What is played, and how bad it gets. Kills fall on requests chosen by the seed."""

    seed: int
    player: str
    """The module of a client."""
    sides: tuple[str, ...]
    """The servers' names; the first one decides for teams."""
    count: Callable[[Sequence[dict[str, Any]], Sequence[Side]], Counted]
    played: int
    requests: int
    """That one of those played makes to each server, at least."""
    group: int
    clients: int
    concurrency: int
    client_kills: int
    server_kills: int
    """Of each server."""
    weather: Weather


def episodes(number: int, seed: int, longest_stall_s: float = 2.0) -> Plan[Balance]:
    return Plan(
        seed=seed,
        player="tests.faults.player",
        sides=("server",),
        count=count,
        played=number,
        requests=3,
        group=4,
        clients=3 if number < 1000 else 12,  # a client makes its claims in order: one that stalls holds up the rest
        concurrency=6,
        client_kills=max(4, number // 150),
        server_kills=max(3, number // 400),
        weather=replace(Weather(), longest_stall_s=longest_stall_s),
    )


def teams(number: int, seed: int, longest_stall_s: float = 2.0) -> Plan[TeamBalance]:
    return Plan(
        seed=seed,
        player="tests.faults.team_player",
        sides=("one", "other"),
        count=count_teams,
        played=number,
        requests=4,
        group=2,
        clients=2 if number < 200 else 6,
        concurrency=4,
        client_kills=max(3, number // 50),
        server_kills=max(2, number // 100),
        weather=replace(Weather(), longest_stall_s=longest_stall_s),
    )


class Storm(Generic[Counted]):
    """One run of a plan in one folder."""

    def __init__(self, plan: Plan[Counted], folder: Path) -> None:
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._hosts = [Host(folder / side, plan.seed + at, plan.weather) for at, side in enumerate(plan.sides)]
        self._clients = Clients(plan.player, folder, self._rng)

    async def rage(self) -> Counted:
        """Raises: ClientFailed, DidNotStart, TimeoutError when the servers do not come to rest."""
        async with AsyncExitStack() as stack:
            for host in self._hosts:
                await stack.enter_async_context(host)
            try:
                spec = _spec(self._plan.group)
                run_ids = [await host.start_run(spec) for host in self._hosts]
                self._place_strikes()
                await self._clients.play(self._plan.clients, partial(self._part, run_ids))
                for host in self._hosts:  # what is acknowledged by now must stand this as well
                    await host.restarted()
                    host.kill()
                    await host.restarted()
                return self._plan.count(self._clients.notes(), await self._settled(run_ids))
            except BaseException as failure:
                for host in self._hosts:
                    failure.add_note(await host.plight())
                raise
            finally:
                await self._clients.end()

    @property
    def met(self) -> dict[str, int]:
        """How often each fault came on any way, and who was killed."""
        faults = sum((host.proxy.met for host in self._hosts), Counter[str]())
        kills = {f"kills_of_{side}": host.kills for side, host in zip(self._plan.sides, self._hosts, strict=True)}
        return {**{str(fault): n for fault, n in sorted(faults.items())}, "client_kills": self._clients.kills, **kills}

    async def _settled(self, run_ids: list[str]) -> list[Side]:
        async with asyncio.timeout(SETTLE_S):
            for host, run_id in zip(self._hosts, run_ids, strict=True):
                await host.stop_run(run_id)
            ledgers = [await host.ledger(run_id) for host, run_id in zip(self._hosts, run_ids, strict=True)]
        return [Side(entries, await host.batches()) for entries, host in zip(ledgers, self._hosts, strict=True)]

    def _part(self, run_ids: list[str], index: int, life: int) -> Part:
        plan = self._plan
        return Part(
            urls=[host.proxy.url for host in self._hosts],
            run_ids=run_ids,
            client_id=f"client-{index}",
            seed=plan.seed * 1000 + life,
            tasks=-(-plan.played // (plan.clients * plan.group)),
            of_each=plan.group,
            concurrency=plan.concurrency,
            journal=str(self._clients.journal(index)),
        )

    def _place_strikes(self) -> None:
        plan = self._plan
        for host in self._hosts:
            numbers = range(20, max(60, plan.requests * plan.played))
            chosen = self._rng.sample(numbers, plan.client_kills + plan.server_kills)
            for number in chosen[: plan.client_kills]:
                host.proxy.strikes[number] = self._clients.kill_one
            for number in chosen[plan.client_kills :]:
                host.proxy.strikes[number] = host.kill


def _spec(group: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "batch": {"tasks": 4, "group_size": group, "group_patience_s": 5.0},
            "sampling": {"max_tokens": 64},
            "checkpoint": {"every_steps": 3},
            "limits": {"drain_limit_s": 10.0},
        }
    )


def main() -> int:
    """The long run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--episodes", type=int, default=10_000)
    what.add_argument("--teams", type=int)
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    parser.add_argument("--longest-stall-s", type=float, default=35.0)
    parser.add_argument("--folder", type=Path, help="kept; without it a temporary one is removed when all is well")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # either ends it in good order: nobody is left running
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    folder = args.folder or Path(tempfile.mkdtemp(prefix="storm-"))
    folder.mkdir(parents=True, exist_ok=True)
    if args.teams is None:
        return _long(Storm(episodes(args.episodes, seed, args.longest_stall_s), folder), args, seed, folder)
    return _long(Storm(teams(args.teams, seed, args.longest_stall_s), folder), args, seed, folder)


def _long(storm: Storm[Counted], args: argparse.Namespace, seed: int, folder: Path) -> int:
    began = time.monotonic()
    balance = asyncio.run(storm.rage())
    played = {"episodes": args.episodes} if args.teams is None else {"teams": args.teams}
    told = {"seed": seed, **played, "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps({**told, **storm.met, **asdict(balance)}))  # noqa: T201 - a command's answer
    if args.folder is None and not balance.faults:
        shutil.rmtree(folder)
    return 1 if balance.faults else 0


if __name__ == "__main__":
    sys.exit(main())
