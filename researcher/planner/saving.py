"""Where LangGraph keeps its place: in the study's own database."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver

_BUSY_S = 20.0


@contextmanager
def saver_in(url: str | None) -> Iterator[BaseCheckpointSaver[str] | None]:
    """LangGraph's saver in that database, SQLite or PostgreSQL; None for no database. Raises: OSError when SQLite's disk fails."""
    if url is None:
        yield None
    elif url.startswith("sqlite:///"):
        file = url.removeprefix("sqlite:///")
        connection = sqlite3.connect(file, check_same_thread=False, timeout=_BUSY_S)
        try:
            yield SqliteSaver(connection)
        except sqlite3.OperationalError as error:
            raise OSError(
                f"the plan cannot be kept in {file}: {error}; make room on that disk, then start again"
            ) from error
        finally:
            connection.close()
    else:
        scheme, _, rest = url.partition("://")
        with PostgresSaver.from_conn_string(f"{scheme.split('+')[0]}://{rest}") as saver:
            saver.setup()
            yield saver
