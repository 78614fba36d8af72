"""Where files live: one user data directory, one cache. Environment is read when asked, never on import."""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import foundation


def packages_root() -> Path:
    """Where our packages lie."""
    return Path(foundation.__file__).resolve().parents[1]


def python_path(environ: Mapping[str, str]) -> str:
    """The PYTHONPATH with which a process finds the same code of ours as this one, from whatever folder it is started.

    Where we are installed among other packages, every Python of ours finds us, and theirs would stand before an instrument's own.
    """
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    own = [] if packages_root() in installed else [str(packages_root())]
    return os.pathsep.join([*own, *filter(None, [environ.get("PYTHONPATH")])])


def user_data_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Home of studies and records: `RESEARCHER_HOME`, else the platform's user data directory."""
    env = os.environ if environ is None else environ
    if env.get("RESEARCHER_HOME"):
        return Path(env["RESEARCHER_HOME"]).expanduser().resolve()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "swarm-researcher"
    return _xdg(env, "XDG_DATA_HOME", Path.home() / ".local" / "share") / "swarm-researcher"


def model_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where fetched models are kept: `SWARM_MODELS`, else in the user's cache."""
    env = os.environ if environ is None else environ
    if env.get("SWARM_MODELS"):
        return Path(env["SWARM_MODELS"]).expanduser().resolve()
    return user_cache_dir(env) / "models"


def user_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """What can be made again, in the platform's cache directory."""
    env = os.environ if environ is None else environ
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "swarm-researcher"
    return _xdg(env, "XDG_CACHE_HOME", Path.home() / ".cache") / "swarm-researcher"


def _xdg(env: Mapping[str, str], name: str, usual: Path) -> Path:
    """Relative paths are ignored. Source: XDG Base Directory Specification 0.8."""
    given = Path(os.path.expanduser(env.get(name, "")))
    return given if given.is_absolute() else usual


def memory_dir() -> Path:
    """A directory in memory where the system has one (`/dev/shm`), else the temporary directory."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def visible_files(folder: Path) -> list[tuple[str, Path]]:
    """The files under `folder` by their names in it, sorted; caches and hidden files are left out."""
    found = []
    for file in folder.rglob("*"):
        parts = file.relative_to(folder).parts
        if not file.is_file() or file.suffix == ".pyc" or any(p.startswith(".") or p == "__pycache__" for p in parts):
            continue
        found.append(("/".join(parts), file))
    return sorted(found)


def last_bytes(file: BinaryIO, most: int) -> bytes:
    """The end of a file that is open, `most` bytes of it."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - most))
    return file.read(most)


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` so that `path` holds either the old content or all of the new, even after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    synchronise(path.parent)


def synchronise(path: Path) -> None:
    """Have the disk hold what a file contains, or which names a folder has, as it is now."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
