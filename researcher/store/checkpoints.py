"""LangGraph checkpoints in the researcher's database, so that a graph can continue where it stopped."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver

from researcher.store.database import sqlite_file
from researcher.store.retries import PATIENCE_S, is_held, of_driver, patiently

_BUSY_S = 20.0
PLANNING_PATIENCE_S = 60.0
"""Seconds to wait for an unreachable database while planning. Short, because a person is waiting and Ctrl-C takes effect only
afterwards."""

T = TypeVar("T")
Saver = BaseCheckpointSaver[str]


def with_saver(url: str | None, work: Callable[[Saver | None], T], patience_s: float | None = None) -> T:
    """Call `work` with a LangGraph saver on the database at `url` (SQLite or PostgreSQL), or with None if `url` is None.

    While the database is unreachable or locked, `work` is restarted; it must resume from its own checkpoints. `patience_s` is
    how long to retry, by default ten minutes.

    Raises: DatabaseAway when that time is over; OSError when SQLite's disk fails.
    """
    if url is None:
        return work(None)

    def once() -> T:
        with _saver_in(url) as saver:
            return work(saver)

    return patiently(once, patience_s or PATIENCE_S)


def caught_up(graph: Any, config: RunnableConfig) -> Any:
    """Finish the step that an outage or a crash interrupted, if any. Return the graph's state at its next question or its end."""
    state = graph.get_state(config)
    if state.tasks and not state.interrupts:
        graph.invoke(None, config, durability="sync")
        state = graph.get_state(config)
    return state


@contextmanager
def _saver_in(url: str) -> Iterator[Saver]:
    """Open a saver. Raises: DBAPIError when the database is unreachable or locked; OSError when SQLite's disk fails."""
    file = sqlite_file(url)
    if file is not None:
        connection = sqlite3.connect(file, check_same_thread=False, timeout=_BUSY_S)
        try:
            yield SqliteSaver(connection)
        except sqlite3.OperationalError as error:
            if is_held(held := of_driver(error)):
                raise held from error
            raise OSError(
                f"the plan cannot be saved in {file}: {error}; make room on that disk, then start again"
            ) from error
        finally:
            connection.close()
    else:
        scheme, _, rest = url.partition("://")
        try:
            with PostgresSaver.from_conn_string(f"{scheme.split('+')[0]}://{rest}") as saver:
                saver.setup()
                yield saver
        except psycopg.OperationalError as error:
            raise of_driver(error) from error
