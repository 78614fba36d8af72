"""The lease on a server, while the records cannot be written for a moment."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from bench.serving import ServerProcess
from foundation.clock import ManualClock
from researcher.executor.servers import PoolLimits, Server, ServerPool
from researcher.store.errors import LeaseHeld, StorageFailed
from researcher.store.store import Store
from swarm.client import SwarmClient

pytestmark = pytest.mark.anyio
URL = "http://127.0.0.1:9"


async def test_a_lease_is_renewed_again_after_a_disk_that_was_full_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    store = Store.open(f"sqlite:///{tmp_path}/r.db", clock=clock)
    renew, failures, asked = store.leases.renew_server, [StorageFailed("database or disk is full")], threading.Event()

    def renewed(url: str, token: int, ttl_s: float) -> None:
        asked.set()
        if failures:
            raise failures.pop()
        renew(url, token, ttl_s)

    monkeypatch.setattr(store.leases, "renew_server", renewed)
    pool = ServerPool(store, "study st-1", urls=[URL], clock=clock, limits=PoolLimits(lease_s=60))
    swarm = SwarmClient(URL, None, client_id="st-1", clock=clock)
    server = Server(URL, swarm, store.leases.acquire_server(URL, "study st-1", 60), owned=False)
    keeping = asyncio.create_task(pool._keep_lease(server))
    for _ in range(5):
        asked.clear()
        await asyncio.sleep(0.05)  # it rests on the clock
        clock.advance(20)
        await asyncio.to_thread(asked.wait)
    await asyncio.sleep(0.05)
    with pytest.raises(LeaseHeld):  # still ours after 100 s: nobody else sends runs there
        store.leases.acquire_server(URL, "study st-2", 60)
    assert server.unfit is None
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await swarm.close()
    store.close()


async def test_a_server_whose_lease_cannot_be_kept_for_a_reason_that_nobody_foresaw_is_unfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, seen = Store.open(f"sqlite:///{tmp_path}/r.db"), threading.Event()

    def renewed(url: str, token: int, ttl_s: float) -> None:
        seen.set()
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(store.leases, "renew_server", renewed)
    with ServerProcess(tmp_path / "a") as process:
        async with ServerPool(store, "study st-1", urls=[process.url], limits=PoolLimits(lease_s=0.3)) as pool:
            await asyncio.to_thread(seen.wait)
            for _ in range(20):  # until the loop has heard of it
                await asyncio.sleep(0.01)
            assert pool.sites() == []
            assert pool.reasons() == f"{process.url}: RuntimeError: nobody thought of this"
    store.close()


async def test_a_server_that_cannot_be_given_back_keeps_no_other_from_being_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/r.db")
    release = store.leases.release_server

    def released(url: str, token: int) -> None:
        if url == first.url:
            raise StorageFailed("database or disk is full")
        release(url, token)

    monkeypatch.setattr(store.leases, "release_server", released)
    with ServerProcess(tmp_path / "a") as first, ServerProcess(tmp_path / "b") as second:
        pool = ServerPool(store, "study st-1", urls=[second.url, first.url, second.url])
        await pool.open()
        with pytest.raises(StorageFailed):
            await pool.close()
        assert pool.servers == []
    assert store.leases.server_holder(second.url) is None
    assert store.leases.server_holder(first.url) is not None
    store.close()
