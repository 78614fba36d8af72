"""Clients as processes of this machine: each in its berth, code that no person wrote in a sandbox."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from foundation.clock import Clock
from researcher.executor.jobs import BLUEPRINT, Ending, Order, Started
from researcher.executor.processes import Berth, child_environ, started_at
from researcher.sandbox.launch import confined


class LocalPlace:
    """A `ClientPlace`. python: under which clients run; an environment of the instrument's own where it needs one."""

    def __init__(self, clock: Clock, python: str = sys.executable) -> None:
        self._clock = clock
        self._python = python

    def job(self, folder: Path, name: str) -> LocalJob:
        return LocalJob(Berth(folder, self._clock), self._python)


class LocalJob:
    """A `ClientJob`: what lives in one berth."""

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
