"""The clients of a storm: processes of a player's module, each started again as often as it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tests.faults import journal

ROOT = Path(__file__).parents[2]


class ClientFailed(Exception):
    """A client ended by itself before its work was done; the text is its log."""


class Part(Protocol):
    """What a client has to do."""

    def save(self, path: Path) -> None: ...


class Clients:
    """Client n keeps its journal, its log and its parameters in `folder`."""

    def __init__(self, module: str, folder: Path, rng: random.Random) -> None:
        self.kills = 0
        self._module = module
        self._folder = folder
        self._rng = rng
        self._alive: dict[int, asyncio.subprocess.Process] = {}
        self._known = 0

    def journal(self, index: int) -> Path:
        return self._folder / f"client-{index}.journal"

    def notes(self) -> list[dict[str, Any]]:
        """All that any of them wrote down."""
        return [note for index in range(self._known) for note in journal.read(self.journal(index))]

    async def play(self, number: int, part: Callable[[int, int], Part]) -> None:
        """All of them to their end. part: of client and life. Raises: ClientFailed."""
        self._known = number
        async with asyncio.TaskGroup() as group:
            for index in range(number):
                group.create_task(self._keep_playing(index, part))

    def kill_one(self) -> None:
        if self._alive:
            self._alive[self._rng.choice(sorted(self._alive))].kill()
            self.kills += 1

    async def end(self) -> None:
        """Nobody is left running."""
        for process in list(self._alive.values()):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _keep_playing(self, index: int, part: Callable[[int, int], Part]) -> None:
        parameters, log, lives = self._folder / f"client-{index}.json", self._folder / f"client-{index}.log", 0
        while True:
            part(index, lives).save(parameters)
            lives += 1
            code = await self._live(index, parameters, log)
            if code == 0:
                return
            if code != -signal.SIGKILL:
                raise ClientFailed(f"client {index} ended with {code}:\n{log.read_text()[-4000:]}")

    async def _live(self, index: int, parameters: Path, log: Path) -> int:
        with log.open("a") as said:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._module, str(parameters), cwd=ROOT, stdout=said, stderr=said
            )
        self._alive[index] = process
        code = await process.wait()
        del self._alive[index]
        return code
