"""One orchestrator owns a study: who that is, whether it still lives, and a lease that is renewed while it works."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

from foundation.clock import Clock
from researcher.executor.processes import started_at
from researcher.store.errors import LeaseHeld
from researcher.store.store import Store

LEASE_S = 60.0
_RENEW_S = 15.0


def this_process() -> str:
    """`host/pid/start`: names this process for good."""
    return f"{socket.gethostname()}/{os.getpid()}/{started_at(os.getpid())}"


def is_dead(owner: str) -> bool:
    """Whether an owner is known to be gone. One on another machine never is: its lease has to run out."""
    host, _, rest = owner.rpartition("/")[0].rpartition("/")
    pid, start = rest, owner.rpartition("/")[2]
    if host != socket.gethostname() or not pid.isdigit():
        return False
    return str(started_at(int(pid))) != start


@contextlib.asynccontextmanager
async def owned(store: Store, study_id: str, clock: Clock) -> AsyncIterator[Store]:
    """The store for the study's owner, while the lease is held and renewed. The body is cancelled when the lease is lost.

    Raises: LeaseHeld when a living process owns the study.
    """
    holder = store.lease(study_id)
    dead = holder.owner if holder is not None and is_dead(holder.owner) else None
    token = store.acquire_lease(study_id, this_process(), LEASE_S, dead_owner=dead)
    try:
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(_renew(store, study_id, token, clock))
            yield store.fenced(study_id, token)
            renewing.cancel()
    finally:
        store.release_lease(study_id, token)


async def _renew(store: Store, study_id: str, token: int, clock: Clock) -> None:
    while True:
        await clock.sleep(_RENEW_S)
        await asyncio.to_thread(store.renew_lease, study_id, token, LEASE_S)


__all__ = ["LEASE_S", "LeaseHeld", "is_dead", "owned", "this_process"]
