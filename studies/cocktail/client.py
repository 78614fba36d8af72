"""One family as a client process of its own: `python -m studies.cocktail.client sums --url http://127.0.0.1:8642`.

Works on the server's current run until it is over. Any interpreter will do that has the swarm client and the family's own
libraries, so each family may live in its own virtual environment. The token comes from SWARM_TOKEN.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import asdict

from swarm.client import RolloutReport, SwarmClient, SwarmError

from .families import FAMILIES


async def work(family_name: str, url: str, *, seed: int, concurrency: int, run_id: str | None) -> RolloutReport:
    """Until the run is over. Raises: SwarmError."""
    family = FAMILIES[family_name]
    try:
        async with SwarmClient(
            url, os.environ.get("SWARM_TOKEN") or None, client_id=f"cocktail:{family.name}"
        ) as swarm:
            return await swarm.run_tasks(
                family.tasks("train", seed), family.rollout, mix=family.name, concurrency=concurrency, run_id=run_id
            )
    finally:
        await family.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Work on one family of the cocktail.", allow_abbrev=False)
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("--url", required=True, help="the swarm server")
    parser.add_argument("--run-id", help="default: the server's current run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=8)
    args = parser.parse_args()
    try:
        report = asyncio.run(
            work(args.family, args.url, seed=args.seed, concurrency=args.concurrency, run_id=args.run_id)
        )
    except SwarmError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps({"family": args.family, **asdict(report)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
