"""The orchestrator that owns a study: its name, whether it is alive, and its lease, which is renewed while it works."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator

from foundation.clock import Clock
from researcher.executor.processes import started_at
from researcher.store.errors import LeaseHeld
from researcher.store.store import Store
from researcher.store.transactions import owned_resource

LEASE_S = 60.0
_RENEW_S = 15.0


def this_process() -> str:
    """Return a unique name of this process: `host/pid/start`."""
    return f"{socket.gethostname()}/{os.getpid()}/{started_at(os.getpid())}"


def is_dead(owner: str) -> bool:
    """Return whether an owner is known to be dead. We cannot know that of a process on another machine: its lease has to expire."""
    return _lives(owner) is False


def lives_here(owner: str) -> bool:
    """Return whether the owner is a live process on this machine, even if its lease has expired."""
    return _lives(owner) is True


def _lives(owner: str) -> bool | None:
    """Return whether the process is alive; None if it is on another machine."""
    host, _, pid = owner.rpartition("/")[0].rpartition("/")
    if host != socket.gethostname() or not pid.isdigit():
        return None
    return str(started_at(int(pid))) == owner.rpartition("/")[2]


def living_owner(store: Store, study_id: str, now: float) -> str | None:
    """Return the study's owner if it is alive, else None."""
    lease = store.leases.holder(study_id)
    return None if lease is None or is_dead(lease.owner) or lease.expires_at < now else lease.owner


@contextlib.asynccontextmanager
async def owned(store: Store, study_id: str, clock: Clock) -> AsyncIterator[Store]:
    """Hold and renew the study's lease, and give its owner the store. Cancels the body when the lease is lost.

    Raises: LeaseHeld when a live process owns the study; LeaseSuperseded (or another StoreError) when the lease was lost.
    """
    token = _acquire(store, study_id)
    working = asyncio.current_task()
    renewing = asyncio.create_task(_renew(store, study_id, token, clock))

    def give_up(task: asyncio.Task[None]) -> None:
        if working is not None and not task.cancelled():
            working.cancel()

    renewing.add_done_callback(give_up)
    try:
        yield store.fenced(study_id, token)
    except asyncio.CancelledError:
        if renewing.done() and not renewing.cancelled():
            renewing.result()
        raise
    finally:
        renewing.cancel()
        store.leases.release(study_id, token)


@contextlib.contextmanager
def owned_now(store: Store, study_id: str) -> Iterator[Store]:
    """Hold the lease for a short write, like `owned` but without renewing it."""
    token = _acquire(store, study_id)
    try:
        yield store.fenced(study_id, token)
    finally:
        store.leases.release(study_id, token)


@contextlib.contextmanager
def owned_at_rest(store: Store, study_id: str) -> Iterator[Store]:
    """Like `owned_now`, but a live owner on this machine keeps the study: the lease of a suspended or slow process may have expired.

    Raises: LeaseHeld.
    """
    holder = store.leases.holder(study_id)
    if holder is not None and lives_here(holder.owner):
        raise LeaseHeld(owned_resource(study_id), holder.owner, max(0.0, holder.expires_at - time.time()))
    with owned_now(store, study_id) as own:
        yield own


def _acquire(store: Store, study_id: str) -> int:
    holder = store.leases.holder(study_id)
    dead = holder.owner if holder is not None and is_dead(holder.owner) else None
    return store.leases.acquire(study_id, this_process(), LEASE_S, dead_owner=dead)


async def _renew(store: Store, study_id: str, token: int, clock: Clock) -> None:
    while True:
        await clock.sleep(_RENEW_S)
        await asyncio.to_thread(store.leases.renew, study_id, token, LEASE_S)
