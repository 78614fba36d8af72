"""The state directory: one server at a time, one model for life."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.server.state_dir import StateDir, StateDirFault


def test_a_second_server_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with (
        StateDir.open(tmp_path / "state", model="m"),
        pytest.raises(StateDirFault, match=f"pid {os.getpid()}"),
    ):
        StateDir.open(tmp_path / "state", model="m")


def test_the_lock_ends_with_its_process_even_when_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom swarm.server.state_dir import StateDir\n"
        "state = StateDir.open(Path(sys.argv[1]), model='m')\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path / "state")], check=False)
    assert ended.returncode == -9
    StateDir.open(tmp_path / "state", model="m").close()


def test_it_says_where_the_server_listens_until_an_orderly_end(tmp_path: Path) -> None:
    with StateDir.open(tmp_path / "state", model="m") as state:
        state.announce("http://127.0.0.1:9", "server-1")
        told = json.loads((tmp_path / "state" / "server.json").read_text())
        assert told == {"url": "http://127.0.0.1:9", "pid": os.getpid(), "server_id": "server-1", "model": "m"}
    assert not (tmp_path / "state" / "server.json").exists()


def test_another_models_directory_is_refused(tmp_path: Path) -> None:
    StateDir.open(tmp_path / "state", model="one").close()
    with pytest.raises(StateDirFault, match="belongs to model 'one'"):
        StateDir.open(tmp_path / "state", model="two")
    StateDir.open(tmp_path / "state", model="one").close()


def test_a_directory_with_other_peoples_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(StateDirFault, match="thesis"):
        StateDir.open(tmp_path, model="m")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["thesis.tex"]


def test_a_file_in_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(StateDirFault, match="cannot use the state directory"):
        StateDir.open(tmp_path / "state", model="m")
