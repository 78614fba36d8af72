"""Starts code inside the sandbox: sets up confinement, and relays bytes between a Unix socket and a TCP port, the only way out."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from foundation.confinement import Bounds, Confined, Unconfined, confine
from foundation.paths import packages_root
from researcher.sandbox.launch import Mode, SandboxSpec, located, system_reads

_CHUNK = 1 << 16

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """Relays bytes between sockets without interpreting them."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []

    async def to_network(self, path: str, host: str, port: int) -> None:
        """Forward connections from the Unix socket at `path` to the host's port."""
        serve = _carrier(lambda: asyncio.open_connection(host, port))
        self._servers.append(await asyncio.start_unix_server(serve, path))

    async def to_socket(self, host: str, port: int, path: str) -> None:
        """Forward connections from a local port to the Unix socket at `path`."""
        serve = _carrier(lambda: asyncio.open_unix_connection(path))
        self._servers.append(await asyncio.start_server(serve, host, port))

    async def close(self) -> None:
        """Accept no more connections. Open ones end with the process."""
        for server in self._servers:
            server.close()


def _carrier(
    connect: Callable[[], Awaitable[Streams]],
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def serve(near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            far, forth = await connect()
        except OSError:  # the server is down: the client sees its connection end, as it would without a relay
            back.close()
            return
        await asyncio.gather(_pump(near, forth), _pump(far, back))
        for writer in (forth, back):
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    return serve


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(_CHUNK):
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()


_RELAYS = "relay"
"""Folder of the sockets, mounted at `/run/relay` inside the sandbox."""
_NEEDED = (
    "/dev/null",
    "/dev/zero",
    "/dev/urandom",
    "/dev/random",
    "/sys/devices/system/cpu",
    "/proc/self",
    "/proc/meminfo",
)
_LOWEST_PORT = 1024


def confine_by(spec: SandboxSpec, ports: Sequence[int]) -> None:
    """Confine this process as the spec's mode requires.

    Bubblewrap already hides files. It also hides ports, unless the network is shared.

    Raises: Unconfined if a promised barrier fails. The code must not run then.
    """
    found = _confined(spec, ports)
    missing = [name for name in spec.promised if not getattr(found, name)]
    if missing:
        raise Unconfined(f"this system does not enforce the promised limits on {', '.join(missing)}; nothing was run")


def _confined(spec: SandboxSpec, ports: Sequence[int]) -> Confined:
    bounds = Bounds(**spec.bounds)
    named = any(not server.loopback and not server.numeric for server in spec.servers)
    if spec.mode is Mode.BUBBLEWRAP:
        return confine(bounds, ports=ports, datagrams=named) if spec.network else confine(bounds)
    reads = [*system_reads(), *map(Path, (*_NEEDED, "/etc/hosts", "/etc/resolv.conf", *spec.reads))]
    # Python lists the folder of our packages to find them.
    writes = [Path(spec.room), Path("/dev/null")]
    return confine(bounds, reads=reads, lists=[packages_root()], writes=writes, ports=ports, datagrams=named)


def become(spec: SandboxSpec) -> None:
    """Confine this process and turn it into the command. Never returns. Raises: Unconfined."""
    os.chdir("/tmp" if spec.mode is Mode.BUBBLEWRAP else spec.room)
    confine_by(spec, [server.port for server in spec.servers])
    os.execve(spec.command[0], spec.command, dict(os.environ))


def bubblewrap(spec: SandboxSpec, spec_file: Path, command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` in bubblewrap."""
    words = [str(shutil.which("bwrap")), "--die-with-parent", "--unshare-all", "--cap-drop", "ALL"]
    if spec.network:
        words += ["--share-net"]
    elif any(server.port < _LOWEST_PORT for server in spec.servers):
        words += ["--cap-add", "CAP_NET_BIND_SERVICE"]
    words += ["--proc", "/proc", "--dev", "/dev", "--size", str(spec.bounds["file_bytes"]), "--tmpfs", "/tmp"]
    for path in system_reads():
        words += (
            ["--symlink", os.readlink(path), str(path)] if path.is_symlink() else ["--ro-bind", str(path), str(path)]
        )
    folder = Path(spec.folder)
    for path in (*map(Path, spec.reads), spec_file):
        words += ["--ro-bind", str(path), str(path)]
    if spec.network:
        words += ["--ro-bind-try", "/etc/hosts", "/etc/hosts", "--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
    else:
        words += ["--ro-bind", str(_hosts(spec, folder)), "/etc/hosts"]
    if (folder / _RELAYS).is_dir():
        words += ["--ro-bind", str(folder / _RELAYS), "/run/relay"]
    return [*words, "--chdir", "/tmp", "--", *command]


def _hosts(spec: SandboxSpec, folder: Path) -> Path:
    """Write the sandbox's hosts file. It maps the names of remote servers to 127.0.0.1, where the inner end of the relay listens."""
    names = dict.fromkeys(["localhost", *(server.host for server in spec.servers if not server.loopback)])
    file = folder / "hosts"
    file.write_text("".join(f"127.0.0.1 {name}\n" for name in names))
    return file


def _make_room(spec: SandboxSpec) -> None:
    """Create the folder of the sockets and change to it: relative paths keep a socket's path below the limit of ~100 characters."""
    relays = Path(spec.folder) / _RELAYS
    relays.mkdir(exist_ok=True)
    for socket in relays.glob("*.sock"):
        socket.unlink()
    os.chdir(relays)


async def _outside(spec: SandboxSpec, spec_file: Path) -> int:
    servers = [] if spec.network else spec.servers
    relay = Relay()
    for number, server in enumerate(servers):
        await relay.to_network(f"{number}.sock", server.host, server.port)
    inner = [located(sys.executable)[0], "-m", "researcher.sandbox.entry", "--inside", str(spec_file)]
    process = await asyncio.create_subprocess_exec(*bubblewrap(spec, spec_file, inner))
    try:
        code = await process.wait()
    finally:
        await relay.close()
    return code if code >= 0 else 128 - code


async def _relaying(spec: SandboxSpec, child: int, go: int) -> int:
    """Serve the relay's inner end, let the child continue, and return its exit code."""
    relay = Relay()
    for number, server in enumerate(spec.servers):
        own = server.host if server.loopback and server.host != "localhost" else "127.0.0.1"
        await relay.to_socket(own, server.port, f"/run/relay/{number}.sock")
    os.write(go, b".")
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    await relay.close()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _inside(spec: SandboxSpec) -> int:
    if spec.network or not spec.servers:
        become(spec)
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(ready, 1)
        become(spec)
    os.close(ready)
    return asyncio.run(_relaying(spec, child, go))


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    file = Path(given[-1])
    spec = SandboxSpec.model_validate_json(file.read_bytes())
    if "--inside" in given:
        return _inside(spec)
    if spec.mode is Mode.BUBBLEWRAP:
        _make_room(spec)
        return asyncio.run(_outside(spec, file))
    become(spec)
    return 1


if __name__ == "__main__":
    sys.exit(main())
