"""Checkpoints of several ranks, as files: whole or not there, and never taken for another engine's."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.engine.seam import EngineError
from swarm.engine.training.checkpoints import Checkpoint, TrainerState, newest, put_back, ranks_of, require_whole, steps
from swarm.engine.verl import checkpoints
from swarm.protocol.runspec import RunSpec

RANKS = 2


def state(step: int) -> TrainerState:
    return TrainerState(run_id="run-1", branch=0, step=step, fingerprint="f" * 64, spec=RunSpec(), random_state="00")


def ranks(count: int = RANKS) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        for kind in ("model", "optim", "extra_state"):
            for rank in range(count):
                (folder / f"{kind}_world_size_{RANKS}_rank_{rank}.pt").write_bytes(b"some weights")

    return save


def write(directory: Path, *all_steps: int, best: int | None = None) -> None:
    for step in all_steps:
        checkpoints.write(directory, state(step), ranks(), ranks=RANKS, keep=2, best=best)


def found(directory: Path) -> Checkpoint:
    newest_one = newest(directory, checkpoints.read)
    assert newest_one is not None
    return newest_one


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4, best=1)
    assert steps(tmp_path) == [1, 3, 4]
    assert found(tmp_path).state.step == 4


def test_what_a_rank_did_not_write_leaves_no_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(EngineError, match="are missing from"):
        checkpoints.write(tmp_path, state(2), ranks(1), ranks=RANKS, keep=2)
    assert steps(tmp_path) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_wrote_a_checkpoint_can_be_asked_without_opening_it(tmp_path: Path) -> None:
    write(tmp_path, 1)
    assert ranks_of(tmp_path, 1) == RANKS
    assert ranks_of(tmp_path, 2) == 0


def test_the_checkpoint_of_a_step_is_there_until_another_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == ".unfinished-1":
            raise OSError(errno.EIO, "Input/output error", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path, 1)
    assert checkpoints.read(tmp_path, 1).state.step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("name", [".unfinished-replaced-1", ".unfinished-replaced-step-00000001"])
def test_the_next_write_puts_back_what_a_killed_one_was_replacing(tmp_path: Path, name: str) -> None:
    """The second as an earlier version called it."""
    write(tmp_path, 1)
    (tmp_path / "step-00000001").rename(tmp_path / name)
    write(tmp_path, 2)
    assert steps(tmp_path) == [1, 2]
    assert checkpoints.read(tmp_path, 1).state.step == 1


@pytest.mark.parametrize("name", ["step-00000001", ".unfinished-replaced-1", ".unfinished-replaced-step-00000001"])
def test_whether_a_checkpoint_is_whole_can_be_asked_without_opening_it(tmp_path: Path, name: str) -> None:
    write(tmp_path, 1)
    (tmp_path / "step-00000001").rename(tmp_path / name)
    require_whole(tmp_path, 1)
    with pytest.raises(EngineError, match="step-00000002 cannot be read"):
        require_whole(tmp_path, 2)
    (tmp_path / name / "model_world_size_2_rank_1.pt").write_bytes(b"other weights")
    with pytest.raises(EngineError, match="has changed since it was written"):
        require_whole(tmp_path, 1)


def test_what_was_replaced_comes_back_for_no_other_branch(tmp_path: Path) -> None:
    write(tmp_path, 3)
    write(tmp_path, 5)
    shutil.copytree(tmp_path / "step-00000005", tmp_path / ".unfinished-replaced-5")
    put_back(tmp_path)
    shutil.rmtree(tmp_path / "step-00000005")  # the run was restored to step 3
    write(tmp_path, 4)
    assert steps(tmp_path) == [3, 4]


def test_a_manifest_of_another_shape_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "step-00000002" / "manifest.json").write_text("[]")
    assert found(tmp_path).state.step == 1
