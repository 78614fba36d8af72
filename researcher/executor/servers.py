"""The server pool: which swarm servers a study may use, who has leased them, and whether they can be used.

Servers are leased in SQL, so that two studies never send runs to the same one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from foundation.clock import Clock, SystemClock
from foundation.commandline import UsageError
from researcher.executor.errors import NoServersLeft, ServerUnfit
from researcher.executor.local_server import LocalLimits, LocalProcess, LocalServer
from researcher.store.errors import DatabaseAway, LeaseHeld, LeaseSuperseded, StorageFailed
from researcher.store.store import Store
from researcher.study.plan import Plan, PlanModel
from swarm.client import Patience, ServerUnreachable, SwarmClient
from swarm.client.wire import checked_token
from swarm.protocol.errors import SwarmError
from swarm.protocol.status import Phase, ServerStatus

_log = logging.getLogger(__name__)
_KNOCK_S = 0.5
"""Interval at which to try a server that does not answer yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Time limits of a server pool, in seconds.

    Attributes:
        lease_s: duration of a server's lease, which is renewed in time.
        boot_s: how long a server may take to boot.
        first_answer_s: how long a given server may stay silent at the start of a study.
        told_s: interval between messages about a silent server.
        unreachable_s: how long a server may stay silent later, before it counts as lost.
    """

    lease_s: float = 60.0
    boot_s: float = 900.0
    first_answer_s: float = 30.0
    told_s: float = 5.0
    unreachable_s: float = 60.0
    local: LocalLimits = field(default_factory=LocalLimits)


class Server:
    """One server that a study has leased. `unfit` says why it can no longer be used."""

    def __init__(self, url: str, swarm: SwarmClient, lease: int, *, owned: bool, runs: Path | None = None) -> None:
        self.url = url
        self.swarm = swarm
        self.lease = lease
        self.owned = owned
        """Whether this study started it, so that it hosts nobody else's runs."""
        self._runs = runs
        """Folder of its runs' checkpoints, which are deleted when the next run begins; None keeps them."""
        self.status: ServerStatus | None = None
        """Its status when `ready` last succeeded; None before that."""
        self.unfit: str | None = None

    def hosts(self, model: PlanModel) -> bool:
        """Return whether the server has reported that it hosts the model."""
        found = self.status
        return found is not None and model.is_hosted(found.model, found.model_fingerprint, found.engine.backend)

    def check(self) -> None:
        """Raise ServerUnfit if the server can no longer be used."""
        if self.unfit is not None:
            raise ServerUnfit(f"{self.url}: {self.unfit}", self.url)

    async def discard_runs_before(self, run_id: str) -> None:
        """Delete the checkpoints of older runs: a server can only resume its newest run."""
        if self._runs is not None:
            older = [folder for folder in self._runs.glob("*") if folder.name != run_id]
            for folder in older:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def ready(self, clock: Clock, limit_s: float) -> ServerStatus:
        """Wait until the server has booted, and return its status. Raises: ServerUnfit when it fails or takes too long."""
        deadline = clock.monotonic() + limit_s
        try:
            async for status in self.swarm.statuses(wait_s=10.0):
                self.check()
                if status.phase is Phase.FAILED:
                    reason = status.failed.reason if status.failed else "its engine failed"
                    raise ServerUnfit(f"{self.url}: {reason}", self.url)
                if status.phase is not Phase.BOOTING:
                    self.status = status
                    return status
                if clock.monotonic() >= deadline:
                    break
        except SwarmError as error:
            named = isinstance(error, ServerUnreachable)
            raise ServerUnfit(str(error) if named else f"{self.url}: {error}", self.url) from error
        raise ServerUnfit(f"{self.url} has been booting for {limit_s:.0f} s; look at its log", self.url)


@dataclass(frozen=True, slots=True)
class Site:
    """The servers of one trial: the main one, and one for each further role."""

    main: Server
    beside: Mapping[str, Server] = field(default_factory=dict)

    @property
    def servers(self) -> list[Server]:
        return [self.main, *self.beside.values()]

    @property
    def fit(self) -> bool:
        return all(server.unfit is None for server in self.servers)

    def takes(self, plan: Plan, arm: str) -> bool:
        """Return whether the arm's model is hosted here. If all arms share a model, every site takes every arm."""
        return not plan.models or self.main.hosts(plan.model_of(arm))

    def check(self) -> None:
        """Raise ServerUnfit if one of the servers can no longer be used."""
        for server in self.servers:
            server.check()

    def lost(self, error: ServerUnreachable | ServerUnfit) -> None:
        """Mark the server that `error` is about as unfit."""
        gone = next((server for server in self.servers if server.url == error.url), self.main)
        gone.unfit = gone.unfit or str(error).removeprefix(f"{gone.url}: ")

    def labels(self) -> dict[str, str]:
        """Return the labels of a run on the main server: the URLs of its partners' servers."""
        return {f"server:{role}": server.url for role, server in self.beside.items()}


_TOKENS = ("SWARM_ADMIN_TOKEN", "SWARM_TOKEN", "SWARM_CLIENT_TOKEN")
"""Environment variables that may hold a token for the servers."""


