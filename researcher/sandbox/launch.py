"""Wraps a command so that it runs in a sandbox, and describes that sandbox for people.

    command, environ = confined(command, child_environ(), folder, reads=[code], servers=["http://127.0.0.1:8642"])

bubblewrap  read-only system, private /tmp, no home, its own processes, no network but a relay to the named servers
limits      the process limits itself (`foundation.confinement`); systems differ, and `sandbox()` says what the limits cover
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel

from foundation.confinement import FILES, PORTS, SYSTEM, Bounds, filters_calls, landlock_version
from foundation.paths import packages_root, python_path, write_atomically

SPEC = "sandbox.json"
_KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH", "SWARM_LOG_LEVEL")
"""Environment variables that are passed to a sandbox. Others may be secret."""
_PACKAGES = ("foundation", "swarm", "researcher")
_PROBE_S = 10.0


class Mode(StrEnum):
    BUBBLEWRAP = "bubblewrap"
    LIMITS = "limits"


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox that this machine offers. `words` describe it for the terminal, the journal and the report."""

    mode: Mode
    words: str


class Relayed(BaseModel):
    """A server that code in the sandbox may reach."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        return self.host == "localhost" or (self.numeric and ip_address(self.host).is_loopback)

    @property
    def needs_network(self) -> bool:
        """Whether the sandbox needs the host's network to reach the server: a relay can replace a host name, but not an IP address."""
        return self.numeric and not self.loopback

    @property
    def numeric(self) -> bool:
        """Whether the host is an IP address, not a name."""
        try:
            ip_address(self.host)
        except ValueError:
            return False
        return True


class SandboxSpec(BaseModel):
    """Input of `researcher.sandbox.entry`. `room` is the only writable folder; in bubblewrap, /tmp replaces it."""

    mode: Mode
    command: list[str]
    folder: str
    reads: list[str]
    room: str
    servers: list[Relayed]
    bounds: dict[str, int]
    promised: list[str]
    """Kinds of confinement that `Sandbox.words` promises, by their names in `foundation.confinement.Confined`."""

    @property
    def network(self) -> bool:
        """Whether the sandbox has to share the host's network."""
        return any(server.needs_network for server in self.servers)


@cache
def sandbox() -> Sandbox:
    """Return the best sandbox that works here. Cached."""
    why = _no_bubblewrap()
    if why is None:
        words = (
            "in bubblewrap: read-only system, private /tmp, no home, no secrets in the environment, "
            f"{'no new processes' if filters_calls() else 'its own process space'}, no network but a relay to the trial's servers{_addressed()}"
        )
        return Sandbox(Mode.BUBBLEWRAP, words)
    return Sandbox(Mode.LIMITS, f"WITHOUT bubblewrap ({why}): {_limited()}")


def of_mode(mode: Mode) -> Sandbox:
    """Return the sandbox of that mode, even if a better one works."""
    return sandbox() if sandbox().mode is mode else Sandbox(mode, f"by choice in mode {mode}: {_limited()}")


