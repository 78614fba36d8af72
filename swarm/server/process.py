"""The server process: its socket, its tasks and its shutdown. Knows uvicorn and signals, but no concrete engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import re
import resource
import socket
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
import uvloop
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from foundation.addresses import is_loopback
from foundation.clock import Clock
from foundation.event_loop import on_stop_signals
from foundation.ids import Ids
from swarm.engine.seam import Engine, EngineHealth, EngineInfo
from swarm.protocol.errors import SwarmError
from swarm.server.agentjet.facade import AgentJet
from swarm.server.agentjet.prefix import AT_ROOT, Prefixes
from swarm.server.app import create_app
from swarm.server.gateway.gateway import Gateway
from swarm.server.keys import ControlTokens, Keyring
from swarm.server.service import Service
from swarm.server.state_dir import StateDir
from swarm.server.team_resolver import Peers, TeamResolver
from swarm.server.training_loop import TrainingLoop

_log = logging.getLogger(__name__)

STOP_LIMIT_S = 10
"""Seconds that running requests may take after a stop was requested. Calls that are still sampling then are cut off."""
_LAST_WORDS_S = 2
"""Extra seconds before the server stops, so that agents whose calls were cut off can read the answer."""
_KEEP_ALIVE_S = 75
_BACKLOG = 16_384
"""Length of the listen queue, if the system allows it: a client that finds the queue full may wait for minutes."""
_ACCEPTED_AT_ONCE = 64
"""Number of listening sockets. uvloop accepts one connection per socket in each loop iteration, which takes long with many clients."""
_OPEN_FILES = 65_536
"""Limit of open files to ask for: each connection takes one, and many systems default to 1,024."""
_REQUEST = re.compile(rb"[A-Z]+ \S+ HTTP/1\.[01]\r\n")
_UPGRADE = re.compile(rb"(\r\n)upgrade(?=[ \t]*:)", re.IGNORECASE)
_YOUNG = 10_000
"""Number of allocations between two garbage collections. It is high, because the objects of a thousand open calls are not garbage."""


class ServeFault(SwarmError):
    """The server cannot start, or had to stop. The message is one line that says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where a server listens, and who may use it. Raises: ServeFault for a public address without tokens."""

    host: str
    port: int
    tokens: ControlTokens
    public_url: str | None = None
    peers: tuple[str, ...] = ()
    """Servers that this one may ask for team decisions. Without tokens, it may also ask any server on loopback."""
    agentjet: Prefixes | None = None
    """Secret prefixes under which we serve AgentJet's clients; None if we do not serve them."""
    print_json: bool = False
    allow_algorithms: bool = False
    """Whether runs may bring their own functions, which the trainer executes."""

    def __post_init__(self) -> None:
        if self.agentjet is AT_ROOT and self.tokens.required:
            raise ServeFault(
                "this server has tokens, but AgentJet's clients cannot send any: give --agentjet-prefix a file with secret prefixes"
            )
        if self.allow_algorithms and not self.tokens.required:
            raise ServeFault(
                "--allow-algorithms makes this server execute code that a run brings: set SWARM_ADMIN_TOKEN (and SWARM_CLIENT_TOKEN "
                "for clients) in the environment, so that only an admin can start a run"
            )
        if not self.tokens.required and not is_loopback(self.host):
            raise ServeFault(
                f"other machines can reach {self.host}: set SWARM_ADMIN_TOKEN (and SWARM_CLIENT_TOKEN for "
                "clients) in the environment, or listen on 127.0.0.1"
            )

    @contextmanager
    def listen(self) -> Iterator[socket.socket]:
        """Yield the listening socket. Raises: ServeFault if the port is taken or the host is not an address of this machine."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((self.host, self.port))
                listener.listen(_BACKLOG)
            except OSError as error:
                raise ServeFault(
                    f"cannot listen on {self.host}:{self.port}: {error.strerror}; choose another --port, or 0 for any"
                ) from error
            yield listener

    def url(self, listener: socket.socket) -> str:
        """Return the URL at which clients reach this listener."""
        if self.public_url is not None:
            return self.public_url.rstrip("/")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def run_server(
    settings: Settings, listener: socket.socket, state: StateDir, engine: Engine, clock: Clock, ids: Ids
) -> int:
    """Serve until a signal, and return the exit code. Raises: SwarmError if the server could not start or had to stop."""
    allow_open_files(_OPEN_FILES)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, listener, state, engine, clock, ids))


def allow_open_files(wanted: int) -> None:
    """Raise this process's limit of open files as far as the system allows; never lower it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def unallowed(service: Service, *, allowed: bool) -> ServeFault | None:
    """Return the error if this server would resume a run whose functions it may not execute; None if all is well."""
    run = service.state.run
    if allowed or run is None or run.row.status != "running" or not run.spec.algorithm.own_functions:
        return None
    return ServeFault(
        f"run {run.run_id}, which this server would resume, trains with its own functions: serve with --allow-algorithms, or with "
        "another --state-dir"
    )


