"""Work that all ranks do at once and that fails on all of them where it fails on one. Knows torch's groups, nothing of verl."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed


def together(work: Callable[[], object]) -> None:
    """Do it on every rank, each for itself, and wait for all.

    Barriers within it are left out: the ranks would wait there for one that failed. No other exchange between ranks may be in it.

    Raises: OSError or RuntimeError, on every rank, by the reason of the first one that failed.
    """
    failed: OSError | RuntimeError | None = None
    try:
        with _waiting_for_none():
            work()
    except (OSError, RuntimeError) as error:  # torch says a disk is full by the latter
        failed = error
    outcomes: list[tuple[int | None, str, str | None] | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(outcomes, failed and _told(failed))
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            number, words, file = outcome
            reason = f"rank {rank}: {words}"
            raise (RuntimeError(reason) if number is None else OSError(number, reason, file)) from failed


@contextmanager
def _waiting_for_none() -> Iterator[None]:
    """Barriers do nothing. verl's stand in the midst of its writing, and take no word for it."""
    torch_distributed: Any = torch.distributed
    barrier = torch_distributed.barrier
    torch_distributed.barrier = lambda *_, **__: None
    try:
        yield
    finally:
        torch_distributed.barrier = barrier


def _told(error: OSError | RuntimeError) -> tuple[int | None, str, str | None]:
    """The system's number of it, the words, the file; as every rank can read them."""
    if not isinstance(error, OSError):
        return None, str(error), None
    file = None if error.filename is None else str(error.filename)
    return error.errno or 0, error.strerror or str(error), file
