"""Work that all ranks do together, and that fails on all of them if it fails on one. Knows torch's groups, nothing of verl."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed

from swarm.engine.training.session import is_out_of_memory

_WRITER = "inline_container"
"""C++ file with which torch writes to disk. If the disk is full, torch's error names this file instead of giving the system's own
error."""


def on_all_or_none(work: Callable[[], object]) -> None:
    """Run `work` on every rank, each on its own, and wait for all ranks.

    Barriers within `work` are skipped: the ranks would wait there for a rank that failed. Otherwise `work` must not communicate between
    ranks.
    Raises: OSError, torch.OutOfMemoryError or RuntimeError on every rank, with the reason of the first rank that failed.
    """
    failed: Exception | None = None
    try:
        with _waiting_for_none():
            work()
    except Exception as error:  # noqa: BLE001  # the others wait for this rank, whatever its error
        failed = error
    outcomes: list[tuple[int | None, str, str | None] | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(outcomes, failed and _described(failed))
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            number, words, file = outcome
            reason = f"rank {rank}: {words}"
            if number == errno.ENOMEM:
                raise torch.OutOfMemoryError(reason) from failed
            raise (RuntimeError(reason) if number is None else OSError(number, reason, file)) from failed


@contextmanager
def _waiting_for_none() -> Iterator[None]:
    """Make barriers do nothing. verl calls them in the middle of its writing, with no option to leave them out."""
    torch_distributed: Any = torch.distributed
    barrier = torch_distributed.barrier
    torch_distributed.barrier = lambda *_, **__: None
    try:
        yield
    finally:
        torch_distributed.barrier = barrier


def _described(error: Exception) -> tuple[int | None, str, str | None]:
    """Return the error's number, message and file, in a form that every rank can read."""
    if isinstance(error, OSError):
        file = None if error.filename is None else str(error.filename)
        return error.errno or 0, error.strerror or str(error), file
    if isinstance(error, RuntimeError) and _WRITER in str(error):
        return errno.EIO, f"torch could not write a file, as on a full disk ({error})", None
    if isinstance(error, RuntimeError):
        return errno.ENOMEM if is_out_of_memory(error) else None, str(error), None
    return None, f"{type(error).__name__}: {error}", None
