"""The directory of the inference socket: nobody else's, short, and not left behind."""

from __future__ import annotations

import stat
from pathlib import Path

from swarm.engine.local.inference import _private_dir


def test_the_directory_is_private_and_replaces_what_a_killed_server_left(tmp_path: Path) -> None:
    note = tmp_path / "logs" / "inference.socket-dir"
    first = _private_dir(note)
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    assert len(str(first / "vllm.sock")) <= 107
    second = _private_dir(note)
    assert not first.exists()
    assert second.exists()
    second.rmdir()


def test_a_note_that_names_something_else_removes_nothing(tmp_path: Path) -> None:
    note, precious = tmp_path / "note", tmp_path / "precious"
    precious.mkdir()
    note.write_text(str(precious))
    _private_dir(note).rmdir()
    assert precious.exists()
