"""What one rank cannot do fails on all of them, by its reason, and none waits for another for ever."""

from __future__ import annotations

import errno
import multiprocessing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as group

from swarm.engine.verl.collective import on_all_or_none

RANKS = 2
TORCHS = "rank 1: torch could not write a file, as on a full disk (at inline_container.cc:672)"


def _rank(rank: int, meeting: str, failure: Exception | None, said: multiprocessing.Queue[object]) -> None:
    store = group.FileStore(meeting, RANKS)
    group.init_process_group("gloo", rank=rank, world_size=RANKS, store=store, timeout=timedelta(seconds=30))

    def save() -> None:
        if rank == 1 and failure is not None:
            raise failure
        group.barrier()

    try:
        for _ in range(2):  # a rank that failed is in step with the others afterwards
            try:
                on_all_or_none(save)
                said.put("done")
            except (OSError, RuntimeError) as error:
                said.put((type(error).__name__, getattr(error, "errno", None), str(error)))
        group.barrier()
    finally:
        group.destroy_process_group()


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (None, "done"),
        (OSError(errno.ENOSPC, "No space left", "/x"), ("OSError", 28, "[Errno 28] rank 1: No space left: '/x'")),
        (RuntimeError("at inline_container.cc:672"), ("OSError", errno.EIO, f"[Errno {errno.EIO}] {TORCHS}")),
        (torch.OutOfMemoryError("CUDA out of memory"), ("OutOfMemoryError", None, "rank 1: CUDA out of memory")),
        (ValueError("no such type"), ("RuntimeError", None, "rank 1: ValueError: no such type")),
    ],
    ids=["all can", "a full disk", "torch's writer", "out of memory", "anything else"],
)
def test_every_rank_hears_why_one_failed(tmp_path: Path, failure: Exception | None, outcome: object) -> None:
    spawned = multiprocessing.get_context("spawn")
    said = spawned.Queue()
    ranks = [spawned.Process(target=_rank, args=(rank, str(tmp_path / "m"), failure, said)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    try:
        assert [said.get(timeout=60) for _ in range(2 * RANKS)] == [outcome] * 2 * RANKS
        for process in ranks:
            process.join(30)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
