"""Where files live: one user data directory and one cache. Reads the environment on each call, never on import."""

from __future__ import annotations

import errno
import os
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import foundation

if TYPE_CHECKING:
    from platformdirs import PlatformDirs

_IN_CLONE = {"studies": "studies", "migrations": "db/migrations"}


def packages_root() -> Path:
    """Return the folder that contains our packages."""
    return Path(foundation.__file__).resolve().parents[1]


def python_path(environ: Mapping[str, str]) -> str:
    """Return a PYTHONPATH with which a process in any folder imports the same code as this one.

    Omits our own folder if we are installed: Python finds it anyway, and it must not shadow an instrument's packages.
    """
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    own = [] if packages_root() in installed else [str(packages_root())]
    return os.pathsep.join([*own, *filter(None, [environ.get("PYTHONPATH")])])


def shipped(name: str) -> Path:
    """Return a folder that ships with our code: `studies` or `migrations`. A wheel has them as package data (setup.py)."""
    installed = packages_root() / "researcher" / "shipped" / name
    return installed if installed.is_dir() else packages_root() / _IN_CLONE[name]


def user_data_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the home of studies and records: `RESEARCHER_HOME`, else the platform's user data directory."""
    given = (os.environ if environ is None else environ).get("RESEARCHER_HOME")
    return Path(given).expanduser().resolve() if given else _platform().user_data_path


def model_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for downloaded models: `SWARM_MODELS`, else a folder in the user's cache."""
    given = (os.environ if environ is None else environ).get("SWARM_MODELS")
    return Path(given).expanduser().resolve() if given else user_cache_dir() / "models"


def user_cache_dir() -> Path:
    """Return the platform's cache directory, for files that can be regenerated."""
    return _platform().user_cache_path


def _platform() -> PlatformDirs:
    # Imported here, not at the top: clients on other machines do not need platformdirs and may not have it.
    from platformdirs import PlatformDirs

    return PlatformDirs("swarm-researcher", appauthor=False)


def memory_dir() -> Path:
    """Return the system's in-memory directory (`/dev/shm`) if it has a writable one, else the temporary directory."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def visible_files(folder: Path) -> list[tuple[str, Path]]:
    """Return the files under `folder` with their relative names, sorted, without caches and hidden files."""
    found = []
    for file in folder.rglob("*"):
        parts = file.relative_to(folder).parts
        if not file.is_file() or file.suffix == ".pyc" or any(p.startswith(".") or p == "__pycache__" for p in parts):
            continue
        found.append(("/".join(parts), file))
    return sorted(found)


def last_bytes(file: BinaryIO, most: int) -> bytes:
    """Return at most the last `most` bytes of an open file."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - most))
    return file.read(most)


def is_full(error: OSError) -> bool:
    """True if the error means that the disk is full or the user's quota is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` so that `path` holds either the old content or all of the new, even after a power failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    synchronise(path.parent)


def synchronise(path: Path) -> None:
    """Flush a file or a folder to disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
