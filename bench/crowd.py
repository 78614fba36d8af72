"""Processes of clients that begin each phase together. What they do is the bench's."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from queue import Empty
from typing import Any

_LOOK_S = 1.0
"""So often it is seen whether all processes are alive."""


def together(work: Callable[..., Any], shares: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What `work(*share, barrier)` returned in a process for each share. The barrier waits for all of them.

    Raises: RuntimeError as soon as a process fails; the others are ended.
    """
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(len(shares)), context.Queue()
    workers = [context.Process(target=_work, args=(work, share, barrier, results), daemon=True) for share in shares]
    try:
        for worker in workers:
            worker.start()
        found = _gathered(results, workers)
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
    return found


def portion(whole: int, parts: int, index: int) -> int:
    """The size of one of the parts, which are as equal as can be."""
    return whole // parts + (index < whole % parts)


def _gathered(results: Any, workers: Sequence[BaseProcess]) -> list[Any]:
    found: list[Any] = []
    while len(found) < len(workers):
        try:
            found.append(results.get(timeout=_LOOK_S))
        except Empty:
            if any(worker.exitcode for worker in workers):
                raise RuntimeError("a client process failed; what it said stands above") from None
    return found


def _work(work: Callable[..., Any], share: tuple[Any, ...], barrier: Barrier, results: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    results.put(work(*share, barrier))
