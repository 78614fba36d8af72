"""One echo server in a storm: behind a faulty proxy, killed and started again in its folder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self

import httpx

from bench.serving import ServerProcess
from swarm.client import Patience, RunSpec, SwarmClient
from swarm.protocol.episodes import LedgerEntry
from tests.fakes.proxy import CALM, FaultyProxy, Weather
from tests.faults.balance import batches_of

ARGUMENTS = ("--log-level", "warning", "--echo-tokens-per-s", "1000")
AT_ONCE = Patience(connect_s=0.0, later_s=0.0)


class Host:
    """Use as an async context manager; nothing is left running. Clients see `proxy.url`."""

    def __init__(self, folder: Path, seed: int, weather: Weather) -> None:
        self.proxy = FaultyProxy(seed, weather)
        self.kills = 0
        self._folder = folder
        self._server: ServerProcess | None = None
        self._restarting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.proxy.__aenter__()
        await self._start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        try:
            await self.restarted()
            if self._server is not None and self._server.process.poll() is None:
                await asyncio.to_thread(self._server.kill)
        finally:
            await self.proxy.__aexit__(*exception)

    @property
    def url(self) -> str:
        """The server's own, past the proxy."""
        assert self._server is not None
        return self._server.url

    async def plight(self) -> str:
        """How things stand with the server, for whoever has to find out why a storm did not pass."""
        starting = self._restarting is not None and not self._restarting.done()
        said = self._server.log_path.read_text()[-2000:] if self._server is not None else ""
        try:
            async with asyncio.timeout(5.0), SwarmClient(self.url, client_id="storm", patience=AT_ONCE) as swarm:
                status = (await swarm.status()).model_dump_json()
        except Exception as error:  # noqa: BLE001 - told beside the failure that is looked into
            status = repr(error)
        return f"the server, {self.kills} kills later (being started: {starting}): {status}\nits log: {said}"

    def kill(self) -> None:
        """SIGKILL, and a start; nothing while it is being started anyway."""
        if self._server is None or (self._restarting is not None and not self._restarting.done()):
            return
        self.proxy.target = None
        self._server.kill()
        self.kills += 1
        self._restarting = asyncio.create_task(self._start())

    async def restarted(self) -> None:
        """Raises: DidNotStart."""
        if self._restarting is not None:
            await self._restarting

    async def start_run(self, spec: RunSpec) -> str:
        async with SwarmClient(self.url, client_id="storm") as swarm:
            return (await swarm.start_run(spec)).run_id

    async def stop_run(self, run_id: str) -> None:
        """The storm is over."""
        self.proxy.weather = CALM
        self.proxy.strikes.clear()
        async with SwarmClient(self.url, client_id="storm") as swarm:
            await swarm.stop_run(run_id)

    async def ledger(self, run_id: str) -> list[LedgerEntry]:
        """The whole of it, once the run is stopped and nothing runs or is prepared any more."""
        async with SwarmClient(self.url, client_id="storm") as swarm:
            async for status in swarm.statuses(wait_s=1.0):
                if status.phase == "idle" and not status.pool.running and not status.pool.prepared:
                    break
            return [entry async for entry in swarm.ledger(run_id=run_id)]

    async def batches(self) -> dict[int, list[str]]:
        """Stops the server; then what its pool says of the steps."""
        assert self._server is not None
        await asyncio.to_thread(self._server.stop)
        (pool,) = (self._folder / "state").rglob("pool.sqlite")
        return batches_of(pool)

    async def _start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        self._server = await asyncio.to_thread(ServerProcess, self._folder / "state", *ARGUMENTS)
        self.proxy.target = httpx.URL(self._server.url).port
