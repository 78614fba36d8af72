"""Client processes that begin each phase together. The bench provides their work."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from queue import Empty
from typing import Any

_LOOK_S = 1.0
"""Interval at which we check that all processes are alive."""


def together(work: Callable[..., Any], shares: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run `work(*share, barrier)` in one process per share; returns the results. The barrier spans all processes.

    Raises: RuntimeError as soon as a process fails; then ends the others.
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
    """Size of part `index` when `whole` is split into `parts` nearly equal parts."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    results.put(work(*share, barrier))
