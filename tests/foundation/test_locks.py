"""Locks of files: who holds one, and file systems that keep none."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from foundation.clock import SystemClock
from foundation.ids import RandomIds
from foundation.locks import NoLocks, locked
from researcher.store.errors import NoTurns
from researcher.store.locks import turn
from researcher.store.retries import Retries
from swarm.models.cache import resolve
from swarm.models.sources import ModelUnavailable
from swarm.server.state_dir import StateDir, StateDirFault


def test_a_lock_is_one_holders_until_its_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as one, path.open("w") as other:
        assert locked(one, path, wait=False)
        assert not locked(other, path, wait=False)
        assert not locked(other, path, wait=False, shared=True)
        one.close()
        assert locked(other.fileno(), path, wait=False, shared=True)


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)


@pytest.mark.usefixtures("no_locks")
def test_a_file_system_without_locks_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as file, pytest.raises(NoLocks) as raised:
        locked(file, path)
    assert str(raised.value) == raised.value.strerror
    assert str(raised.value).startswith(f"{path} cannot be locked (No locks available): put its directory on")
    assert raised.value.errno == errno.ENOLCK


@pytest.mark.usefixtures("no_locks")
def test_whoever_needs_a_lock_and_can_have_none_fails_by_an_error_of_its_own(tmp_path: Path) -> None:
    database = create_engine(f"sqlite:///{tmp_path / 'researcher.db'}")
    retries = Retries(database, SystemClock(), RandomIds())
    with pytest.raises(NoTurns, match="cannot be locked"), turn(database, retries, "copies"):
        pass
    with pytest.raises(StateDirFault, match="cannot be locked"):
        StateDir.open(tmp_path / "state", model="m")
    with pytest.raises(ModelUnavailable, match=r"cannot be locked .*; set SWARM_MODELS to another"):
        resolve("smollm2-135m", cache=tmp_path / "models")
