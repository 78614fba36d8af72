"""A black-box agent's surroundings: an environment that can call only the model, its own home, and readable files.

Knows files and variables, but nothing about episodes. `foundation.confinement` enforces the limits.
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
    """The environment variables that SDKs read. Anthropic's SDK appends `/v1` itself."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
    }


def clean_environment(
    environ: Mapping[str, str], passed: Iterable[str] = (), *, option: str = "--env", token: str | None = None
) -> dict[str, str]:
    """PATH, the locale and the time zone, and the variables in `passed`.

    Raises: UsageError for a variable that is not set, is one of ours, or holds the server's token.
    """
    kept = {name: value for name, value in environ.items() if name in _KEPT or name.startswith("LC_")}
    for name in passed:
        if name.startswith(_OURS) or (token and token in environ.get(name, "")):
            raise UsageError(f"{option} {name}: this variable may hold a token or a lease, so it is not passed on")
        if name not in environ:
            raise UsageError(f"{option} {name}: there is no such variable")
        kept[name] = environ[name]
    return kept


def program_of(command: Sequence[str], option: str) -> str:
    """The path of the command's program. Raises: UsageError if there is none."""
    found = shutil.which(command[0])
    if found is None:
        raise UsageError(f"{option}: there is no program {command[0]!r}; give its path, or put it on the PATH")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRoom:
    """A black-box agent's command and the paths that it may use.

    command: the agent's command line. place: an existing private folder, the only writable one except `writes`.
    reads, writes: further paths that it may use. hidden: paths that it may never read or write. unread: the same, except for
    paths named in `reads` or the command. folder: its working directory; None: ours.
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
        """The limits as a `Confinement`. Raises: OSError for a folder that cannot be listed."""
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
        """Files and folders that the command names."""
        return [Path(word) for word in self.command[1:] if _exists(word) and not _holds_home(Path(word).resolve())]


def files_of(command: Sequence[str]) -> list[Path]:
    """Files and folders that a command names, except the machine's programs and the working directory."""
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
    """The folders of a program and its installation: `bin` and its neighbours, also behind symbolic links."""
    found: list[Path] = []
    for folder in (program.parent, program.resolve().parent):
        around = folder.resolve().parent
        whole = folder.name == "bin" and not _holds_home(around) and around != Path.home() / ".local"
        found.append(around if whole else folder.resolve())
    if program.resolve() == Path(sys.executable).resolve():
        found.append(Path(sys.base_prefix).resolve())
    return [program.resolve(), *(path for path in found if not _holds_home(path))]


def _without(wanted: Iterable[Path], shut: Collection[Path]) -> tuple[list[Path], list[Path]]:
    """`wanted` without `shut`: the paths that may be used whole, and the folders of which only the names may be listed."""
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
        # Leave links out, or their targets would become accessible too.
        line += [Path(entry.path) for entry in os.scandir(path) if not entry.is_symlink()]
    return list(whole), list(listed)