async def _serve(
    settings: Settings, listener: socket.socket, state: StateDir, engine: Engine, clock: Clock, ids: Ids
) -> int:
    allowed = settings.allow_algorithms
    service = Service.open(state.pool_dir, engine.info, clock=clock, ids=ids, allow_algorithms=allowed)
    await service.start()
    if (refused := unallowed(service, allowed=allowed)) is not None:
        await service.close()
        raise refused
    closing = asyncio.Event()
    keys = Keyring.open(state.secret_path)
    peers = Peers(keys, settings.peers, any_loopback=not settings.tokens.required)
    gateway = Gateway(service, engine, clock, ids)
    app = create_app(
        service=service,
        gateway=gateway,
        info=engine.info,
        keys=keys,
        tokens=settings.tokens,
        clock=clock,
        closing=closing,
        public_url=settings.public_url,
        peers=peers,
        state_dir=state.path,
    )
    front: ASGIApp = app
    if settings.agentjet is not None:
        facade = AgentJet(
            service=service,
            info=engine.info,
            tokens=settings.tokens,
            clock=clock,
            closing=closing,
            public_url=settings.public_url,
        )
        front = facade.before(app, settings.agentjet)
    server = _Server(front, closing, gateway.stop)
    url = settings.url(listener)
    engine.subscribe(_Ready(engine.info, url).on_health)
    training_loop = asyncio.create_task(TrainingLoop(service, engine, clock=clock, runs_dir=state.runs_dir).run())
    team_resolver = asyncio.create_task(TeamResolver(service, peers.ask, clock=clock).run())
    for task in (training_loop, team_resolver):
        task.add_done_callback(lambda _: server.stop())
    try:
        state.announce(url, (await service.status()).server_id)
        if settings.print_json:
            sys.stdout.write(json.dumps({"url": url}) + "\n")
            sys.stdout.flush()
        _log.info("listening at %s; state in %s", url, state.path)
        await server.serve(sockets=[listener, *(listener.dup() for _ in range(_ACCEPTED_AT_ONCE - 1))])
    finally:
        training_loop.cancel()
        team_resolver.cancel()
        outcome = await asyncio.gather(training_loop, team_resolver, return_exceptions=True)
        await service.close()
        await engine.shutdown()
    fault = next((each for each in outcome if isinstance(each, Exception)), None)
    if isinstance(fault, SwarmError):
        raise fault
    if fault is not None:
        _log.error("a task of the server failed", exc_info=fault)
        raise ServeFault(f"the server had to stop: {type(fault).__name__}: {fault}; its state is kept, start it again")
    return 0


class _Ready:
    """Logs when the engine is ready for the first time, and then exempts all existing objects from garbage collection: a
    collection over them takes 0.2 s, in which no agent gets a token."""

    def __init__(self, info: EngineInfo, url: str) -> None:
        gc.set_threshold(_YOUNG)
        self._info, self._url = info, url
        self._was_ready = False

    def on_health(self, health: EngineHealth) -> None:
        if health.ready and not self._was_ready:
            self._was_ready, info = True, self._info
            _log.info(
                "ready: %s on %s (engine %s, %s) at %s", info.model, info.device, info.backend, info.dtype, self._url
            )
            gc.collect()
            gc.freeze()


def without_upgrade(data: bytes) -> bytes:
    """Ignore a request's offer to change protocols: rename its Upgrade header to an unknown name of the same length.

    `curl --http2` and Java's HttpClient offer h2c in their first request, and uvicorn's parser mistakes the offer for the end of
    the request. This works only if `data` contains the whole head, which is how both clients send it.
    """
    end = data.find(b"\r\n\r\n")
    if end < 0 or not _REQUEST.match(data):
        return data
    return _UPGRADE.sub(rb"\1x-offer", data[:end]) + data[end:]


class _Http(HttpToolsProtocol):
    def data_received(self, data: bytes) -> None:
        super().data_received(without_upgrade(data))


class _Server(uvicorn.Server):
    """A uvicorn server that wakes waiting requests when asked to stop, and does not raise the handled signal again."""

    def __init__(self, app: object, closing: asyncio.Event, break_off: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=_Http,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=STOP_LIMIT_S + _LAST_WORDS_S,
            )
        )
        self._closing = closing
        self._break_off = break_off

    def stop(self) -> None:
        """Answer waiting requests, finish running ones, then stop."""
        if not self.should_exit:
            asyncio.get_running_loop().call_later(STOP_LIMIT_S, self._break_off)
        self._closing.set()
        self.should_exit = True

    def _on_signal(self) -> None:
        if self.should_exit:  # second signal: do not wait for running requests
            self.force_exit = True
            self._break_off()
        self.stop()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with on_stop_signals(self._on_signal):
            yield