def server_token(environ: Mapping[str, str]) -> str | None:
    """Return the token for servers. An admin token is preferred, because it may start runs.

    Raises: UsageError, naming the variable, for an invalid token.
    """
    for name in _TOKENS:
        try:
            checked_token(environ.get(name))
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from error
    return environ.get("SWARM_ADMIN_TOKEN") or environ.get("SWARM_TOKEN")


def lease_holder(study_id: str) -> str:
    """Return the name under which a study holds the leases of its servers."""
    return f"study {study_id}"


def one_server(url: str, other: str) -> str:
    """Return the error message for two addresses of the same server."""
    return f"{url} and {other} are the same server: give one of them"


class ServerPool:
    """An async context manager over the servers of one study: those given by URL, or those started here.

    Args:
        holder: name of the leases' owner. After a crash, the same name gets the leases back immediately.
        urls: addresses of given servers. They are assigned in order: one for the instrument's own model, then one for each role.
        local: servers to start here, one after the other, if no URL is given.
        roles: roles of a trial's further models, each of which gets a separate server.
        by_turns: run only one of `local` at a time: the one that hosts the model last passed to `turn_to`; none at first.
        models: number of different models that the trials train. If there are several, `at_most` does not limit the servers.
        at_most: maximum number of trials at the same time. Only the servers that they need are leased. None means no limit.
        keep_runs: keep a run's checkpoints on the disk of our own server when the next run begins.
        tell: receives a line of text about each wait.
        transport: transport for requests to the given servers. None means the network.
    """

    def __init__(
        self,
        store: Store,
        holder: str,
        *,
        urls: Sequence[str] = (),
        local: LocalServer | Sequence[LocalServer] | None = None,
        roles: Sequence[str] = (),
        by_turns: bool = False,
        models: int = 1,
        at_most: int | None = None,
        keep_runs: bool = False,
        clock: Clock | None = None,
        limits: PoolLimits | None = None,
        environ: Mapping[str, str] | None = None,
        tell: Callable[[str], None] = lambda _: None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        starts = [local] if isinstance(local, LocalServer) else list(local or ())
        if bool(urls) == bool(starts):
            raise ValueError("a pool needs either the URLs of servers or servers to start here, and not both")
        self.clock = clock or SystemClock()
        self._store = store
        self._holder = holder
        self._urls = list(dict.fromkeys(url.rstrip("/") for url in urls))
        self._roles = tuple(roles)
        self.by_turns = by_turns
        self._models = models
        self.at_most = at_most
        self._keep_runs = keep_runs
        self.tell = tell
        self._transport = transport
        self._limits = limits or PoolLimits()
        self._environ = dict(os.environ if environ is None else environ)
        self._servers: list[Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._starts = starts
        self._processes: list[LocalProcess] = []

    @property
    def servers(self) -> list[Server]:
        """Servers that can be used."""
        return [server for server in self._servers if server.unfit is None]

    @property
    def needed(self) -> int:
        """Number of servers that one trial needs at the same time."""
        return 1 + len(self._roles)

    def sites(self) -> list[Site]:
        """Group the usable servers into sites, one for each trial. Leftover servers stay idle."""
        fit, size = self.servers, self.needed
        groups = [fit[i : i + size] for i in range(0, len(fit) - size + 1, size)]
        return [Site(group[0], dict(zip(self._roles, group[1:], strict=True))) for group in groups]

    def reasons(self) -> str:
        """Say why the other servers cannot be used."""
        return "; ".join(f"{server.url}: {server.unfit}" for server in self._servers if server.unfit is not None)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> list[Server]:
        """Lease the servers, or start our own if none was given, and wait until they can take runs. Return those that can be used.

        Raises: NoServersLeft, with each server's reason.
        """
        refused = []
        try:
            wanted: list[str | LocalServer] = [*self._urls, *(() if self.by_turns else self._starts)]
            for start in wanted:
                if self._enough:
                    break
                try:
                    await self._add(start)
                except (ServerUnfit, LeaseHeld) as error:
                    refused.append(str(error))
            if not self.sites() and not self.by_turns:
                raise NoServersLeft(self._too_few("; ".join(refused)))
        except BaseException:
            await self.close()
            raise
        return self.servers

    async def turn_to(self, model: PlanModel) -> None:
        """If servers take turns, run the one that hosts `model` and stop the others. Their folders, ports and runs stay.

        Raises: NoServersLeft when the server does not start, or was lost.
        """
        own = [server for server in self._servers if server.hosts(model)]
        if not self.by_turns or any(server.unfit is None for server in own):
            return
        if own:
            raise NoServersLeft(self.reasons())
        local = next((each for each in self._starts if each.model in (model.name, model.source)), None)
        if local is None:
            raise NoServersLeft(f"no server here hosts {model.name}")
        await self.close()
        self.tell(f"starting a server of {model.name} ...")
        try:
            await self._add(local)
        except (ServerUnfit, LeaseHeld) as error:
            raise NoServersLeft(str(error)) from error

    @property
    def _enough(self) -> bool:
        return self.at_most is not None and self._models == 1 and len(self.servers) >= self.at_most * self.needed

    async def close(self, *, stop_local: bool = True) -> None:
        """Release every server, and stop our own (with `stop_local`); their state stays.

        A failure on one server does not stop the others from closing; the last error is raised at the end.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        async with AsyncExitStack() as ending:
            if stop_local:
                ending.push_async_callback(self._stop_local)
            for server in self._servers:
                ending.callback(self._store.leases.release_server, server.url, server.lease)
                ending.push_async_callback(server.swarm.close)
            self._servers.clear()

    async def _stop_local(self) -> None:
        await asyncio.gather(*(process.stop() for process in self._processes))

    def _too_few(self, reasons: str) -> str:
        if self.needed == 1:
            return reasons
        own = "the instrument's own model, " + ", ".join(self._roles)
        return (
            f"a trial needs {self.needed} servers at the same time ({own}), but only {len(self.servers)} can be used: "
            + (reasons or "give each with --server, or give none to have them started here")
        )

    async def _add(self, given: str | LocalServer) -> None:
        """Lease a server and wait until it is ready. A server of our own is started first."""
        process = self._process(given) if isinstance(given, LocalServer) else None
        url = await process.start() if process is not None else str(given)
        lease = self._store.leases.acquire_server(url, self._holder, self._limits.lease_s)
        token = server_token(self._environ)
        patience = Patience(connect_s=self._limits.unreachable_s, later_s=self._limits.unreachable_s)
        swarm = SwarmClient(
            url, token, client_id=self._holder, patience=patience, clock=self.clock, transport=self._transport
        )
        runs = None if process is None or self._keep_runs else process.runs
        server = Server(url, swarm, lease, owned=process is not None, runs=runs)
        self._servers.append(server)
        self._beside(server, self._keep_lease(server))
        if process is not None:
            self._beside(server, _keep_alive(process, server))
        try:
            if not server.owned:
                await self._answering(url, token)
            await server.ready(self.clock, self._limits.boot_s)
            self._check_other_than(server)
        except ServerUnfit as error:
            server.unfit = str(error).removeprefix(f"{url}: ")
            raise

    def _check_other_than(self, server: Server) -> None:
        """Refuse a second address of the same server, because trials would end each other's runs. Raises: ServerUnfit."""
        found = server.status
        for other in self.servers:
            same = found and other.status and other.status.server_id == found.server_id
            if same and other is not server:
                raise ServerUnfit(one_server(other.url, server.url), server.url)

    async def _answering(self, url: str, token: str | None) -> None:
        """Wait until something answers at `url`. While nothing does, say so immediately and then every `told_s` seconds.

        Raises: ServerUnfit after `first_answer_s`.
        """
        deadline, told_at = self.clock.monotonic() + self._limits.first_answer_s, -math.inf
        once = Patience(connect_s=0.0, later_s=0.0)
        async with SwarmClient(
            url, token, client_id=self._holder, patience=once, clock=self.clock, transport=self._transport
        ) as swarm:
            while True:
                try:
                    await swarm.status()
                    return
                except ServerUnreachable as error:
                    now = self.clock.monotonic()
                    if now >= deadline:
                        raise ServerUnfit(f"{error} (tried for {self._limits.first_answer_s:.0f} s)") from error
                    if now - told_at >= self._limits.told_s:
                        self.tell(f"{url} does not answer; trying for {deadline - now:.0f} s more")
                        told_at = now
                except SwarmError:
                    return  # any answer will do here; `ready` judges the status
                await self.clock.sleep(min(_KNOCK_S, deadline - now))

    def _process(self, local: LocalServer) -> LocalProcess:
        """Return the process of a server of our own. Later servers get the first as `--peer`, which resolves their teams."""
        peers = [argument for server in self._servers[:1] for argument in ("--peer", server.url)]
        arranged = replace(local, arguments=(*local.arguments, *peers))
        process = LocalProcess(arranged, self.clock, self._limits.local, self._environ)
        self._processes.append(process)
        return process

    def _beside(self, server: Server, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the pool closes. If it fails, the server is unfit: its lease is lost, or nobody restarts it."""

        def judge(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                server.unfit = server.unfit or f"{type(error).__name__}: {error}"

        task = asyncio.create_task(work)
        task.add_done_callback(judge)
        self._tasks.append(task)

    async def _keep_lease(self, server: Server) -> None:
        while True:
            await self.clock.sleep(self._limits.lease_s / 3)
            try:
                renew = self._store.leases.renew_server
                await asyncio.to_thread(renew, server.url, server.lease, self._limits.lease_s)
            except LeaseSuperseded as error:
                server.unfit = str(error)
                return
            except (DatabaseAway, StorageFailed) as error:  # the rest of the lease bridges a short outage
                _log.warning("the lease on %s could not be renewed, retrying: %s", server.url, error)


async def _keep_alive(process: LocalProcess, server: Server) -> None:
    server.unfit = await process.keep_alive(server.url)
