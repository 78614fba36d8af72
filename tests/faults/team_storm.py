"""Many teams over two echo servers, while both networks fail and clients and servers are killed at random.

`python -m tests.faults.team_storm --teams 1000 --seed 7 [--folder DIR] [--longest-stall-s 35]` is the long run: one JSON line,
exit code 1 when a team counts on one server and not on the other. The tests run a short one.
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
from tests.faults.clients import Clients
from tests.faults.host import Host
from tests.faults.team_balance import SIDES, Side, TeamBalance, count_teams
from tests.faults.team_player import TeamPart

GROUP = 2
SETTLE_S = 300.0
SPEC = RunSpec.model_validate(
    {
        "batch": {"tasks": 4, "group_size": GROUP, "group_patience_s": 5.0},
        "sampling": {"max_tokens": 64},
        "checkpoint": {"every_steps": 3},
        "limits": {"drain_limit_s": 10.0},
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamPlan:
    """How bad it gets. Kills fall on requests chosen by the seed."""

    teams: int
    seed: int
    clients: int
    concurrency: int = 4
    client_kills: int
    server_kills: int
    """Of each of the two."""
    weather: Weather
    idle_limit_s: float = 5.0
    call_limit_s: float = 10.0
    patience_s: float = 4.0

    @classmethod
    def of(cls, teams: int, seed: int, longest_stall_s: float = 2.0) -> TeamPlan:
        return cls(
            teams=teams,
            seed=seed,
            clients=2 if teams < 200 else 6,
            client_kills=max(3, teams // 50),
            server_kills=max(2, teams // 100),
            weather=replace(Weather(), longest_stall_s=longest_stall_s),
        )


class TeamStorm:
    """One run of a plan in one folder."""

    def __init__(self, plan: TeamPlan, folder: Path) -> None:
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._hosts = [Host(folder / side, plan.seed + at, plan.weather) for at, side in enumerate(SIDES)]
        self._clients = Clients("tests.faults.team_player", folder, self._rng)

    async def rage(self) -> TeamBalance:
        """Raises: ClientFailed, DidNotStart, TimeoutError when the servers do not come to rest."""
        one, other = self._hosts
        async with one, other:
            try:
                run_ids = [await host.start_run(SPEC) for host in self._hosts]
                self._place_strikes()
                await self._clients.play(self._plan.clients, partial(self._part, run_ids))
                for host in self._hosts:  # what is known to count by now must stand this as well
                    await host.restarted()
                    host.kill()
                    await host.restarted()
                return count_teams(self._clients.notes(), await self._settled(run_ids))
            finally:
                await self._clients.end()

    @property
    def met(self) -> dict[str, int]:
        """How often each fault came on either way, and who was killed."""
        faults = self._hosts[0].proxy.met + self._hosts[1].proxy.met
        kills = {f"kills_of_{side}": host.kills for side, host in zip(SIDES, self._hosts, strict=True)}
        return {**{str(fault): n for fault, n in sorted(faults.items())}, "client_kills": self._clients.kills, **kills}

    async def _settled(self, run_ids: list[str]) -> list[Side]:
        async with asyncio.timeout(SETTLE_S):
            for host, run_id in zip(self._hosts, run_ids, strict=True):
                await host.stop_run(run_id)
            ledgers = [await host.ledger(run_id) for host, run_id in zip(self._hosts, run_ids, strict=True)]
        return [Side(entries, await host.batches()) for entries, host in zip(ledgers, self._hosts, strict=True)]

    def _part(self, run_ids: list[str], index: int, life: int) -> TeamPart:
        plan = self._plan
        return TeamPart(
            urls=[host.proxy.url for host in self._hosts],
            run_ids=run_ids,
            client_id=f"client-{index}",
            seed=plan.seed * 1000 + life,
            tasks=-(-plan.teams // (plan.clients * GROUP)),
            of_each=GROUP,
            concurrency=plan.concurrency,
            idle_limit_s=plan.idle_limit_s,
            call_limit_s=plan.call_limit_s,
            patience_s=plan.patience_s,
            journal=str(self._clients.journal(index)),
        )

    def _place_strikes(self) -> None:
        plan = self._plan
        for host in self._hosts:
            numbers = range(20, max(60, 4 * plan.teams))  # a team is at least four requests to each
            chosen = self._rng.sample(numbers, plan.client_kills + plan.server_kills)
            for number in chosen[: plan.client_kills]:
                host.proxy.strikes[number] = self._clients.kill_one
            for number in chosen[plan.client_kills :]:
                host.proxy.strikes[number] = host.kill


def main() -> int:
    """The long run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teams", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    parser.add_argument("--longest-stall-s", type=float, default=35.0)
    parser.add_argument("--folder", type=Path, help="kept; without it a temporary one is removed when all is well")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # either ends it in good order: nobody is left running
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    folder = args.folder or Path(tempfile.mkdtemp(prefix="team-storm-"))
    folder.mkdir(parents=True, exist_ok=True)
    storm, began = TeamStorm(TeamPlan.of(args.teams, seed, args.longest_stall_s), folder), time.monotonic()
    balance = asyncio.run(storm.rage())
    told = {"seed": seed, "teams": args.teams, "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps({**told, **storm.met, **asdict(balance)}))  # noqa: T201 - a command's answer
    if args.folder is None and not balance.faults:
        shutil.rmtree(folder)
    return 1 if balance.faults else 0


if __name__ == "__main__":
    sys.exit(main())
