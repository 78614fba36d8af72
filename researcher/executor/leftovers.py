"""What a researcher that was killed left of a study: clients and servers of this machine, and runs on servers that were given.

Clients elsewhere (Ray jobs) end by themselves once their run does.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from foundation.clock import Clock
from researcher.executor.local_server import LocalLimits
from researcher.executor.processes import Berth
from researcher.executor.servers import server_token
from researcher.store.store import Store
from swarm.client import Patience, SwarmClient
from swarm.protocol.errors import SwarmError


async def end_left_of(store: Store, study_id: str, folder: Path, clock: Clock) -> list[str]:
    """End all that, for whoever owns the study and is not working on it; what servers keep of it stays, so that the study can go on.

    folder: the study's. Servers that were given are asked where it has trials. Returns what could not be ended, in words.
    """
    begun = bool(store.trials(study_id, series=()))
    urls = store.study(study_id).options.get("servers", ()) if begun else ()
    for locks in ("trials/*/*/*/lock", "server*/process/lock"):
        berths = [Berth(lock.parent, clock) for lock in await asyncio.to_thread(_found, folder, locks)]
        await asyncio.gather(*(berth.end(LocalLimits().grace_s) for berth in berths))
    told = await asyncio.gather(*(_stop_run(url, study_id, clock) for url in dict.fromkeys(urls)))
    return [each for each in told if each is not None]


def _found(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))


async def _stop_run(url: str, study_id: str, clock: Clock) -> str | None:
    """Have the study's run on this server come to rest with a checkpoint; anybody else's goes on."""
    once = Patience(connect_s=0.0, later_s=0.0)
    async with SwarmClient(url, server_token(os.environ), patience=once, clock=clock) as swarm:
        try:
            run_id = (await swarm.status()).run_id
            if run_id is not None and (await swarm.run(run_id)).spec.labels.get("study") == study_id:
                await swarm.stop_run(run_id)
        except SwarmError as error:
            return f"a run of it may go on at {url} ({error}): `swarm run stop --url {url}` ends it"
    return None