def confined(
    command: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    *,
    reads: Sequence[Path],
    servers: Sequence[str] = (),
    mode: Mode | None = None,
    bounds: Bounds | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Wrap `command` so that it can read only the system, its Python, our packages and `reads`, and reach only `servers`.

    `command` starts with a Python. `folder` is for the sandbox's own files and is created if missing. Returns the command and its
    environment.
    """
    spec = spec_of(command, folder, reads=reads, servers=servers, mode=mode, bounds=bounds)
    path = (folder / SPEC).resolve()
    write_atomically(path, (spec.model_dump_json(indent=2) + "\n").encode())
    return [sys.executable, "-m", "researcher.sandbox.entry", str(path)], scrubbed(environ, spec)


def spec_of(
    command: Sequence[str],
    folder: Path,
    *,
    reads: Sequence[Path],
    servers: Sequence[str] = (),
    mode: Mode | None = None,
    bounds: Bounds | None = None,
) -> SandboxSpec:
    """Return the sandbox's spec. Creates its writable folder."""
    room = folder.resolve() / "room"
    room.mkdir(parents=True, exist_ok=True)
    program, own = located(command[0])
    mode, relayed = mode or sandbox().mode, [_relayed(url) for url in servers]
    return SandboxSpec(
        mode=mode,
        command=[program, *command[1:]],
        folder=str(folder.resolve()),
        reads=[str(path.resolve()) for path in (*reads, own)],
        room=str(room),
        servers=list({(each.host, each.port): each for each in relayed}.values()),
        bounds=asdict(bounds or Bounds()),
        promised=_promised(mode, relayed),
    )


def _promised(mode: Mode, servers: Sequence[Relayed]) -> list[str]:
    """Return the kinds of confinement that the process can set for itself here. In bubblewrap, files are already hidden."""
    version, promised = landlock_version(), ["calls"] if filters_calls() else []
    if mode is Mode.LIMITS and version >= FILES:
        promised.append("files")
    if version >= PORTS and (mode is Mode.LIMITS or any(each.needs_network for each in servers)):
        promised.append("ports")
    return promised


def scrubbed(environ: Mapping[str, str], spec: SandboxSpec) -> dict[str, str]:
    """Return the sandbox's environment variables. They may include a client token, but never an admin token."""
    kept = {name: environ[name] for name in _KEPT if name in environ}
    kept["PYTHONPATH"] = python_path(kept)
    token = environ.get("SWARM_CLIENT_TOKEN") or environ.get("SWARM_TOKEN")
    if token and token != environ.get("SWARM_ADMIN_TOKEN"):
        kept["SWARM_TOKEN"] = token
    home = "/tmp" if spec.mode is Mode.BUBBLEWRAP else spec.room
    return {**kept, "HOME": home, "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}


def system_reads() -> list[Path]:
    """Return the paths that Python and our packages need. Symbolic links stay links."""
    own = [Path(sys.prefix), Path(sys.base_prefix), *(packages_root() / name for name in _PACKAGES)]
    found = [path for path in (*map(Path, SYSTEM), *own) if path.exists()]
    return list(dict.fromkeys([*found, *(path.resolve() for path in found if path.is_symlink())]))


def located(python: str) -> tuple[str, Path]:
    """Return the Python's path, and the path that it must read to start: its virtual environment, or only the executable.

    Without a virtual environment, the surrounding folder may be a home (`~/bin/python`) or the whole disk (`/bin/python3`), so it is
    not exposed.
    """
    place = Path(python)
    environment = place.parent.parent
    if (environment / "pyvenv.cfg").is_file():
        environment = environment.resolve()
        return str(environment / place.parent.name / place.name), environment
    return str(place.resolve()), place.resolve()


def _addressed() -> str:
    """Describe the ports that bubblewrap leaves open for a server given by its IP address."""
    if landlock_version() >= PORTS:
        return " (for a server given by its IP address: only its TCP port, on any host)"
    return " (a server is given by its IP address, so it CAN reach the whole network; give the server by name)"


def _limited() -> str:
    """Describe what the limits cover on this system."""
    version = landlock_version()
    held = "its memory, processor time and files are limited, secrets are taken out of its environment"
    if filters_calls():
        held += ", it can start no process"
    if version >= FILES:
        held += ", the kernel (Landlock) blocks all files but its own and the system's"
    if version >= PORTS:
        return held + " and all TCP ports but the trial's servers' (on any host)"
    open_to = "reach the network" if version >= FILES else "read what you can read, and reach the network"
    return f"{held}; it CAN {open_to}: install bubblewrap"


def _no_bubblewrap() -> str | None:
    """Explain why bubblewrap cannot be used; None if it can."""
    if sys.platform != "linux":
        return "this is not Linux"
    found = shutil.which("bwrap")
    if found is None:
        return "bwrap is not installed"
    probe = [found, "--unshare-all", "--cap-drop", "ALL", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    probe += ["--size", "1048576", "--tmpfs", "/tmp", "true"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not run: {error}"
    return None if done.returncode == 0 else f"bwrap does not work here: {done.stderr.strip()[:200]}"


def _relayed(url: str) -> Relayed:
    parts = urlsplit(url)
    return Relayed(host=parts.hostname or "localhost", port=parts.port or (443 if parts.scheme == "https" else 80))
