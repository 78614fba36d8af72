"""A black-box agent's surroundings: its environment variables, its own home, and the files that it may read and write.

This module knows nothing about episodes. `foundation.confinement` enforces the limits.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foundation.commandline import UsageError
from foundation.confinement import SYSTEM
from foundation.programs import Confinement

_KEPT = ("PATH", "LANG", "LANGUAGE", "TZ")
_OURS = ("SWARM_", "RESEARCHER_")
_READ = (
    *SYSTEM,
    "/etc/bash.bashrc",
    "/etc/fonts",
    "/etc/gitconfig",
    "/etc/group",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/os-release",
    "/etc/passwd",
    "/etc/profile",
    "/etc/protocols",
    "/etc/resolv.conf",
    "/etc/services",
    "/etc/timezone",
    "/opt",
    "/nix/store",
    "/proc",
    "/sys/devices/system/cpu",
    "/sys/fs/cgroup",
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_ELF = b"\x7fELF"


def variables_for_model(base_url: str, api_key: str) -> dict[str, str]:
    """Return the environment variables that tell SDKs where the model is. Anthropic's SDK appends `/v1` to its base URL."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
    }


def clean_environment(
    environ: Mapping[str, str], passed: Iterable[str] = (), *, option: str = "--env", token: str | None = None
) -> dict[str, str]:
    """Return `environ` reduced to PATH, the locale, the time zone and the variables named in `passed`.

    `option` is the command-line option that errors mention; `token` is the server's token.
    Raises: UsageError if a variable in `passed` is not set, is one of ours, or contains the token.
    """
    kept = {name: value for name, value in environ.items() if name in _KEPT or name.startswith("LC_")}
    for name in passed:
        if name.startswith(_OURS) or (token and token in environ.get(name, "")):
            raise UsageError(
                f"{option} {name}: this variable may contain a token or a lease, so it cannot be passed to the agent"
            )
        if name not in environ:
            raise UsageError(f"{option} {name}: this environment variable is not set")
        kept[name] = environ[name]
    return kept


def program_of(command: Sequence[str], option: str) -> str:
    """Return the path of the command's program. Raises: UsageError if it is not found."""
    found = shutil.which(command[0])
    if found is None:
        raise UsageError(f"{option}: program {command[0]!r} not found; give its path, or add its folder to PATH")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRoom:
    """A black-box agent's command and the paths that it may use.

    Args:
        command: the agent's command line.
        place: an existing private folder. Only this folder and `writes` are writable.
        reads: more paths that the agent may read.
        writes: more paths that the agent may write.
        hidden: paths that the agent may never read or write.
        unread: like `hidden`, but the agent may read those that `reads` or the command names.
        folder: the agent's working directory; None means ours.
    """

    command: Sequence[str]
    place: Path
    reads: Sequence[Path] = ()
    writes: Sequence[Path] = ()
    hidden: Sequence[Path] = ()
    unread: Sequence[Path] = ()
    folder: Path | None = None

    def environment(self, kept: Mapping[str, str], model: Mapping[str, str]) -> dict[str, str]:
        return {**kept, **model, "HOME": str(self.place / "home"), "TMPDIR": str(self.place / "tmp")}

    def furnish(self) -> None:
        for name in ("home", "tmp"):
            (self.place / name).mkdir(mode=0o700)

    def confinement(self, ports: Sequence[int] | None) -> Confinement:
        """Return the limits as a `Confinement`. Raises: OSError if a folder cannot be listed."""
        here = (self.folder or Path.cwd()).resolve()
        named = {path.resolve() for path in (*self.reads, *self._arguments())}
        secret = {path.resolve() for path in self.hidden}
        shut = secret | ({path.resolve() for path in self.unread} - named)
        wanted = [*map(Path, _READ), *named, *_program_folders(Path(program_of(self.command, "COMMAND")))]
        if not _holds_home(here):
            wanted.append(here)
        reads, lists = _without(wanted, shut)
        writes, also = _without(self.writes, shut | {path.resolve() for path in self.unread})
        return Confinement(
            reads=reads, lists=[*lists, *also], writes=[*writes, self.place, *map(Path, _DEVICES)], ports=ports
        )

    def _arguments(self) -> list[Path]:
        """Return the files and folders that the command names."""
        return [Path(word) for word in self.command[1:] if _exists(word) and not _holds_home(Path(word).resolve())]


def files_of(command: Sequence[str]) -> list[Path]:
    """Return the files and folders that a command names, except system programs and folders that contain the working directory."""
    found = [Path(word).resolve() for word in command[1:] if _exists(word)]
    program = Path(program_of(command, "--scorer")).resolve()
    with open(program, "rb") as file:
        if file.read(len(_ELF)) != _ELF and not any(program.is_relative_to(place) for place in SYSTEM):
            found.append(program)
    here = Path.cwd()
    return [path for path in found if not here.is_relative_to(path)]


def _exists(word: str) -> bool:
    try:
        return bool(word) and Path(word).exists()
    except (OSError, ValueError):  # too long for a path, or it contains a null byte
        return False


def _holds_home(folder: Path) -> bool:
    return Path.home().resolve().is_relative_to(folder)


def _program_folders(program: Path) -> list[Path]:
    """Return a program's path and its installation folders: `bin` and its siblings, with symbolic links followed."""
    found: list[Path] = []
    for folder in (program.parent, program.resolve().parent):
        around = folder.resolve().parent
        whole = folder.name == "bin" and not _holds_home(around) and around != Path.home() / ".local"
        found.append(around if whole else folder.resolve())
    if program.resolve() == Path(sys.executable).resolve():
        found.append(Path(sys.base_prefix).resolve())
    return [program.resolve(), *(path for path in found if not _holds_home(path))]


def _without(wanted: Iterable[Path], shut: Collection[Path]) -> tuple[list[Path], list[Path]]:
    """Subtract the paths in `shut` from `wanted`.

    Returns: the paths that may be used in full, and the folders that contain a path in `shut`, of which only the names may be listed.
    """
    whole: dict[Path, None] = {}
    listed: dict[Path, None] = {}
    line = [path.resolve() for path in wanted if path.exists()]
    while line:
        path = line.pop()
        if any(path.is_relative_to(each) for each in shut):
            continue
        if not any(each.is_relative_to(path) for each in shut):
            whole[path] = None
            continue
        listed[path] = None
        # Skip symbolic links, or their targets would become accessible too.
        line += [Path(entry.path) for entry in os.scandir(path) if not entry.is_symlink()]
    return list(whole), list(listed)
