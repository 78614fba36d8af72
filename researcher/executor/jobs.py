"""The seam between an attempt and its client, wherever that client runs.

An attempt has at most one client at a time. The attempt's folder is enough to find that client again, even after the process
that started it was killed: everything needed for that is written to the folder before anything is started.

    local_jobs.py  a process of this machine          ray_jobs.py  a job on a Ray cluster

tests/contracts/client_job_contract.py pins what both guarantee.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from foundation.clock import Clock
from researcher.executor.blueprint import Code
from researcher.executor.processes import Berth, child_environ, started_at
from researcher.sandbox.launch import confined
from swarm.protocol.blueprint import TrialBlueprint

BLUEPRINT = "blueprint.json"
"""Name of the blueprint file in every client's folder. Its paths are those of this machine, so that people can follow them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a client needs to start. `code` is the version that the blueprint names."""

    blueprint: TrialBlueprint
    code: Code


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A client that was started. `name` is shown to people. `pid` and `began` identify a local process; see `started_at`."""

    name: str
    pid: int | None = None
    began: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the newest client ended. `exit_code` is None if unknown. `lost` is the reason if the client was not at fault."""

    exit_code: int | None = None
    lost: str = ""


class ClientJob(Protocol):
    """The client of one attempt. Methods that ask a cluster raise `ClusterUnreachable` when it does not answer."""

    @property
    def folder(self) -> Path:
        """Folder for the blueprint and the output."""

    async def start(self, order: Order) -> Started:
        """Start the client. Raises: BlockingIOError when one is alive; ValueError for code that this place cannot run."""

    async def alive(self) -> bool:
        """Return whether a client is running or about to start."""

    async def ended(self) -> None:
        """Wait until no client is alive."""

    async def end(self, grace_s: float) -> None:
        """Ask the client and everything it started to end, and kill them after `grace_s`. Return when none is alive.

        If `grace_s` is 0, kill them without asking, where that is possible; Ray always asks.
        """

    async def ending(self) -> Ending:
        """Return how the newest client ended."""

    def said(self, length: int = 2000) -> str:
        """Return the end of the newest client's output, up to `length` characters."""

    def as_here(self, text: str, code: Path) -> str:
        """Return a client's output with the paths of its code replaced by paths in the local folder `code`."""


class ClientPlace(Protocol):
    """Where clients run."""

    def job(self, folder: Path, name: str) -> ClientJob:
        """Return the client of the attempt that keeps its files in `folder`. `name` is unique to the attempt across studies."""


class LocalPlace:
    """Runs clients as local processes. `python` is their interpreter, from the instrument's own environment if it needs one."""

    def __init__(self, clock: Clock, python: str = sys.executable) -> None:
        self._clock = clock
        self._python = python

    def job(self, folder: Path, name: str) -> LocalJob:
        return LocalJob(Berth(folder, self._clock), self._python)


class LocalJob:
    """A client that runs as a local process, in one berth."""

    def __init__(self, berth: Berth, python: str) -> None:
        self._berth = berth
        self._python = python
        self._said_from = 0

    @property
    def folder(self) -> Path:
        return self._berth.folder

    async def start(self, order: Order) -> Started:
        file, blueprint, code = self.folder / BLUEPRINT, order.blueprint, order.code
        command, environ = [self._python, "-m", "swarm.client.trial", str(file)], child_environ()
        if code.sandboxed:
            servers = [blueprint.server_url, *(run.server_url for run in blueprint.partners.values())]
            command, environ = confined(command, environ, self.folder, reads=[code.folder, file], servers=servers)
        elif "SWARM_TOKEN" not in environ and "SWARM_ADMIN_TOKEN" in os.environ:
            environ["SWARM_TOKEN"] = os.environ["SWARM_ADMIN_TOKEN"]
        self._said_from = self._berth.size()
        pid = self._berth.start(command, environ)
        return Started(name=f"process {pid}", pid=pid, began=started_at(pid) or 0.0)

    async def alive(self) -> bool:
        return self._berth.alive()

    async def ended(self) -> None:
        await self._berth.ended()

    async def end(self, grace_s: float) -> None:
        await self._berth.end(grace_s)

    async def ending(self) -> Ending:
        return Ending(exit_code=self._berth.exit_code())

    def said(self, length: int = 2000) -> str:
        return self._berth.tail(length=max(0, min(length, self._berth.size() - self._said_from)))

    def as_here(self, text: str, code: Path) -> str:
        return text
