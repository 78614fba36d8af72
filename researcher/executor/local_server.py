"""The swarm server that a study starts on this machine. It outlives the researcher, which finds it again or restarts it.

Its port stays the same as long as its folder exists, so that clients find it again.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from foundation.clock import Clock
from foundation.paths import write_atomically
from researcher.executor.errors import ServerUnfit
from researcher.executor.processes import Berth, child_environ

_log = logging.getLogger(__name__)
_LOOK_S = 0.05
"""Interval at which a starting server's folder is checked for its address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServer:
    """A server to start. `folder` holds its state and output, for one study."""

    model: str
    folder: Path
    engine: str = "local"
    arguments: tuple[str, ...] = ()
    """Further arguments of `swarm serve`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLimits:
    """Limits for a server that a study starts.

    Attributes:
        listen_s: how long it may take to start listening.
        restarts: maximum number of restarts in a row.
        quiet_s: a server that was alive for this long resets the count of restarts.
        grace_s: how long it may take to end in an orderly way.
    """

    listen_s: float = 60.0
    restarts: int = 3
    quiet_s: float = 900.0
    first_backoff_s: float = 1.0
    grace_s: float = 20.0


class LocalProcess:
    """The process behind a `LocalServer`."""

    def __init__(self, local: LocalServer, clock: Clock, limits: LocalLimits, environ: Mapping[str, str]) -> None:
        self._local = local
        self._clock = clock
        self._limits = limits
        self._environ = environ
        self._state = local.folder / "state"
        self._berth = Berth(local.folder / "process", clock)

    @property
    def runs(self) -> Path:
        """Folder of the checkpoints, with a subfolder per run."""
        return self._state / "runs"

    async def start(self) -> str:
        """Start the server, or find the running one, and return its URL.

        Raises: ServerUnfit when the server ends or does not start listening.
        """
        if self._berth.alive():
            return await self._listening()
        port = self._last_port()
        self._launch(port)
        try:
            return await self._listening()
        except ServerUnfit:
            if port == 0:
                raise
        self._launch(0)  # another program took the port meanwhile; if not, this fails in the same way
        return await self._listening()

    async def keep_alive(self, url: str) -> str:
        """Restart the server on the same port whenever it dies. Return the reason once restarts no longer help."""
        deaths = 0
        while True:
            began = self._clock.monotonic()
            await self._berth.ended()
            deaths = 1 if self._clock.monotonic() - began >= self._limits.quiet_s else deaths + 1
            if deaths > self._limits.restarts:
                return f"it died {deaths} times: {self._last_words()}"
            _log.warning("the swarm server died; start %d of %d", deaths, self._limits.restarts)
            await self._clock.sleep(self._limits.first_backoff_s * 2 ** (deaths - 1))
            try:
                self._launch(urlsplit(url).port or 0)
                await self._listening()
            except (ServerUnfit, OSError) as error:  # the system is out of processes or files
                _log.warning("%s", error)

    async def stop(self) -> None:
        await self._berth.end(self._limits.grace_s)

    def _launch(self, port: int) -> None:
        (self._state / "server.json").unlink(missing_ok=True)
        local = self._local
        command = [sys.executable, "-m", "swarm.main", "serve", "--model", local.model, "--engine", local.engine]
        command += ["--port", str(port), "--state-dir", str(self._state), *local.arguments]
        self._berth.start(command, child_environ(self._environ))

    async def _listening(self) -> str:
        """Wait until the server announces its URL, and return it."""
        deadline = self._clock.monotonic() + self._limits.listen_s
        while self._clock.monotonic() < deadline:
            alive, url = self._berth.alive(), self._announced()
            if alive and url is not None:
                write_atomically(self._port_file, str(urlsplit(url).port).encode())
                return url
            if not alive:
                raise ServerUnfit(f"the swarm server ended: {self._last_words()}")
            await self._clock.sleep(_LOOK_S)
        await self._berth.end(self._limits.grace_s)
        raise ServerUnfit(f"the swarm server did not listen within {self._limits.listen_s:.0f} s: {self._last_words()}")

    def _announced(self) -> str | None:
        """Return the URL in server.json, if the live process wrote it."""
        try:
            facts = json.loads((self._state / "server.json").read_bytes())
        except FileNotFoundError:
            return None
        return str(facts["url"]) if facts["pid"] == self._berth.pid() else None

    def _last_words(self) -> str:
        said = self._berth.tail().splitlines()
        return said[-1] if said else f"it wrote nothing (its log: {self._berth.folder / 'err.log'})"

    @property
    def _port_file(self) -> Path:
        return self._local.folder / "port"

    def _last_port(self) -> int:
        return int(self._port_file.read_text()) if self._port_file.exists() else 0
