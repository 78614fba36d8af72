from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.engine.local.weight_slots import WeightSlots

_HOLDER = """
import sys
from pathlib import Path
from swarm.engine.local.weight_slots import WeightSlots
room = WeightSlots(Path(sys.argv[1]))
room.open()
print(room.path, flush=True)
sys.stdin.read()
"""


def test_a_killed_server_s_room_is_removed_by_the_next_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    living, room = WeightSlots(tmp_path), WeightSlots(tmp_path)
    living.open()
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        left = Path(killed.stdout.readline().strip())
        assert left.is_dir()
        killed.send_signal(signal.SIGKILL)
    room.open()
    try:
        assert not left.exists()
        assert living.path is not None
        assert (living.path / "a" / "config.json").read_text() == "{}"
    finally:
        paths = [living.path, room.path]
        living.close()
        room.close()
    assert not any(path is not None and path.exists() for path in paths)


def test_the_served_slot_is_never_the_free_one(tmp_path: Path) -> None:
    room = WeightSlots(tmp_path)
    room.open()
    try:
        first = room.free_slot()
        room.serves(first)
        assert room.free_slot() != first
    finally:
        room.close()


def test_room_for_both_slots_is_taken_beforehand(tmp_path: Path) -> None:
    room = WeightSlots(tmp_path)
    room.open()
    try:
        room.reserve(1 << 20)
        assert room.path is not None
        assert [(room.path / slot / WeightSlots.FILE).stat().st_blocks * 512 for slot in "ab"] == [1 << 20, 1 << 20]
    finally:
        room.close()


def test_a_room_without_space_is_opened_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    room = WeightSlots(tmp_path)
    room.open()
    try:
        room.reserve(1 << 60)
        assert room.path is not None
        assert "no room for weights" in caplog.text
        assert (room.path / "a" / WeightSlots.FILE).stat().st_size == 0
    finally:
        room.close()


def test_a_room_that_cannot_be_made_anew_is_tried_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    room = WeightSlots(tmp_path)
    room.open()
    try:
        lost = room.path
        assert lost is not None
        shutil.rmtree(lost)
        rooms = set(lost.parent.glob("swarm-weights-*"))
        with monkeypatch.context() as full:
            full.setattr(shutil, "copyfile", no_space)
            with pytest.raises(OSError, match="No space left"):
                room.restore()
        assert set(lost.parent.glob("swarm-weights-*")) <= rooms
        assert room.path == lost
        room.restore()
        assert room.path not in (None, lost)
        assert (room.free_slot() / "config.json").read_text() == "{}"
    finally:
        room.close()


def test_a_slot_that_somebody_removed_is_made_anew_beside_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    room = WeightSlots(tmp_path)
    room.open()
    try:
        served = room.free_slot()
        (served / WeightSlots.FILE).write_bytes(b"weights")
        room.serves(served)
        free = room.free_slot()
        shutil.rmtree(free)
        with monkeypatch.context() as full:
            full.setattr(shutil, "copyfile", no_space)
            with pytest.raises(OSError, match="No space left"):
                room.restore()
        room.restore()
        assert (served / WeightSlots.FILE).read_bytes() == b"weights"
        assert room.free_slot() == free
        assert (free / "config.json").read_text() == "{}"
    finally:
        room.close()


def no_space(*_: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
