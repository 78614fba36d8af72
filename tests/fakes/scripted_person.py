"""A person who answers from a script, and remembers what was shown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarm.client.join import PersonLeft

Line = str | Callable[[str], str]


class ScriptedPerson:
    """lines: answers in turn, or functions of everything shown so far. After the last one: leaves, or with `stays` is silent."""

    def __init__(self, *lines: Line, stays: bool = False) -> None:
        self._lines = list(lines)
        self._stays = stays
        self.shown = ""
        self.asked: list[str] = []
        self.silent = asyncio.Event()

    def show(self, text: str) -> None:
        self.shown += text + "\n"

    async def ask(self, prompt: str) -> str:
        self.asked.append(prompt)
        if not self._lines:
            if self._stays:
                self.silent.set()
                await asyncio.Event().wait()
            raise PersonLeft("the person left")
        line = self._lines.pop(0)
        return line if isinstance(line, str) else line(self.shown)

    async def edit(self, text: str) -> str:
        return await self.ask(f"edit {text}: ")
