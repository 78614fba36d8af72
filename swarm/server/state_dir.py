"""A server's state directory: everything needed to restart the server after `kill -9`.

lock          held while a server runs, with its pid; the kernel releases it when the process dies
identity.json server_id and model, for the life of the directory
server.json   url, pid and server_id of the server that runs here now
secret        for creating team keys and encrypting stored ones, mode 0600
pool/         episodes, journal, ledger           runs/<run_id>/   checkpoints
hosted.json   the hosted model's folder and fingerprint, for commands that read a run without a server
engine/       files of the engine's child processes   logs/        their output
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Self

from foundation.locks import NoLocks, locked
from foundation.paths import write_atomically
from swarm.protocol.errors import SwarmError

_LAYOUT = 1
HOSTED = "hosted.json"


class StateDirFault(SwarmError):
    """The directory cannot be used. The message is one line for the operator."""


class StateDir:
    """A state directory. Only one server at a time can open it.

    Raises: StateDirFault, from `open`, if another server holds the directory, or if it belongs to a different model or cannot be
    written.
    """

    def __init__(self, path: Path, lock_fd: int, model: str) -> None:
        self.path = path
        self.model = model
        self._lock_fd = lock_fd

    @classmethod
    def open(cls, path: Path, *, model: str) -> StateDir:
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            _refuse_strangers(path)
            lock_fd = _lock(path)
        except OSError as error:
            raise StateDirFault(f"cannot use the state directory {path}: {error.strerror}") from error
        try:
            _check_identity(path, model)
            for folder in ("pool", "runs", "engine", "logs"):
                (path / folder).mkdir(exist_ok=True)
        except OSError as error:
            os.close(lock_fd)
            raise StateDirFault(f"cannot write in the state directory {path}: {error.strerror}") from error
        except StateDirFault:
            os.close(lock_fd)
            raise
        return cls(path, lock_fd, model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def secret_path(self) -> Path:
        return self.path / "secret"

    @property
    def pool_dir(self) -> Path:
        return self.path / "pool"

    @property
    def runs_dir(self) -> Path:
        return self.path / "runs"

    @property
    def logs_dir(self) -> Path:
        return self.path / "logs"

    def note_model(self, folder: Path | None, fingerprint: str | None) -> None:
        """Record the folder of the hosted model; None if it has no weights. The file is written atomically."""
        facts = {"path": None if folder is None else str(folder), "fingerprint": fingerprint}
        write_atomically(self.path / HOSTED, json.dumps(facts).encode())

    def announce(self, url: str, server_id: str) -> None:
        """Record where the server listens. The file is written atomically."""
        facts = {"url": url, "pid": os.getpid(), "server_id": server_id, "model": self.model}
        write_atomically(self.path / "server.json", json.dumps(facts).encode())

    def close(self) -> None:
        """Remove the record of the running server, and release the lock."""
        (self.path / "server.json").unlink(missing_ok=True)
        os.close(self._lock_fd)


def _lock(path: Path) -> int:
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        ours = locked(fd, path / "lock", wait=False)
    except NoLocks:
        os.close(fd)
        raise
    if not ours:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StateDirFault(
            f"the state directory {path} is in use by a server with pid {holder}; "
            "stop that server, or choose another directory with --state-dir"
        )
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def _refuse_strangers(path: Path) -> None:
    """Refuse a directory that holds other programs' files."""
    ours = (path / "identity.json").exists()
    strangers = sorted(entry.name for entry in path.iterdir() if entry.name != "lock" and entry.suffix != ".tmp")
    if strangers and not ours:
        raise StateDirFault(
            f"{path} is not a state directory: it holds {strangers[0]!r} but no identity.json; "
            "choose an empty or new directory with --state-dir"
        )


def _check_identity(path: Path, model: str) -> None:
    """Claim a new directory for the model, or check that an existing directory belongs to it."""
    file = path / "identity.json"
    if not file.exists():
        write_atomically(file, json.dumps({"layout": _LAYOUT, "model": model}).encode())
        return
    found = _read_identity(file)["model"]
    if found != model:
        raise StateDirFault(
            f"the state directory {path} belongs to model {found!r}, not {model!r}; "
            "choose another directory with --state-dir"
        )


def _read_identity(file: Path) -> dict[str, Any]:
    try:
        facts = json.loads(file.read_bytes())
    except ValueError as error:
        raise StateDirFault(f"{file} is not readable JSON; restore it, or choose another directory") from error
    if not isinstance(facts, dict) or facts.get("layout") != _LAYOUT or "model" not in facts:
        raise StateDirFault(f"{file} was written by a different version of this server; choose another directory")
    return facts
