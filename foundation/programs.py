"""Run an untrusted program to its end: limit its time, keep its output, and kill every process it started.

On Linux this includes processes that left their process group; elsewhere only the group is killed. `run_program` runs one
program at a time, because orphans become children of this process. `run_apart` can run many concurrently, each under a
separate process (`python -m foundation.programs`, which reads a spec and writes a ProgramEnd).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from foundation import confinement
from foundation.paths import python_path

MOST_SAID_BYTES = 64 * 2**20
"""Maximum output of a program, in bytes. A program that writes more is killed."""
_WORDS_BYTES = 4_000
_GRACE_S = 2.0
"""Seconds from SIGTERM to SIGKILL."""
_ENDED_S = 10.0
"""Seconds that leftover processes may take to disappear after SIGKILL."""
_LOOK_S = 0.01
_READ_BYTES = 2**16


class StillRunning(Exception):
    """A killed process has not exited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """Files that a program may read and write, folders it may list, and TCP ports it may connect to."""

    reads: Sequence[Path]
    lists: Sequence[Path]
    writes: Sequence[Path]
    ports: Sequence[int] | None

    def document(self) -> dict[str, Any]:
        paths = {name: [str(path) for path in getattr(self, name)] for name in ("reads", "lists", "writes")}
        return {**paths, "ports": self.ports}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Confinement:
        paths = {name: [Path(text) for text in document[name]] for name in ("reads", "lists", "writes")}
        return cls(**paths, ports=document["ports"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """How a program ended.

    Args:
        code: its exit code, or minus the signal that killed it; None if we ended it.
        said: its standard output.
        words: the end of its standard error.
        timed_out: whether it ran into its time limit.
        said_too_much: whether it wrote more than MOST_SAID_BYTES.
        fault: why it did not start; empty if it did.
    """

    code: int | None = None
    said: bytes = b""
    words: str = ""
    timed_out: bool = False
    said_too_much: bool = False
    fault: str = ""

    @property
    def how(self) -> str:
        """How the program ended, in words: `exited with code 3`, `was killed by SIGSEGV`."""
        if self.code is None:
            return "was ended"
        if self.code >= 0:
            return f"exited with code {self.code}"
        try:
            return f"was killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"was killed by signal {-self.code}"

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"said": base64.b64encode(self.said).decode()}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> ProgramEnd:
        return cls(**{**document, "said": base64.b64decode(document["said"])})

    def last_words(self, length: int = 2_000) -> str:
        """Return the end of its standard error, or of its standard output if standard error is empty."""
        said = self.words.strip() or self.said[-_WORDS_BYTES:].decode(errors="replace").strip()
        return said[-length:] or "nothing"


@dataclass(slots=True)
class _Output:
    """Collects a program's output as it arrives. It keeps the last `keep` bytes, and sets `flooded` after more than `most`."""

    most: int
    keep: int
    echo: Callable[[bytes], object] | None = None
    held: bytearray = field(default_factory=bytearray)
    total: int = 0
    flooded: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, data: bytes) -> None:
        if self.echo is not None:
            self.echo(data)
        self.total += len(data)
        self.held += data
        del self.held[: max(0, len(self.held) - self.keep)]
        if self.total > self.most:
            self.flooded.set()


async def run_program(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    given: bytes,
    limit_s: float | None,
    stops: Collection[asyncio.Event] = (),
    confined: Confinement | None = None,
    folder: Path | None = None,
    echo: bool = True,
) -> ProgramEnd:
    """Run a program until it ends, `limit_s` have passed, or one of `stops` is set; then end every process it started.

    Args:
        command: the program and its arguments.
        environ: its environment.
        given: its standard input.
        limit_s: its time limit; None for no limit.
        stops: events that end it early.
        confined: the files and ports it may use; None for no confinement.
        folder: its working directory; None for ours.
        echo: copy its standard error to ours.

    Raises: StillRunning.
    """
    said = _Output(MOST_SAID_BYTES, MOST_SAID_BYTES)
    words = _Output(MOST_SAID_BYTES, _WORDS_BYTES, echo=_to_standard_error if echo else None)
    timed_out = False
    with tempfile.TemporaryFile() as standard_input, tempfile.TemporaryFile() as fault:
        standard_input.write(given)
        standard_input.seek(0)
        others = _children(os.getpid())
        async with _reading(said) as out, _reading(words) as err:
            try:
                process = _started(command, environ, standard_input, fault, (out, err), confined, folder)
            except OSError as error:
                return ProgramEnd(fault=str(error))
            finally:
                os.close(out)
                os.close(err)
            ending = asyncio.create_task(asyncio.to_thread(process.wait))
            try:
                stopped = [*stops, said.flooded, words.flooded]
                timed_out = await _waited(ending, stopped, limit_s)
                code = ending.result() if ending.done() else None
            finally:
                await _end(process, ending, others)
        fault.seek(0)
        return ProgramEnd(
            code=code,
            said=bytes(said.held),
            words=words.held.decode(errors="replace"),
            timed_out=timed_out,
            said_too_much=said.flooded.is_set() or words.flooded.is_set(),
            fault=fault.read().decode(errors="replace"),
        )


def _started(
    command: Sequence[str],
    environ: Mapping[str, str],
    given: BinaryIO,
    fault: BinaryIO,
    outputs: tuple[int, int],
    confined: Confinement | None,
    folder: Path | None,
) -> subprocess.Popen[bytes]:
    """Start the program in its own session, without our open files. Raises: OSError."""
    with tempfile.TemporaryFile() as spec:
        passed: tuple[int, ...] = ()
        if confined is not None:
            spec.write(json.dumps(confined.document()).encode())
            spec.seek(0)
            passed = (spec.fileno(), fault.fileno())
            entry = [sys.executable, "-I", "-S", confinement.__file__, *map(str, passed)]
            command = [*entry, *command]
        return subprocess.Popen(
            command,
            env=environ,
            cwd=folder,
            stdin=given,
            stdout=outputs[0],
            stderr=outputs[1],
            pass_fds=passed,
            start_new_session=True,
        )


