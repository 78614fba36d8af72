"""Plain functions in threads that keep no process from ending. Knows no swarm."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from swarm.client.tasks import as_runtime_error

T = TypeVar("T")


class DaemonThread:
    """A thread that does one piece of work after the other until it is closed; whoever closes it does not wait for it."""

    def __init__(self, whose: str) -> None:
        """whose: what its work is called in an error."""
        self._whose = whose
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=whose, daemon=True).start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def begin(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Its answer, or its error as one that may be raised in an event loop too."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()
        answer.set_running_or_notify_cancel()
        self._work.put(partial(_answer, work, self._whose, answer))
        return answer

    def close(self) -> None:
        """It ends after what was begun."""
        self._work.put(None)


def begin_in_thread(work: Callable[[], T], whose: str) -> concurrent.futures.Future[T]:
    """`work` in a thread of its own, which nobody has to wait for. whose: what it is called in an error."""
    thread = DaemonThread(whose)
    answer = thread.begin(work)
    thread.close()
    return answer


def _answer(work: Callable[[], T], whose: str, answer: concurrent.futures.Future[T]) -> None:
    try:
        answer.set_result(work())
    except StopIteration as error:
        answer.set_exception(as_runtime_error(error, whose))
    except BaseException as error:  # noqa: BLE001 - it is raised to whoever waits
        answer.set_exception(error)
