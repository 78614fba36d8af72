"""The servers that a person gives with `--server`, before a study begins on them: enough for a trial, and ours to use."""

from __future__ import annotations

import asyncio
import os

from foundation.commandline import UsageError
from researcher.executor.servers import server_token
from researcher.models import Plan
from swarm.client import Forbidden, Patience, SwarmClient, SwarmError, Unauthorized


def check_servers(plan: Plan, urls: list[str]) -> None:
    """Raises: UsageError when servers are given and too few for one trial, or when one refuses our token."""
    given, needed = len({url.rstrip("/") for url in urls}), 1 + len(plan.roles)
    if 0 < given < needed:
        models = ", ".join(["its own model", *plan.roles])
        raise UsageError(
            f"a trial of {plan.instrument} takes {needed} servers at once ({models}), {given} given: repeat --server, in "
            "this order; or give none, and they are started on this machine"
        )
    asyncio.run(_check_tokens(urls))


async def _check_tokens(urls: list[str]) -> None:
    await asyncio.gather(*map(_check_token, urls))


async def _check_token(url: str) -> None:
    """One that is away is waited for later."""
    async with SwarmClient(url, server_token(os.environ), patience=Patience(connect_s=0.0, later_s=0.0)) as swarm:
        try:
            await swarm.status()
        except (Unauthorized, Forbidden) as refusal:
            raise UsageError(f"{url}: {refusal}") from refusal
        except SwarmError:
            return
