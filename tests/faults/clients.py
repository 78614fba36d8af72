"""The clients of a storm: processes of a player's module, each started again as often as it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.faults import journal

ROOT = Path(__file__).parents[2]


class ClientFailed(Exception):
    """A client ended by itself before its work was done; the text is its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one client has to do. urls, run_ids: of the deciding server, then the other."""

    urls: list[str]
    run_ids: list[str]
    client_id: str
    seed: int
    tasks: int
    of_each: int
    concurrency: int
    idle_limit_s: float = 5.0
    call_limit_s: float = 10.0
    journal: str

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Part:
        return cls(**json.loads(path.read_text()))

    def said_of_another(self, said: str, episode_id: str) -> bool:
        """Whether the model cannot have repeated `episode_id` so, as it was asked to."""
        return said not in (episode_id, "~" + episode_id[::-1])


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
