"""Where a rank and its part of a replica meet: nowhere that another server of this machine does."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from swarm.engine.verl.transfer import meeting, of_this_change

WORD = "0123456789abcdef"
MOST_BYTES = 107
"""What Linux takes for the path of a socket."""


def named(directory: Path, *, job: str = "01000000", rank: int = 0) -> str:
    """As verl names it."""
    return f"ipc://{directory}/rl-colocate-zmq-{job}-replica-0-rank-{rank}.sock"


def path(handle: str) -> Path:
    return Path(handle.removeprefix("ipc://"))


def test_two_servers_whose_clusters_have_one_number_meet_in_two_places() -> None:
    usual = named(Path("/tmp"))
    assert of_this_change(usual, "a" * 16) != of_this_change(usual, "b" * 16)
    assert of_this_change(usual, WORD) == of_this_change(usual, WORD)
    assert of_this_change(named(Path("/tmp"), rank=1), WORD) != of_this_change(usual, WORD)
    assert len(of_this_change(named(Path("/tmp"), job="ffffffff", rank=127), WORD)) <= MOST_BYTES


def test_a_rank_alone_may_enter_where_it_sends_and_leaves_nothing_there(tmp_path: Path) -> None:
    rank = types.SimpleNamespace(zmq_handle=named(tmp_path))
    with meeting(rank, WORD):
        assert rank.zmq_handle == of_this_change(named(tmp_path), WORD)
        folder = path(rank.zmq_handle).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        path(rank.zmq_handle).touch()
    assert rank.zmq_handle == named(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_someone_else_made_is_not_entered(tmp_path: Path) -> None:
    rank = types.SimpleNamespace(zmq_handle=named(tmp_path))
    path(of_this_change(named(tmp_path), WORD)).parent.mkdir()
    with pytest.raises(FileExistsError), meeting(rank, WORD):
        pass
    assert rank.zmq_handle == named(tmp_path)
