"""Talks to a person at a terminal who reads text and types lines. Knows nothing about episodes."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import tempfile
import termios
import threading
from pathlib import Path
from typing import Protocol, TextIO

from foundation.streams import printable
from swarm.protocol.episodes import MOST_REWARD, Cause
from swarm.protocol.errors import SwarmError

LEAVE = "/quit"
CLOSING_S = 2.0
"""How long an editor may take to exit after SIGTERM, in seconds."""
_CHUNK = 65_536


class PersonLeft(SwarmError):
    """The person left before the current activity was over."""

    cause = Cause.PERSON


class InputEnded(PersonLeft):
    """Standard input ended, and since it is not a terminal, no person closed it."""


class Person(Protocol):
    """The person who answers. All coroutines may be cancelled, and raise PersonLeft if the person leaves."""

    def show(self, text: str) -> None: ...

    async def ask(self, prompt: str) -> str:
        """Ask a question and return the answer. A line that ends with a backslash continues on the next line."""

    async def edit(self, text: str) -> str:
        """Let the person edit the text, and return the result."""


class Terminal:
    """A person who types at file descriptor `source`. Uses plain reads, so that an abandoned question does not block process exit."""

    def __init__(self, source: int, out: TextIO, *, editor: str | None = None) -> None:
        self._source = source
        self._out = out
        self._editor = editor if editor and os.isatty(source) else None
        self._pending = b""
        self._reading: asyncio.Future[bytes] | None = None
        self._stale = False
        """True if the last question was withdrawn, so that text typed for it must not answer the next question."""

    def show(self, text: str) -> None:
        self._out.write(printable(text) + "\n")
        self._out.flush()

    async def ask(self, prompt: str) -> str:
        if self._stale and os.isatty(self._source):
            termios.tcflush(self._source, termios.TCIFLUSH)
            self._pending = b""
        self._stale = True
        self._out.write(prompt)
        self._out.flush()
        lines = [await self._line()]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(await self._line())
        self._stale = False
        return "\n".join(lines)

    async def edit(self, text: str) -> str:
        if self._editor is None:
            return await self.ask("the corrected answer: ")
        with tempfile.TemporaryDirectory() as room:
            file = Path(room) / "answer.txt"
            file.write_text(text, encoding="utf-8")
            code = await self._edited(self._editor, file)
            if code != 0:
                raise subprocess.CalledProcessError(code, self._editor)
            return file.read_text(encoding="utf-8").rstrip("\n")

    async def _edited(self, editor: str, file: Path) -> int:
        """Run the editor and return its exit code. If the caller is cancelled, close the editor to free the terminal."""
        modes = termios.tcgetattr(self._source)
        process = await asyncio.create_subprocess_exec(*shlex.split(editor), str(file))
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                await _closed(process)
                termios.tcsetattr(self._source, termios.TCSANOW, modes)

    async def _line(self) -> str:
        while b"\n" not in self._pending:
            chunk = await self._read()
            if not chunk:
                if not self._pending:
                    raise (
                        PersonLeft("the person left") if os.isatty(self._source) else InputEnded("standard input ended")
                    )
                break
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        text = line.decode("utf-8", "replace").rstrip("\r")
        if text.strip() == LEAVE:
            raise PersonLeft("the person left")
        return text

    async def _read(self) -> bytes:
        """Read the next bytes, or b"" at the end of input. An abandoned read goes on, and the next question gets its result."""
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_future()
            threading.Thread(target=self._read_once, args=(self._reading,), name="terminal", daemon=True).start()
        chunk = await asyncio.shield(self._reading)
        self._reading = None
        return chunk

    def _read_once(self, answer: asyncio.Future[bytes]) -> None:
        try:
            chunk = os.read(self._source, _CHUNK)
        except OSError:  # the terminal is gone
            chunk = b""
        loop = answer.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(_deliver, answer, chunk)


def _deliver(answer: asyncio.Future[bytes], chunk: bytes) -> None:
    if not answer.done():
        answer.set_result(chunk)


async def _closed(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    try:
        async with asyncio.timeout(CLOSING_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def choose(person: Person, prompt: str, keys: str) -> str:
    """Ask for one of the letters in `keys`, and return it. If `keys` contains a space, an empty line is allowed and returns "".

    Raises: PersonLeft if the answer is q.
    """
    while True:
        answer = (await person.ask(prompt)).strip().lower()
        if answer == "q":
            raise PersonLeft("the person left")
        if len(answer) <= 1 and (answer or " ") in keys:
            return answer
        person.show(f"  please answer with one of: {', '.join(key if key != ' ' else 'Enter' for key in keys)}, q")


async def reward_of(person: Person, prompt: str) -> float:
    """Ask until the answer is a valid reward, and return it."""
    while True:
        answer = (await person.ask(prompt)).strip()
        try:
            value = float(answer)
        except ValueError:
            value = float("nan")
        if abs(value) <= MOST_REWARD:
            return value
        person.show(
            f"  please answer with a number such as 1, 0 or 0.5; its absolute value may be at most {MOST_REWARD:g}"
        )