@contextlib.asynccontextmanager
async def _reading(output: _Output) -> AsyncIterator[int]:
    """Yield the write end of a pipe. After the block, `output` has everything that was written to the pipe."""
    source, sink = os.pipe()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    with os.fdopen(source, "rb") as file:
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)

        async def take() -> None:
            while data := await reader.read(_READ_BYTES):
                output.add(data)

        taking = asyncio.create_task(take())
        try:
            yield sink
            # On Linux all writers are gone; elsewhere a process that left the group may still hold the pipe.
            await asyncio.wait({taking}, timeout=_GRACE_S)
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            transport.close()


async def _waited(ending: asyncio.Task[int], stops: Collection[asyncio.Event], limit_s: float | None) -> bool:
    """Wait until the program ends, a stop is set, or time runs out. Return whether time ran out first."""
    stopping = [asyncio.create_task(stop.wait()) for stop in stops]
    try:
        done, _ = await asyncio.wait({ending, *stopping}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        return not done
    finally:
        for each in stopping:
            each.cancel()
        await asyncio.gather(*stopping, return_exceptions=True)


async def _end(process: subprocess.Popen[bytes], ending: asyncio.Task[int], others: Collection[int]) -> None:
    """Ask the process to end if it still runs; then kill all its descendants. Raises: StillRunning."""
    if not ending.done():
        _signal_group(process.pid, signal.SIGTERM)
        await asyncio.wait({ending}, timeout=_GRACE_S)
    _signal_group(process.pid, signal.SIGKILL)
    await ending
    if sys.platform != "linux":
        return
    stopped: set[int] = set()
    try:
        async with asyncio.timeout(_ENDED_S):
            while found := _descendants(os.getpid(), others):
                # A stopped process cannot start others: stop processes until no new one appears, then kill them all.
                number = signal.SIGKILL if found <= stopped else signal.SIGSTOP
                for pid in found:
                    _signal(pid, number)
                stopped |= found
                await asyncio.sleep(_LOOK_S)
                _reap(found)
    except TimeoutError as error:
        raise StillRunning(
            f"processes started by {process.args!r} did not exit after SIGKILL: {sorted(stopped)}"
        ) from error


def _to_standard_error(data: bytes) -> None:
    sys.stderr.write(data.decode(errors="replace"))
    sys.stderr.flush()


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # on macOS, a group that has only zombies
        os.killpg(pid, number)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap(pids: Collection[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):  # its own parent reaps it, or has done so
            os.waitpid(pid, os.WNOHANG)


def _parents() -> dict[int, int]:
    """Return the parent of each process."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            found[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
    return found


def _children(pid: int) -> set[int]:
    return {child for child, parent in _parents().items() if parent == pid} if sys.platform == "linux" else set()


def _descendants(pid: int, others: Collection[int]) -> set[int]:
    """Return the descendants of `pid`, without `others` and their descendants."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents().items():
        children.setdefault(parent, []).append(child)
    found: set[int] = set()
    line = [pid]
    while line:
        new = [child for child in children.get(line.pop(), []) if child not in others and child not in found]
        found.update(new)
        line += new
    return found


# -- concurrently --------------------------------------------------------------------------------------------------------


async def run_apart(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    given: bytes,
    limit_s: float | None,
    confined: Confinement | None,
    folder: Path,
) -> ProgramEnd:
    """Run a program like `run_program`, but under a separate process, so that many can run concurrently.

    Cancelling the call ends every process the program started. Raises: StillRunning.
    """
    spec = {
        "command": list(command),
        "environ": dict(environ),
        "given": base64.b64encode(given).decode(),
        "limit_s": limit_s,
        "confined": None if confined is None else confined.document(),
        "folder": str(folder),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "foundation.programs"),
        env={**os.environ, "PYTHONPATH": python_path(os.environ)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    reading = asyncio.gather(process.stdout.read(), process.stderr.read())
    try:
        # Keep its standard input open: end of file tells it that our process is gone.
        process.stdin.write(json.dumps(spec).encode() + b"\n")
        said, words = await asyncio.shield(reading)
        code = await process.wait()
    finally:
        process.stdin.close()
        if process.returncode is None:  # it ends once its output has been read
            await asyncio.shield(asyncio.gather(reading, process.wait(), return_exceptions=True))
    if code != 0:
        raise StillRunning(f"the process that ran {command[0]} failed: {words.decode(errors='replace')[-2_000:]}")
    return ProgramEnd.read(json.loads(said))


async def _supervise() -> ProgramEnd:
    """Run the program that standard input specifies; stop when standard input ends."""
    reader = asyncio.StreamReader(limit=2 * MOST_SAID_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    spec = json.loads(await reader.readline())
    left = asyncio.Event()

    async def watch() -> None:
        while await reader.read(_READ_BYTES):
            continue
        left.set()

    watching = asyncio.create_task(watch())
    try:
        return await run_program(
            spec["command"],
            spec["environ"],
            given=base64.b64decode(spec["given"]),
            limit_s=spec["limit_s"],
            stops=(left,),
            confined=None if spec["confined"] is None else Confinement.read(spec["confined"]),
            folder=Path(spec["folder"]),
            echo=False,
        )
    finally:
        watching.cancel()
        transport.close()


def main() -> int:
    confinement.adopt_orphans()
    try:
        end = asyncio.run(_supervise())
    except StillRunning as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(end.document()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
